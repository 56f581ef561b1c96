"""Public reports about buckets, on whole data sets: nothing is lost, and what is odd is told."""

import pytest
from PIL import Image


@pytest.fixture
def pictures(data):
    """A data set of plain pictures of given sizes (height, width), in place of the usual one."""

    def made(**sizes):
        for path in data.iterdir():
            path.unlink()
        for number, (name, (height, width)) in enumerate(sizes.items()):
            colour = (40 * number % 256, 90, 200)
            Image.new("RGB", (width, height), colour).save(data / f"{name}.png")
            (data / f"{name}.txt").write_text(f"a picture of {name}", encoding="utf-8")

    return made


@pytest.fixture
def prepared(ensure):
    def made(*overrides):
        return ensure("prepare_dataset", *overrides).payload

    return made


@pytest.fixture
def drawn(encoded):
    """The names that each step of two epochs takes."""

    def made(*overrides):
        from lib.training.session import make_plan

        config, _, upstream = encoded(*overrides)
        plan = make_plan(config, upstream)
        groups = plan.groups(0, 2 * plan.steps_per_epoch)
        return [[plan.slots[index].name for index in group.slots] for group in groups]

    return made


SQUARE, WIDE = (64, 64), (48, 80)


def test_an_epoch_takes_every_picture_once_whatever_is_left_over_in_a_bucket(pictures, drawn):
    squares = {f"s{number}": SQUARE for number in range(5)}
    pictures(**squares, w0=WIDE, w1=WIDE)
    steps = drawn("trainer.batch_size=2")
    assert len(steps) == 2 * 4
    for epoch in (steps[:4], steps[4:]):
        names = sorted(name for step in epoch for name in step)
        assert names == sorted(f"{name}.png" for name in (*squares, "w0", "w1"))


def test_a_bucket_of_one_is_trained_and_its_weight_is_told(pictures, drawn, plan_text):
    pictures(**{f"s{number}": SQUARE for number in range(4)}, wide=WIDE)
    steps = drawn("trainer.batch_size=4")
    assert sum("wide.png" in names for names in steps) == 2
    said = plan_text("trainer.batch_size=4")
    assert "an epoch: 5 draws, 2 steps of 4, the last of 1" in said


def test_a_batch_larger_than_every_bucket_still_makes_steps(pictures, drawn):
    pictures(a=SQUARE, b=SQUARE, c=WIDE)
    assert sorted(map(len, drawn("trainer.batch_size=8"))) == [3, 3]


def test_the_weight_of_a_picture_in_the_short_group_is_in_the_plan(pictures, plan_text):
    """One picture alone in a group of 4 has a whole step's gradient: four times its share."""
    pictures(**{f"t{number}": WIDE for number in range(4)}, square=SQUARE)
    lines = plan_text("trainer.batch_size=4").splitlines()
    weights = {line.split()[0]: line.split()[-1] for line in lines if line.endswith("00")}
    assert weights == {"48x80": "1.00", "64x64": "4.00"}


def test_very_long_pictures_fill_the_longest_bucket_and_train(pictures, prepared, ensure):
    pictures(wide=(32, 512), tall=(512, 32), square=SQUARE)
    shapes = {image["height"]: image["bucket"] for image in prepared()["images"]}
    assert shapes == {32: [48, 96], 512: [96, 48], 64: [64, 64]}
    ensure("train", "trainer.max_steps=2")


def test_without_enlarging_small_pictures_have_small_buckets_and_tiny_ones_are_named(
    pictures, prepared, ensure, seen
):
    pictures(large=(128, 128), small=(33, 50), flat=(40, 9), thin=(9, 40))
    found = prepared("buckets.policy=no_upscale")
    sizes = {image["height"]: image["bucket"] for image in found["images"]}
    assert sizes == {128: [64, 64], 33: [32, 48]}
    assert [list(names) for names in found["report"]["dropped"].values()] == [
        ["flat.png", "thin.png"]
    ]
    assert found["report"]["found"] == found["report"]["kept"] + 2
    said = " ".join(e.data["text"] for e in seen if e.kind == "warning")
    assert "flat.png, thin.png" in said
    assert "below one step" in said
    ensure("train", "trainer.max_steps=2", "buckets.policy=no_upscale")


def test_a_picture_below_the_smallest_size_is_refused_by_name_with_its_size(pictures, ensure):
    from lib.errors import DarkroomError

    pictures(good=SQUARE, speck=(6, 12))
    with pytest.raises(DarkroomError) as refused:
        ensure("prepare_dataset")
    assert "speck.png" in str(refused.value)
    assert "6x12" in str(refused.value)


@pytest.mark.parametrize("policy", ["area", "no_upscale"])
def test_a_picture_of_a_bucket_s_own_size_is_neither_resized_nor_cropped(
    pictures, prepared, policy
):
    from lib.buckets import make_buckets

    table = make_buckets(resolution=64, step=16, max_aspect=3.0)
    pictures(**{f"p{bucket}": bucket.size for bucket in table})
    for image in prepared(f"buckets.policy={policy}")["images"]:
        size = [image["height"], image["width"]]
        (cut,) = image["variants"]
        assert image["bucket"] == size
        assert [cut["resized_height"], cut["resized_width"]] == size
        assert (cut["top"], cut["left"]) == (0, 0)


@pytest.mark.parametrize("policy", ["area", "no_upscale"])
def test_a_picture_a_little_larger_than_a_bucket_goes_there(pictures, prepared, policy):
    pictures(a=(66, 66), b=(50, 83))
    found = prepared(f"buckets.policy={policy}")
    assert {i["height"]: i["bucket"] for i in found["images"]} == {66: [64, 64], 50: [48, 80]}


def test_pictures_that_are_enlarged_are_counted_and_named_with_their_factor(
    pictures, prepared, seen
):
    pictures(large=(128, 128), soft=(32, 32))
    prepared()
    said = [e.data["text"] for e in seen if e.kind == "warning"]
    assert any(text.startswith("1 pictures that are enlarged") for text in said)
    assert any("soft.png x2.00" in text for text in said)


def test_a_resolution_has_one_meaning_and_the_plan_prints_what_it_makes(configure, plan_text):
    from lib.errors import DarkroomError

    with pytest.raises(DarkroomError, match=r"buckets\.resolution"):
        configure("buckets.resolution=[64,48]")
    said = plan_text("buckets.resolution=96", "buckets.max_aspect=1")
    assert "  96x96 " in said
    assert said.count("x96 ") == 1


@pytest.mark.parametrize("sign", ["", "+"])
def test_a_list_of_buckets_is_refused_as_an_unknown_setting(configure, sign):
    from lib.errors import DarkroomError

    with pytest.raises(DarkroomError, match=r"buckets\.sizes.*unknown setting"):
        configure(f"{sign}buckets.sizes=[[64,48]]")
