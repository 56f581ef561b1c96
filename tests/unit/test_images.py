import io
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps

from lib import images
from lib.cuts import geometry, variants
from lib.images import (
    RECIPE,
    Facts,
    Geometry,
    ImageError,
    decode,
    facts_of,
    flatten,
    render,
)
from lib.keys import digest

sides = st.integers(1, 3000)
sizes = st.tuples(sides, sides)
units = st.floats(0, 1, exclude_max=True)
buckets = st.tuples(st.integers(1, 64), st.integers(1, 64)).map(lambda s: (s[0] * 16, s[1] * 16))


def photo(width=48, height=32):
    """A picture without symmetry, in which no two corners agree."""
    down, across = np.mgrid[0:height, 0:width]
    levels = np.stack([down * 7, across * 5, down * across], axis=-1) % 256
    return Image.fromarray(levels.astype(np.uint8))


def saved(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def array(image):
    return np.asarray(image).astype(int)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("JPEG", {"quality": 95, "subsampling": 0})],
)
def test_every_allowed_format_decodes_to_its_picture(kind, options):
    image = decode(saved(photo(), kind, **options))
    assert (image.mode, image.size) == ("RGB", (48, 32))
    assert abs(array(image) - array(photo())).mean() < (3 if kind == "JPEG" else 1e-9)


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "ICO"])
def test_every_other_format_is_refused(kind):
    with pytest.raises(ImageError, match="none of PNG, JPEG, WEBP"):
        decode(saved(photo(), kind))


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", bytes(200), b"text" * 9])
def test_bytes_that_are_no_picture_are_refused(data):
    with pytest.raises(ImageError):
        decode(data)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_all_eight_orientations_give_the_same_upright_pixels(orientation, kind):
    undo = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]
    stored = photo() if undo is None else photo().transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    image = decode(saved(stored, kind, exif=exif, **options))
    assert array(image).tolist() == array(photo()).tolist()


def shown(data, background="#102030"):
    """A pixel of a file's picture over a background."""
    return flatten(decode(data), background).getpixel((8, 8))


def test_transparency_shows_the_declared_background():
    hidden = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    assert shown(saved(hidden)) == (16, 32, 48)
    assert shown(saved(hidden, icc_profile=profile())) == (16, 32, 48)
    half = Image.new("RGBA", (16, 16), (0, 0, 0, 128))
    assert shown(saved(half), "#ffffff") == (127, 127, 127)


def test_what_is_opaque_everywhere_is_opaque():
    assert decode(saved(Image.new("RGBA", (16, 16), (9, 8, 7, 255)))).mode == "RGB"
    assert not facts_of(saved(Image.new("RGBA", (16, 16), (9, 8, 7, 255)))).transparent
    assert facts_of(saved(Image.new("RGBA", (16, 16), (9, 8, 7, 254)))).transparent


def test_the_background_is_there_before_the_resize():
    """Else the hidden colour bleeds into what is seen."""
    image = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 16, 32))
    cut = replace(geometry((32, 32), bucket=(16, 16)), background="#0000ff")
    pixels = render(decode(saved(image)), cut)
    assert (pixels[0].max(), pixels[2].min()) == (-1, 1)


@pytest.mark.parametrize("mode", ["P", "L", "RGB", "1"])
def test_a_transparent_colour_of_any_mode_shows_the_background(mode):
    image = Image.new(mode, (16, 16), 0)
    if mode == "P":
        image.putpalette([200, 10, 10, 0, 0, 255])
    transparent = (0, 0, 0) if mode == "RGB" else 0
    assert shown(saved(image, transparency=transparent)) == (16, 32, 48)


def test_grey_with_alpha_stays_grey():
    image = decode(saved(Image.new("LA", (16, 16), (100, 255))))
    assert image.getpixel((3, 3)) == (100, 100, 100)


def test_sixteen_bit_grey_is_scaled_not_cut():
    levels = np.array([[0, 128, 129, 257 * 77, 65534, 65535, 32896, 386] * 2] * 16, np.uint16)
    image = decode(saved(Image.fromarray(levels)))
    expected = np.floor(levels / 257 + 0.5).astype(int)
    assert array(image)[..., 0].tolist() == expected.tolist()


def test_a_transparent_level_of_sixteen_bits_shows_the_background():
    levels = np.full((16, 16), 1000, np.uint16)
    levels[:8] = 1001
    image = decode(saved(Image.fromarray(levels), transparency=1001))
    assert flatten(image, "#102030").getpixel((0, 0)) == (16, 32, 48)
    assert flatten(image, "#102030").getpixel((0, 15)) == (4, 4, 4)


def test_cmyk_red_is_red():
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    red, green, blue = decode(saved(image, "JPEG", quality=95)).getpixel((8, 8))
    assert red > 240
    assert max(green, blue) < 15


def without_adobe_marker(data):
    start = data.index(b"\xff\xee")
    length = int.from_bytes(data[start + 2 : start + 4], "big")
    return data[:start] + data[start + 2 + length :]


