"""What a folder holds, which names are refused, and what the report of it says."""

import hashlib
import io
import os
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lib import manifest
from lib.keys import canonical_json
from lib.manifest import (
    NO_CAPTION,
    Candidate,
    Report,
    Sample,
    as_record,
    inspect,
    sort_out,
)
from lib.schema import DatasetConfig
from lib.survey import folded, read_regular, shown
from tests.unit.folders import build, captions, complaints, found, png, row


def sorted_out(root, prompt=None, **options):
    """What becomes of a folder's pictures once they are read."""
    candidates = found(root, prompt, **options).candidates
    chosen = DatasetConfig(str(root), prompt, **options)
    return sort_out([(one, inspect(one)) for one in candidates], options=chosen)


def notes(root, prompt=None, **options):
    return {**found(root, prompt, **options).notes, **sorted_out(root, prompt, **options).notes}


def test_pictures_of_all_folders_are_found_sorted_by_name(tmp_path):
    build(tmp_path, {"b/2.png": None, "a/1.png": None, "z.png": None, "a/b/c.png": None})
    assert list(captions(tmp_path, "x")) == ["a/1.png", "a/b/c.png", "b/2.png", "z.png"]


def test_extensions_are_known_in_any_case(tmp_path):
    build(tmp_path, {"a.JPG": None, "b.Png": None, "c.jpeg": None, "d.WEBP": None, "e.jfif": None})
    build(
        tmp_path, {"a.TXT": "loud", "b.txt": "quiet", "c.CAPTION": "clear", "f.raw": "no picture"}
    )
    expected = {"a.JPG": "loud", "b.Png": "quiet", "c.jpeg": "clear", "d.WEBP": "x", "e.jfif": "x"}
    assert captions(tmp_path, "x") == expected


def test_litter_of_other_systems_is_passed_over_and_counted(tmp_path):
    build(tmp_path, {"a.png": None, "a.txt": "a cat"})
    before = found(tmp_path)
    litter = ["._a.png", "__MACOSX/._a.png", "__MACOSX/a.png", ".thumbs/a.png"]
    other = ["Thumbs.db", ".DS_Store", "desktop.ini", "notes.md", "a.png:Zone.Identifier", "a.npz"]
    build(tmp_path, dict.fromkeys([*litter, *other], "junk"))
    after = found(tmp_path)
    assert after.candidates == before.candidates
    assert (after.found, after.hidden, after.problems) == (1, 4, ())


def test_a_name_that_is_not_utf8_is_a_problem_that_can_be_printed(tmp_path):
    with open(os.path.join(os.fsencode(tmp_path), b"\xe9.png"), "wb") as file:
        file.write(png())
    (complaint,) = complaints(tmp_path, "x")
    assert complaint.startswith("\\xe9.png: has signs in its name")


def test_links_to_files_are_followed_and_broken_ones_named(tmp_path):
    build(tmp_path, {"orig/x.png": None, "orig/x.txt": "there", "set/keep.png": None})
    (tmp_path / "set/x.png").symlink_to(tmp_path / "orig/x.png")
    (tmp_path / "set/x.txt").symlink_to("../orig/x.txt")
    assert captions(tmp_path / "set", "here") == {"keep.png": "here", "x.png": "there"}
    (tmp_path / "set/gone.png").symlink_to("nowhere.png")
    (tmp_path / "set/more").symlink_to(tmp_path / "orig")
    links = complaints(tmp_path / "set", "here")
    assert [text.split(";")[0] for text in links] == [
        "gone.png: is a link to nothing",
        "more: is a link to a folder",
    ]
    assert len(found(tmp_path / "set", "here").candidates) == 2


def test_a_pipe_is_never_opened(tmp_path):
    build(tmp_path, {"a.png": None})
    os.mkfifo(tmp_path / "b.png")
    assert complaints(tmp_path, "x") == ["b.png: is no regular file; move it out of the data set"]


def test_a_folder_without_pictures_says_what_was_seen(tmp_path):
    build(tmp_path, {"a.txt": "", "b.txt": "", "c.pdf": "", ".d.png": None, "LICENSE": ""})
    (complaint,) = complaints(tmp_path, "x")
    for part in (str(tmp_path), "2 .txt", "1 .pdf", "1 no suffix", "1 hidden", ".webp"):
        assert part in complaint


def test_an_empty_and_a_missing_folder_are_named(tmp_path):
    (complaint,) = complaints(tmp_path)
    assert "no files" in complaint
    assert str(tmp_path / "gone") in complaints(tmp_path / "gone")[0]


def test_a_set_without_any_caption_names_the_ways_to_give_one(tmp_path):
    (complaint,) = complaints(build(tmp_path, {"a.png": None, "b.png": None}))
    assert "dataset.instance_prompt" in complaint


