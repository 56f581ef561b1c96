"""Where a caption comes from, what is put before it, and what repeats a folder means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.manifest import NO_CAPTION
from tests.unit.folders import build, captions, complaints, found, png, row


def test_names_are_split_at_the_last_dot(tmp_path):
    build(tmp_path, {"v1.0 front.png": None, "v1.0 front.txt": "front"})
    build(tmp_path, {"v1.0 back.png": None, "v1.0 back.txt": "back", "v1.txt": "neither"})
    assert captions(tmp_path) == {"v1.0 back.png": "back", "v1.0 front.png": "front"}


def test_one_sidecar_may_serve_two_pictures(tmp_path):
    build(tmp_path, {"a.jpg": None, "a.png": png("blue"), "a.txt": "both"})
    assert captions(tmp_path) == {"a.jpg": "both", "a.png": "both"}


def test_two_sidecars_of_one_picture_are_a_problem(tmp_path):
    build(tmp_path, {"a.png": None, "a.txt": "one", "a.TXT": "two"})
    assert complaints(tmp_path) == [
        "a.TXT: captions the same picture as a.txt, otherwise; keep one"
    ]


def test_sidecar_goes_before_row_and_row_before_prompt(tmp_path):
    build(tmp_path, {"a.png": None, "b.png": None, "c.png": None, "a.txt": "sidecar"})
    rows = [row("a.png", "row a"), row("b.png", "row b"), row("d.png", "row d")]
    build(tmp_path, {"d.png": None, "d.txt": "", "metadata.jsonl": rows})
    expected = {"a.png": "sidecar", "b.png": "row b", "c.png": "prompt", "d.png": ""}
    assert captions(tmp_path, "prompt") == expected
    counts = {"empty sidecar": 1, "instance_prompt": 1, "metadata": 1, "sidecar": 1}
    assert found(tmp_path, "prompt").captions_from == counts


def test_missing_empty_and_blank_captions_are_told_apart(tmp_path):
    build(tmp_path, dict.fromkeys(["a.png", "b.png", "c.png", "d.png"]))
    build(tmp_path, {"b.txt": "", "c.txt": " \r\n", "d.txt": "d"})
    assert captions(tmp_path) == {"b.png": "", "c.png": "", "d.png": "d"}
    assert found(tmp_path).drops == {NO_CAPTION: ("a.png",)}
    assert found(tmp_path).captions_from == {"empty sidecar": 2, "sidecar": 1}


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r")))
def test_a_caption_is_the_files_text_without_its_ends(tmp_path_factory, text):
    root = build(tmp_path_factory.mktemp("set"), {"a.png": None, "a.txt": text + "\n"})
    assert captions(root) == {"a.png": text.removeprefix("\ufeff").strip()}


def test_line_ends_and_byte_order_marks_do_not_make_another_caption(tmp_path):
    build(tmp_path, {"a.png": None, "b.png": None, "a.txt": "one,  two\n\nthree\n"})
    build(tmp_path, {"b.txt": b"\xef\xbb\xbfone,  two\r\n\r\nthree\r\n"})
    assert set(captions(tmp_path).values()) == {"one,  two\n\nthree"}


def test_a_byte_that_is_not_utf8_is_named_with_its_offset(tmp_path):
    build(tmp_path, {"a.png": None, "b.png": None, "a.txt": b"man\x92s hat", "b.txt": b"\xff\xfea"})
    assert complaints(tmp_path) == [
        "a.txt: is not UTF-8: byte 0x92 at offset 3; save it as UTF-8",
        "b.txt: is not UTF-8: byte 0xff at offset 0; save it as UTF-8",
    ]


def test_names_and_captions_beyond_ascii_survive(tmp_path):
    name, caption = "\u00e9t\u00e9 \u65e5\u672c \U0001f600.png", "\u732b"
    build(tmp_path, {name: None, name.replace(".png", ".txt"): caption})
    assert captions(tmp_path) == {name: caption}


@pytest.mark.parametrize("other", ["a.caption", "a.Caption", "a.TXT"])
def test_two_sidecars_of_one_picture_must_say_the_same(tmp_path, other):
    build(tmp_path, {"a.png": None, "a.txt": "a cat\n", other: "\ufeffa cat"})
    assert captions(tmp_path) == {"a.png": "a cat"}
    assert found(tmp_path).captions_from == {"sidecar": 1}
    build(tmp_path, {other: "a dog"})
    (complaint,) = complaints(tmp_path)
    first, second = sorted(("a.txt", other))
    assert complaint == f"{first}: captions the same picture as {second}, otherwise; keep one"


@pytest.mark.parametrize(
    ("picture", "sidecar"), [("Fox.png", "fox.txt"), ("caf\u00e9.png", "cafe\u0301.txt")]
)
def test_a_sidecar_with_nearly_the_name_of_a_picture_is_refused(tmp_path, picture, sidecar):
    build(tmp_path, {picture: None, sidecar: "a fox"})
    (complaint,) = complaints(tmp_path, "x")
    assert complaint.startswith(f"{sidecar}: does not caption {picture}: case or accents differ")


def test_a_sidecar_without_end_is_refused(tmp_path):
    build(tmp_path, {"a.png": None, "a.txt": "x" * (1 << 20), "b.png": None})
    build(tmp_path, {"b.txt": "x" * ((1 << 20) + 1)})
    (complaint,) = complaints(tmp_path)
    assert complaint.startswith("b.txt: cannot be read (has more than 1048576 bytes)")


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a cat", "sks, a cat"),
        ("a sks cat", "a sks cat"),
        ("sks", "sks"),
        ("desks, a cat", "sks, desks, a cat"),
        ("a sksy cat", "sks, a sksy cat"),
        ("a (sks) cat", "a (sks) cat"),
        ("a SKS cat", "sks, a SKS cat"),
        ("", "sks"),
    ],
)
def test_the_trigger_stands_before_every_caption_that_does_not_hold_it(tmp_path, caption, expected):
    build(tmp_path, {"a.png": None, "a.txt": caption})
    assert captions(tmp_path, trigger="sks") == {"a.png": expected}


def test_a_trigger_is_a_text_and_no_pattern(tmp_path):
    build(tmp_path, {"a.png": None, "a.txt": "a cat by x.y (z)", "b.png": None, "b.txt": "xay (z)"})
    expected = {"a.png": "a cat by x.y (z)", "b.png": "x.y (z), xay (z)"}
    assert captions(tmp_path, trigger="x.y (z)") == expected


def test_trigger_and_prefix_come_before_captions_of_every_source(tmp_path):
    rows = [row("c.png", ["a cat", "a red cat"])]
    build(tmp_path, {"a.png": None, "a.txt": "side", "b.png": None, "c.png": None})
    build(tmp_path, {"metadata.jsonl": rows})
    assert captions(tmp_path, "all", prefix="photo of ") == {
        "a.png": "photo of side",
        "b.png": "photo of all",
        "c.png": ["photo of a cat", "photo of a red cat"],
    }
    both = captions(tmp_path, "all", prefix="photo of ", trigger="sks")
    assert both["a.png"] == "sks, photo of side"
    assert captions(tmp_path, "all", prefix="sks photo of ", trigger="sks")["a.png"] == (
        "sks photo of side"
    )


def test_two_captions_that_the_trigger_makes_one_are_refused(tmp_path):
    build(tmp_path, {"a.png": None, "metadata.jsonl": [row("a.png", ["cat", "sks, cat"])]})
    (complaint,) = complaints(tmp_path, trigger="sks")
    assert complaint.startswith("metadata.jsonl:1: two captions of a.png are one with")


REPEATED = ("3_a cat/1.png", "3_a cat/deep/2.png", "plain/3.png", "4.png", "2_b/12_sks dog/5.png")


def test_a_folder_s_number_is_its_repeats_and_its_words_the_last_resort(tmp_path):
    build(tmp_path, {**dict.fromkeys(REPEATED), "3_a cat/1.txt": "own"})
    result = found(tmp_path, folder_repeats=True)
    assert result.problems == ()
    assert {one.name: (one.repeats, *one.captions) for one in result.candidates} == {
        "3_a cat/1.png": (3, "own"),
        "3_a cat/deep/2.png": (3, "a cat"),
        "2_b/12_sks dog/5.png": (12, "sks dog"),
    }
    assert result.drops == {NO_CAPTION: ("4.png", "plain/3.png")}
    assert result.captions_from == {"folder": 2, "sidecar": 1}
    prompted = captions(tmp_path, "prompt", folder_repeats=True)
    assert prompted["2_b/12_sks dog/5.png"] == "prompt"


def test_without_the_option_a_number_is_a_name_and_the_report_says_so(tmp_path):
    build(tmp_path, {"2024_photos/a.png": None, "b.png": None, "10/c.png": None})
    result = found(tmp_path, "x")
    assert {one.repeats for one in result.candidates} == {1}
    ((kind, names),) = result.notes.items()
    assert "dataset.folder_repeats=true" in kind
    assert names == ("2024_photos",)
    assert found(tmp_path, "x", folder_repeats=True).notes == {}


@pytest.mark.parametrize("number", ["0", "000", "10001", "9" * 5000])
def test_a_number_that_is_no_number_of_repeats_is_refused_by_its_folder(tmp_path, number):
    folder = tmp_path / f"{number[:200]}_x"
    build(folder, {"a.png": None, "b.png": None})
    (complaint,) = complaints(tmp_path, folder_repeats=True)
    assert complaint.startswith(f"{folder.name}: dataset.folder_repeats reads the number")


def test_repeats_that_no_folder_names_are_an_option_without_effect(tmp_path):
    build(tmp_path, {"cats/a.png": None})
    (complaint,) = complaints(tmp_path, "x", folder_repeats=True)
    assert complaint.startswith("dataset.folder_repeats=True: would have no effect")


def test_sidecars_belong_to_the_picture_beside_them(tmp_path):
    build(tmp_path, {"x/deep/a.png": None, "x/deep/a.txt": "x", "y/a.png": None, "y/a.txt": "y"})
    build(tmp_path, {"a.png": None, "a.caption": "top"})
    assert captions(tmp_path) == {"a.png": "top", "x/deep/a.png": "x", "y/a.png": "y"}