def test_cmyk_is_inverted_as_its_adobe_marker_says():
    """Only Adobe's files hold ink as 255 minus ink."""
    marked = saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)
    plain = without_adobe_marker(
        saved(Image.new("CMYK", (16, 16), (255, 0, 0, 255)), "JPEG", quality=95)
    )
    for data in (marked, plain):
        red, green, blue = decode(data).getpixel((8, 8))
        assert red > 240 > 15 > max(green, blue)


def profile(name="sRGB"):
    return ImageCms.ImageCmsProfile(ImageCms.createProfile(name)).tobytes()


def swapped_primaries():
    """An sRGB profile whose red and green primaries have changed places."""
    return profile().replace(b"rXYZ", b"#XYZ").replace(b"gXYZ", b"rXYZ").replace(b"#XYZ", b"gXYZ")


def test_an_embedded_srgb_profile_changes_nothing_visible():
    image = decode(saved(photo(), icc_profile=profile()))
    assert abs(array(image) - array(photo())).max() <= 1


def test_an_embedded_profile_is_applied():
    red = Image.new("RGB", (16, 16), (250, 0, 0))
    pixel = decode(saved(red, icc_profile=swapped_primaries())).getpixel((8, 8))
    assert pixel[1] > 200 > 60 > pixel[0]


def test_a_grey_picture_with_an_rgb_profile_is_accepted():
    image = decode(saved(Image.new("L", (16, 16), 100), icc_profile=profile()))
    assert abs(array(image) - 100).max() <= 1


@pytest.mark.parametrize("broken", [b"0123456789", profile()[:200], profile("LAB")])
def test_an_unusable_profile_is_named(broken):
    with pytest.raises(ImageError, match="colour profile"):
        decode(saved(photo(), icc_profile=broken))


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {"quality": 80})],
)
def test_a_file_cut_anywhere_is_refused_or_whole(kind, options):
    data = saved(photo(), kind, **options)
    whole = decode(data).tobytes()
    for length in range(0, len(data) - 12, 7):
        with pytest.raises(ImageError):
            decode(data[:length])
    for length in range(len(data) - 12, len(data)):
        try:
            assert decode(data[:length]).tobytes() == whole
        except ImageError:
            continue


@pytest.mark.parametrize("place", [0.2, 0.5, 0.8])
def test_a_flipped_bit_in_a_png_is_noticed(place):
    data = bytearray(saved(photo()))
    data[int(len(data) * place)] ^= 0x10
    with pytest.raises(ImageError):
        decode(bytes(data))