@given(
    st.lists(st.sampled_from(["sidecar", "empty", "row", "null", "nothing"]), min_size=1),
    st.none() | st.just("prompt"),
)
def test_found_is_kept_and_dropped_and_captions_add_up(tmp_path_factory, kinds, prompt):
    root, rows = tmp_path_factory.mktemp("set"), []
    for number, kind in enumerate(kinds):
        build(root, {f"{number}.png": b""})
        if kind in ("sidecar", "empty"):
            build(root, {f"{number}.txt": "text" if kind == "sidecar" else ""})
        if kind in ("row", "null"):
            rows.append(row(f"{number}.png", "text" if kind == "row" else None))
    build(root, {"metadata.jsonl": rows})
    result = found(root, prompt)
    kept = len(result.candidates)
    report = Report(result.found, kept, result.drops, result.captions_from)
    assert report.found == len(kinds)
    assert sum(report.captions_from.values()) == kept


def test_a_report_that_does_not_add_up_cannot_be_made():
    with pytest.raises(AssertionError):
        Report(found=3, kept=1, dropped={NO_CAPTION: ("a.png",)}, captions_from={})


def test_a_sample_has_the_digest_of_its_bytes_and_its_upright_size(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    data = png(size=(40, 24), exif=exif)
    build(tmp_path, {"a.png": data})
    (sample,) = sorted_out(tmp_path, "A").samples
    key = hashlib.sha256(data).hexdigest()
    assert sample == Sample("a.png", key, height=40, width=24, captions=("A",), repeats=1)


def test_no_path_of_the_machine_enters_a_sample(tmp_path):
    build(tmp_path, {"s/a.png": None})
    (sample,) = sorted_out(tmp_path, "x").samples
    assert str(tmp_path).encode() not in canonical_json(as_record(sample))


@pytest.mark.parametrize("data", [b"", b"text", png()[:60], png(size=(1, 1))])
def test_a_bad_picture_is_a_problem_with_its_name(tmp_path, data):
    build(tmp_path, {"s/a.png": data})
    (problem,) = sorted_out(tmp_path, "x").problems
    assert problem.subject == "s/a.png"
    assert problem.why


def animation(kind="WEBP"):
    file = io.BytesIO()
    first, *others = (Image.new("RGB", (32, 24), colour) for colour in ("red", "green", "blue"))
    first.save(file, kind, save_all=True, append_images=others)
    return file.getvalue()


@pytest.mark.parametrize(
    ("one", "other"),
    [("a.png", "A.png"), ("caf\u00e9.png", "cafe\u0301.png"), ("x/a.png", "X/a.PNG")],
)
def test_names_that_some_systems_take_for_one_are_refused(tmp_path, one, other):
    build(tmp_path, {one: png(), other: png("blue"), "b.png": None})
    (complaint,) = complaints(tmp_path, "x")
    first, second = sorted((one, other))
    assert complaint.startswith(f"{second} ({second!a}): differs from {first} only in case")


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("a\nb.png", "a\\nb.png"),
        ("a\x1b[31mb.png", "a\\x1b[31mb.png"),
        ("a\u202egnp.png", "a\\u202egnp.png"),
        ("a\u2028b.txt", "a\\u2028b.txt"),
        ("a\x9bb/c.png", "a\\x9bb/c.png"),
    ],
)
def test_signs_that_cannot_be_shown_are_refused_and_escaped(tmp_path, name, escaped):
    build(tmp_path, {name: None, "b.png": None})
    (complaint,) = complaints(tmp_path, "x")
    assert complaint.startswith(f"{escaped}: has signs in its name")
    assert complaint.isprintable()


@given(st.text())
def test_what_is_shown_can_be_printed_and_written(text):
    assert not any(sign in shown(text) for sign in "\n\r\x1b\x00\u2028\u202e")
    assert shown(text).encode("utf-8").decode("utf-8") == shown(text)
    assert shown(shown(text)) == shown(text)


@given(st.text())
def test_forms_and_cases_of_one_name_fold_to_one(text):
    for form in ("NFC", "NFD"):
        assert folded(unicodedata.normalize(form, text)) == folded(text)
    assert folded(folded(text)) == folded(text)


def test_links_to_files_are_noted_by_name(tmp_path):
    build(tmp_path, {"orig/x.png": None, "set/keep.png": None})
    (tmp_path / "set/x.png").symlink_to(tmp_path / "orig/x.png")
    (tmp_path / "set/readme").symlink_to(tmp_path / "orig/x.png")
    assert found(tmp_path / "set", "x").notes == {manifest.LINKS: ("x.png",)}


def test_a_file_that_became_a_pipe_is_not_waited_for(tmp_path):
    build(tmp_path, {"a.png": None})
    (candidate,) = found(tmp_path, "x").candidates
    (tmp_path / "a.png").unlink()
    os.mkfifo(tmp_path / "a.png")
    assert inspect(candidate).problem.why == "cannot be read (is no regular file)"
    (tmp_path / "a.png").unlink()
    assert "cannot be read (No such file" in inspect(candidate).problem.why


def test_no_more_of_a_file_is_read_than_is_allowed(tmp_path):
    build(tmp_path, {"a.txt": "1234"})
    assert read_regular(tmp_path / "a.txt", max_bytes=4) == b"1234"
    with pytest.raises(OSError, match="more than 3 bytes"):
        read_regular(tmp_path / "a.txt", max_bytes=3)


