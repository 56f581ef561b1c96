import hashlib
import io
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lib.errors import Problem
from lib.keys import canonical_json
from lib.manifest import NO_CAPTION, Candidate, Report, discover, inspect


def png(colour="red", size=(32, 24), **options):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG", **options)
    return file.getvalue()


def build(root, files):
    """Write files; a picture's content may be left out, text and rows are given as they are."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        if isinstance(content, str):
            content = content.encode()
        path.write_bytes(png() if content is None else content)
    return root


def found(root, prompt=None):
    return discover(root, instance_prompt=prompt)


def captions(root, prompt=None):
    discovery = found(root, prompt)
    assert discovery.problems == ()
    return {candidate.name: candidate.caption for candidate in discovery.candidates}


def complaints(root, prompt=None):
    return [str(problem) for problem in found(root, prompt).problems]


def row(name, caption):
    return {"file_name": name, "text": caption}


def test_pictures_of_all_folders_are_found_sorted_by_name(tmp_path):
    build(tmp_path, {"b/2.png": None, "a/1.png": None, "z.png": None, "a/b/c.png": None})
    assert list(captions(tmp_path, "x")) == ["a/1.png", "a/b/c.png", "b/2.png", "z.png"]


def test_extensions_are_known_in_any_case(tmp_path):
    build(tmp_path, {"a.JPG": None, "b.Png": None, "c.jpeg": None, "d.WEBP": None, "e.gif": None})
    build(tmp_path, {"a.TXT": "loud", "b.txt": "quiet"})
    expected = {"a.JPG": "loud", "b.Png": "quiet", "c.jpeg": "x", "d.WEBP": "x"}
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


def test_names_are_split_at_the_last_dot(tmp_path):
    build(tmp_path, {"v1.0 front.png": None, "v1.0 front.txt": "front"})
    build(tmp_path, {"v1.0 back.png": None, "v1.0 back.txt": "back", "v1.txt": "neither"})
    assert captions(tmp_path) == {"v1.0 back.png": "back", "v1.0 front.png": "front"}


def test_one_sidecar_may_serve_two_pictures(tmp_path):
    build(tmp_path, {"a.jpg": None, "a.png": png("blue"), "a.txt": "both"})
    assert captions(tmp_path) == {"a.jpg": "both", "a.png": "both"}


def test_two_sidecars_of_one_picture_are_a_problem(tmp_path):
    build(tmp_path, {"a.png": None, "a.txt": "one", "a.TXT": "two"})
    assert complaints(tmp_path) == ["a.TXT: captions the same picture as a.txt; keep one"]


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


def test_a_name_that_is_not_utf8_is_a_problem_that_can_be_printed(tmp_path):
    with open(os.path.join(os.fsencode(tmp_path), b"\xe9.png"), "wb") as file:
        file.write(png())
    (complaint,) = complaints(tmp_path, "x")
    assert complaint.encode("ascii")


def test_rows_are_relative_to_their_file_and_know_both_separators(tmp_path):
    build(tmp_path, {"a.png": None, "s/b.png": None, "s/t/c.png": None, "s/d.png": None})
    build(tmp_path, {"metadata.jsonl": [row("a.png", "A"), row("s\\b.png", "B")]})
    rows = [{"file_name": "t/c.png", "caption": "C"}, row("./d.png", " D ")]
    build(tmp_path, {"s/metadata.jsonl": rows})
    assert captions(tmp_path) == {"a.png": "A", "s/b.png": "B", "s/d.png": "D", "s/t/c.png": "C"}


def test_a_byte_order_mark_and_blank_lines_in_metadata_do_no_harm(tmp_path):
    text = "\ufeff" + json.dumps(row("a.png", "A")) + "\r\n\r\n"
    build(tmp_path, {"a.png": None, "metadata.jsonl": text})
    assert captions(tmp_path) == {"a.png": "A"}


@pytest.mark.parametrize("name", ["gone.png", "ds/a.png", "../a.png", "/a.png", "notes.md", ""])
def test_each_row_without_its_picture_names_line_and_path(tmp_path, name):
    build(tmp_path, {"a.png": None, "notes.md": "", "sub/b.png": None})
    build(tmp_path, {"metadata.jsonl": [row("a.png", "A"), row(name, "?"), row("too.png", "")]})
    first, second = complaints(tmp_path, "x")
    assert first.startswith("metadata.jsonl:2: there is no picture")
    assert name in first
    assert second.startswith("metadata.jsonl:3: there is no picture too.png")


def test_a_second_row_for_a_picture_is_a_problem(tmp_path):
    build(tmp_path, {"s/a.png": None, "metadata.jsonl": [row("s/a.png", "one")]})
    build(tmp_path, {"s/metadata.jsonl": [row("a.png", "two")]})
    assert complaints(tmp_path) == ["s/metadata.jsonl:1: repeats metadata.jsonl:1: s/a.png"]


@pytest.mark.parametrize("line", ["[", "]", "{", '{"text": "x', "[1]", "1", "[" * 9999])
def test_a_line_that_is_no_json_object_is_named(tmp_path, line):
    text = json.dumps(row("a.png", "A")) + "\n\n" + line
    build(tmp_path, {"a.png": None, "metadata.jsonl": text})
    (complaint,) = complaints(tmp_path)
    assert complaint.startswith("metadata.jsonl:3: the line is not a JSON object")


@pytest.mark.parametrize("caption", [42, ["a", "b"], {"x": 1}, True, "\ud800"])
def test_a_caption_that_is_no_text_is_refused(tmp_path, caption):
    build(tmp_path, {"a.png": None, "metadata.jsonl": [row("a.png", caption)]})
    (complaint,) = complaints(tmp_path, "x")
    assert complaint.startswith("metadata.jsonl:1: text is no text")


def test_null_is_no_caption(tmp_path):
    rows = [row("a.png", None)]
    build(tmp_path, {"a.png": None, "b.png": None, "b.txt": "b", "metadata.jsonl": rows})
    assert found(tmp_path).drops == {NO_CAPTION: ("a.png",)}
    assert captions(tmp_path, "prompt")["a.png"] == "prompt"


@pytest.mark.parametrize("fields", [{}, {"prompt": "x"}, {"text": "x", "caption": "x"}])
def test_unknown_or_doubled_caption_fields_are_shown(tmp_path, fields):
    build(tmp_path, {"a.png": None, "metadata.jsonl": [{"file_name": "a.png", **fields}]})
    (complaint,) = complaints(tmp_path)
    assert "metadata.jsonl:1" in complaint
    assert all(field in complaint for field in ("file_name", *fields))


@pytest.mark.parametrize("name", ["metadata.json", "metadata.json1", "Metadata.jsonl"])
def test_a_nearly_right_metadata_name_is_pointed_out(tmp_path, name):
    build(tmp_path, {"a.png": None, "b.png": None, "b.txt": "b", name: "{}"})
    (complaint,) = complaints(tmp_path)
    assert complaint.startswith(name)
    assert "metadata.jsonl" in complaint
    assert complaints(tmp_path, "prompt") == []


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
    build(tmp_path, {"a.txt": "", "b.txt": "", "c.gif": "", ".d.png": None, "LICENSE": ""})
    (complaint,) = complaints(tmp_path, "x")
    for part in (str(tmp_path), "2 .txt", "1 .gif", "1 no suffix", "1 hidden", ".webp"):
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
    sample = inspect(Candidate(name="a.png", path=tmp_path / "a.png", caption="A"))
    assert (sample.height, sample.width, sample.repeats) == (40, 24, 1)
    assert (sample.name, sample.caption) == ("a.png", "A")
    assert sample.image_key == hashlib.sha256(data).hexdigest()


def test_no_path_of_the_machine_enters_a_sample(tmp_path):
    build(tmp_path, {"s/a.png": None})
    (candidate,) = found(tmp_path, "x").candidates
    assert str(tmp_path).encode() not in canonical_json(vars(inspect(candidate)))


@pytest.mark.parametrize("data", [b"", b"text", png()[:60], png(size=(1, 1))])
def test_a_bad_picture_is_a_problem_with_its_name(tmp_path, data):
    build(tmp_path, {"s/a.png": data})
    (candidate,) = found(tmp_path, "x").candidates
    problem = inspect(candidate)
    assert isinstance(problem, Problem)
    assert problem.subject == "s/a.png"
    assert problem.why