# Pillow warns of damaged metadata that it can read past; under pytest a warning would be an error.
@pytest.mark.filterwarnings("ignore::UserWarning")
@given(st.sampled_from(["PNG", "JPEG", "WEBP"]), st.data())
def test_any_damage_ends_in_a_picture_or_a_named_refusal(kind, data):
    damaged = bytearray(saved(photo(16, 16), kind))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        image = decode(bytes(damaged))
    except ImageError:
        return
    assert image.mode in ("RGB", "RGBA")


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_of_an_animation_the_first_frame_is_decoded_and_told_as_such(kind):
    frames = [Image.new("RGB", (32, 32), colour) for colour in ("red", "green", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert facts_of(data) == Facts(32, 32, transparent=False, animated=True)
    assert decode(data).getpixel((8, 8)) == (255, 0, 0)


def test_of_a_multi_picture_jpeg_the_first_is_taken():
    data = saved(photo(), "MPO", save_all=True, append_images=[photo(16, 16)], quality=95)
    assert facts_of(data) == Facts(32, 48, transparent=False, animated=False)


def test_a_jpeg_of_endless_scans_is_refused_before_decoding(monkeypatch):
    data = saved(photo(), "JPEG", progressive=True)
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded"))
    with pytest.raises(ImageError, match="over 1000 scans"):
        decode(data + b"\xff\xda" * 1001)


def test_a_webp_of_too_many_pixels_is_refused_before_it_is_opened(monkeypatch):
    sides = (16000).to_bytes(3, "little") * 2
    data = b"RIFF\x24\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0" + sides + bytes(16)
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(ImageError, match="pixels"):
        decode(data)


def test_want_of_memory_is_a_named_refusal(monkeypatch):
    def fail(_):
        raise MemoryError

    data = saved(photo())
    monkeypatch.setattr(images, "_upright", fail)
    with pytest.raises(ImageError, match="more memory than there is"):
        decode(data)


@pytest.mark.parametrize("size", [(9000, 8000), (20000, 9500)])
def test_too_many_pixels_are_refused_before_decoding(size, monkeypatch):
    data = saved(Image.new("1", size))
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded"))
    with pytest.raises(ImageError, match="pixels"):
        decode(data)


@pytest.mark.parametrize("size", [(1, 1), (7, 64), (64, 7), (2000, 16)])
def test_slivers_are_refused_with_their_size(size):
    with pytest.raises(ImageError, match=f"{size[1]}x{size[0]}"):
        decode(saved(Image.new("RGB", size)))


def test_the_recipe_can_enter_a_key_and_be_written():
    assert digest(json.loads(json.dumps(RECIPE))) == digest(RECIPE)


@given(sizes, buckets, st.none() | st.tuples(units, units), st.booleans())
def test_a_crop_lies_inside_a_picture_that_just_covers_its_bucket(size, bucket, crop, flip):
    made = geometry(size, bucket=bucket, crop=crop, flip=flip)
    assert (made.height, made.width) == bucket
    assert made.resized_height == bucket[0] or made.resized_width == bucket[1]
    assert 0 <= made.top <= made.resized_height - made.height
    assert 0 <= made.left <= made.resized_width - made.width
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    assert abs(made.resized_height - size[0] * scale) <= 0.5 + 1e-6 * made.resized_height
    assert abs(made.resized_width - size[1] * scale) <= 0.5 + 1e-6 * made.resized_width


@given(sizes, buckets)
def test_the_centre_crop_is_the_floor_of_half_the_slack(size, bucket):
    made = geometry(size, bucket=bucket)
    assert made.top == (made.resized_height - bucket[0]) // 2
    assert made.left == (made.resized_width - bucket[1]) // 2


def test_unit_fractions_reach_both_ends_of_the_range():
    first = geometry((64, 67), bucket=(64, 64), crop=(0.0, 0.0))
    last = geometry((64, 67), bucket=(64, 64), crop=(0.0, 1.0))
    assert (first.left, last.left) == (0, 3)
    lefts = [geometry((64, 67), bucket=(64, 64), crop=(0.0, n / 100)).left for n in range(100)]
    assert [lefts.count(left) for left in range(4)] == [25, 25, 25, 25]


def test_a_picture_of_the_buckets_size_goes_in_untouched(monkeypatch):
    plain = geometry((32, 48), bucket=(32, 48))
    assert plain == Geometry(32, 48, 0, 0, 32, 48, False)
    monkeypatch.setattr(Image.Image, "resize", lambda *_: pytest.fail("resized"))
    pixels = render(photo(), plain)
    assert np.rint((pixels + 1) * 127.5).astype(int).tolist() == (
        array(photo()).transpose(2, 0, 1).tolist()
    )


def drawn(size=(100, 300), count=8, crop_seed=0, image_key="a" * 64, random_flip=False):
    return variants(
        size,
        bucket=(64, 64),
        count=count,
        crop_seed=crop_seed,
        image_key=image_key,
        random_flip=random_flip,
    )


def test_variants_begin_with_the_centre_crop_and_only_grow():
    assert drawn(count=1) == (geometry((100, 300), bucket=(64, 64)),)
    assert drawn(random_flip=True)[0] == drawn(count=1)[0]
    assert drawn(count=8)[: len(drawn(count=3))] == drawn(count=3)


def test_variants_depend_on_seed_and_image_alone():
    assert drawn() == drawn()
    assert drawn() != drawn(crop_seed=1)
    assert drawn() != drawn(image_key="b" * 64)


def test_equal_variants_are_one():
    assert len(drawn(size=(64, 64))) == 1
    assert len(drawn(size=(64, 64), random_flip=True, count=32)) == 2


def test_flips_are_drawn_only_on_request_and_leave_the_crops_alone():
    assert not any(made.flip for made in drawn(count=32))
    flips = drawn(count=200, random_flip=True, size=(100, 30000))
    assert 0.35 < sum(made.flip for made in flips) / len(flips) < 0.65
    plain = drawn(count=200, size=(100, 30000))
    assert [made.left for made in plain] == [made.left for made in flips]


def test_every_variant_has_the_background_of_its_picture():
    plain = variants(
        (100, 300), bucket=(64, 64), count=4, crop_seed=0, image_key="a", random_flip=True
    )
    laid = variants(
        (100, 300),
        bucket=(64, 64),
        count=4,
        crop_seed=0,
        image_key="a",
        random_flip=True,
        background="#102030",
    )
    assert laid == tuple(replace(cut, background="#102030") for cut in plain)


@pytest.mark.parametrize("flip", [False, True])
def test_render_agrees_with_diffusers_bit_for_bit(flip):
    processor = pytest.importorskip("diffusers.image_processor").VaeImageProcessor(do_resize=False)
    made = geometry((32, 48), bucket=(24, 24), crop=(0.5, 0.9), flip=flip)
    reference = photo().resize((made.resized_width, made.resized_height), Image.Resampling.LANCZOS)
    reference = reference.crop((made.left, made.top, made.left + 24, made.top + 24))
    reference = ImageOps.mirror(reference) if flip else reference
    pixels = render(photo(), made)
    assert (pixels.dtype, pixels.shape) == (np.float32, (3, 24, 24))
    assert pixels.flags.c_contiguous
    assert np.array_equal(pixels, processor.preprocess(reference)[0].numpy())


def test_pixels_span_minus_one_to_one():
    plain = geometry((16, 16), bucket=(16, 16))
    assert render(Image.new("RGB", (16, 16), "black"), plain).max() == -1
    assert render(Image.new("RGB", (16, 16), "white"), plain).min() == 1