def test_a_file_that_grows_while_it_is_read_is_no_file_that_was_read(tmp_path, monkeypatch):
    build(tmp_path, {"a.txt": "1234"})
    look = os.fstat

    def looked(descriptor):
        found = look(descriptor)
        (tmp_path / "a.txt").write_text("12345")
        return found

    monkeypatch.setattr(os, "fstat", looked)
    with pytest.raises(OSError, match="changed while it was read"):
        read_regular(tmp_path / "a.txt", max_bytes=99)


@pytest.mark.parametrize("name", ["a.gif", "a.BMP", "a.tiff", "a.avif", "a.heic", "a.svg", "a.jxl"])
def test_a_picture_of_a_format_that_is_not_read_is_refused_by_name(tmp_path, name):
    build(tmp_path, {name: None, "b.png": None})
    (problem,) = sorted_out(tmp_path, "x").problems
    assert (problem.subject, problem.remedy) == (name, "save it as PNG")
    assert sorted_out(tmp_path, "x", damaged="drop").drops == {"not a format that is read": (name,)}


def test_every_refused_picture_is_named_at_once_or_dropped_under_its_kind(tmp_path):
    bad = {
        "damaged": png(size=(64, 64))[:100],
        "not a format that is read": b"",
        "too narrow": png(size=(8, 800)),
        "too small": png(size=(7, 64)),
        "unusable colour profile": png(icc_profile=b"0123456789"),
        "animated": animation(),
    }
    names = {kind: f"{place}.png" for place, kind in enumerate(bad)}
    build(tmp_path, {names[kind]: data for kind, data in bad.items()} | {"good.png": None})
    refused = sorted_out(tmp_path, "x")
    assert {problem.subject for problem in refused.problems} == set(names.values())
    dropped = sorted_out(tmp_path, "x", damaged="drop")
    assert dropped.problems == ()
    assert dropped.drops == {kind: (name,) for kind, name in sorted(names.items())}
    assert [sample.name for sample in dropped.samples] == ["good.png"]


def test_a_file_that_cannot_be_read_is_never_merely_dropped(tmp_path):
    build(tmp_path, {"a.png": None})
    (candidate,) = found(tmp_path, "x").candidates
    gone = Candidate("a.png", tmp_path / "gone.png", candidate.captions)
    options = DatasetConfig(str(tmp_path), "x", damaged="drop")
    result = sort_out([(gone, inspect(gone))], options=options)
    assert (len(result.problems), result.drops) == (1, {})


def test_small_pictures_are_dropped_by_name_and_left_where_they_are(tmp_path):
    sizes = {"a": (64, 64), "b": (64, 31), "c": (31, 64), "d": (32, 32), "e": (4, 4)}
    build(tmp_path, {f"{name}.png": png(size=size) for name, size in sizes.items()})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    result = sorted_out(tmp_path, "x", min_side=32)
    assert [sample.name for sample in result.samples] == ["a.png", "d.png"]
    assert result.drops == {manifest.BELOW_MIN_SIDE: ("b.png", "c.png", "e.png")}
    assert result.problems == ()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_an_animation_is_refused_unless_its_first_frame_is_asked_for(tmp_path, kind):
    build(tmp_path, {"a.png": animation(kind)})
    (problem,) = sorted_out(tmp_path, "x").problems
    assert str(problem).startswith("a.png: is animated")
    assert "dataset.animated=first_frame" in problem.remedy
    taken = sorted_out(tmp_path, "x", animated="first_frame")
    assert (len(taken.samples), taken.notes) == (1, {manifest.FIRST_FRAMES: ("a.png",)})


def test_a_background_belongs_to_transparent_pictures_alone(tmp_path):
    file = io.BytesIO()
    Image.new("RGBA", (16, 16), (255, 0, 0, 128)).save(file, "PNG")
    opaque = io.BytesIO()
    Image.new("RGBA", (16, 16), (255, 0, 0, 255)).save(opaque, "PNG")
    build(tmp_path, {"a.png": file.getvalue(), "b.png": None, "c.png": opaque.getvalue()})
    samples = sorted_out(tmp_path, "x", background="#FF8000").samples
    assert [sample.background for sample in samples] == ["#ff8000", None, None]


def test_copies_are_reported_by_name(tmp_path):
    build(tmp_path, {"a.png": None, "b.png": png("blue"), "s/c.png": None, "t/d.png": None})
    assert notes(tmp_path, "x") == {manifest.COPIES: ("a.png = s/c.png = t/d.png",)}


def test_a_sidecar_of_several_pictures_or_of_none_is_reported(tmp_path):
    build(tmp_path, {"a.jpg": None, "a.png": png("blue"), "a.txt": "both", "old.txt": "none"})
    assert notes(tmp_path) == {
        manifest.SHARED: ("a.txt (a.jpg, a.png)",),
        manifest.ORPHANS: ("old.txt",),
    }


def test_a_metadata_file_that_is_not_read_is_reported_even_where_nothing_is_missing(tmp_path):
    build(tmp_path, {"a.png": None, "Metadata.jsonl": "{}", "s/captions.json": "{}"})
    assert notes(tmp_path, "x") == {manifest.UNREAD: ("Metadata.jsonl", "s/captions.json")}
