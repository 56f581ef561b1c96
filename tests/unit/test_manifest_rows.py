"""Rows of metadata.jsonl and metadata.csv: captions, lists of captions, and what is refused."""

import json

import pytest

from lib.manifest import NO_CAPTION
from tests.unit.folders import build, captions, complaints, found, row


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


@pytest.mark.parametrize("caption", [42, {"x": 1}, True, "\ud800", [42], 1.5])
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


def test_a_list_gives_one_picture_several_captions(tmp_path):
    rows = [row("a.png", ["a cat", " a red cat\n"]), row("b.png", ["alone"])]
    build(tmp_path, {"a.png": None, "b.png": None, "metadata.jsonl": rows})
    assert captions(tmp_path) == {"a.png": ["a cat", "a red cat"], "b.png": "alone"}


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ([], "is an empty list"),
        (["a", 1], "holds what is no text"),
        (["a", None], "holds what is no text"),
        ([["a"], "b"], "holds what is no text"),
        (["a", "b", "a "], "holds a caption twice"),
    ],
)
def test_a_list_that_holds_anything_but_different_texts_is_refused(tmp_path, texts, why):
    build(tmp_path, {"a.png": None, "metadata.jsonl": [row("a.png", texts)]})
    (complaint,) = complaints(tmp_path, "x")
    assert complaint.startswith(f"metadata.jsonl:1: text {why}")


def test_a_field_that_a_row_names_twice_is_refused(tmp_path):
    line = '{"file_name": "a.png", "text": "one", "text": "two"}'
    build(tmp_path, {"a.png": None, "metadata.jsonl": line})
    (complaint,) = complaints(tmp_path, "x")
    assert complaint.startswith("metadata.jsonl:1: has the field text twice")


def test_a_row_that_nearly_names_its_picture_says_which_one(tmp_path):
    build(tmp_path, {"Fox.png": None, "metadata.jsonl": [row("fox.png", "a fox")]})
    (complaint,) = complaints(tmp_path, "x")
    assert "there is no picture fox.png" in complaint
    assert "Fox.png differs in case" in complaint


QUOTED = 'file_name,id,text\r\na.png,1,"a ""red"" cat, sitting"\r\n"b.png",2,plain\r\n'


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_csv_rows_know_quotes_other_columns_and_line_ends(tmp_path, mark):
    build(tmp_path, {"a.png": None, "b.png": None, "metadata.csv": mark + QUOTED})
    assert captions(tmp_path) == {"a.png": 'a "red" cat, sitting', "b.png": "plain"}


def test_a_csv_caption_may_have_several_lines_and_be_called_caption(tmp_path):
    text = 'caption,file_name\n"one\r\n\r\ntwo",s/a.png\n\nthree,b.png'
    build(tmp_path, {"s/a.png": None, "b.png": None, "metadata.csv": text})
    assert captions(tmp_path) == {"b.png": "three", "s/a.png": "one\n\ntwo"}


def test_an_empty_cell_is_an_empty_caption_and_counted_as_such(tmp_path):
    text = "file_name,text\na.png,\nb.png,b\n"
    build(tmp_path, {"a.png": None, "b.png": None, "metadata.csv": text})
    assert captions(tmp_path, "prompt") == {"a.png": "", "b.png": "b"}
    assert found(tmp_path).captions_from == {"empty row": 1, "metadata": 1}


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("file_name,text\na.png,a cat, sitting\n", "metadata.csv:2: has 3 fields, the header 2"),
        ('file_name,text\n"a.png","x\ny"\na.png\n', "metadata.csv:4: has 1 fields"),
        ("file_name;text\na.png;x\n", "metadata.csv:1: has the columns file_name;text"),
        ("a.png,a cat\n", "metadata.csv:1: has the columns a.png, a cat"),
        ("file_name,text,caption\na.png,x,y\n", "metadata.csv:1: has the columns"),
        ("file_name,text,file_name\na.png,x,a.png\n", "metadata.csv:1: has the columns"),
        ("file_name,text,text\na.png,x,y\n", "metadata.csv:1: has the columns"),
        ('file_name,text\na.png,"x"y\n', "metadata.csv:2: is no CSV from here on"),
        ('file_name,text\na.png,"x\n', "metadata.csv:2: is no CSV from here on"),
        ("file_name,text\ngone.png,x\n", "metadata.csv:2: there is no picture gone.png"),
        ("file_name,text\na.png,x\na.png,x\n", "metadata.csv:3: repeats metadata.csv:2: a.png"),
        (b"file_name,text\na.png,\xff\n", "metadata.csv: is not UTF-8: byte 0xff at offset 21"),
    ],
)
def test_what_is_wrong_with_a_csv_file_is_named_with_its_line(tmp_path, text, start):
    build(tmp_path, {"a.png": None, "metadata.csv": text})
    (complaint,) = complaints(tmp_path, "x")
    assert complaint.startswith(start)


def test_an_endless_cell_is_a_named_problem(tmp_path):
    build(tmp_path, {"a.png": None, "metadata.csv": f"file_name,text\na.png,{'x' * 200_000}"})
    (complaint,) = complaints(tmp_path, "x")
    assert complaint.startswith("metadata.csv:2: is no CSV from here on (field larger than")


def test_two_metadata_files_in_one_folder_are_refused_and_in_two_are_not(tmp_path):
    csv_text = "file_name,text\nb.png,b\n"
    files = {"a.png": None, "s/b.png": None, "metadata.jsonl": [row("a.png", "a")]}
    build(tmp_path, {**files, "s/metadata.csv": csv_text})
    assert captions(tmp_path) == {"a.png": "a", "s/b.png": "b"}
    build(tmp_path, {"s/metadata.jsonl": [row("b.png", "b")]})
    (complaint,) = complaints(tmp_path)
    assert complaint.startswith("s/metadata.csv: lies beside s/metadata.jsonl")
