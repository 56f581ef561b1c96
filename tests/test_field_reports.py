"""The table of field reports is whole: each row has tests that exist, or says why it needs none."""

import ast
from pathlib import Path

import pytest
import yaml

CHECKOUT = Path(__file__).resolve().parent.parent
AREAS = yaml.safe_load((CHECKOUT / "tests" / "field_reports.yaml").read_text(encoding="utf-8"))
ROWS = {number: row for area in AREAS.values() for number, row in area["rows"].items()}
MOST_EXPLAINED = 0.1


def functions(file):
    """The tests of a file by name, with whether they take parameters."""
    tree = ast.parse((CHECKOUT / file).read_text(encoding="utf-8"))
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {
        test.name: any("parametrize" in ast.unparse(d) for d in test.decorator_list)
        for test in tests
        if test.name.startswith("test_")
    }


@pytest.mark.parametrize("area", AREAS)
def test_every_report_of_an_area_has_a_row_and_no_row_is_another_s(area):
    assert sorted(AREAS[area]["rows"]) == sorted(AREAS[area]["numbers"])
    assert len(AREAS[area]["numbers"]) == len(set(AREAS[area]["numbers"]))


def test_no_report_is_in_two_areas():
    assert len(ROWS) == sum(len(area["rows"]) for area in AREAS.values())


@pytest.mark.parametrize("number", ROWS)
def test_a_row_says_what_it_must(number):
    row = ROWS[number]
    assert row["thread"].startswith("https://")
    assert row["behaviour"].strip()
    assert "\n" not in row["behaviour"].strip()
    either = {"tests", "breaks"} if "explained" not in row else {"explained"}
    assert row.keys() == {"thread", "behaviour"} | either
    assert all(row[name] for name in either)


@pytest.mark.parametrize("number", ROWS)
def test_the_tests_of_a_row_exist(number):
    for test in ROWS[number].get("tests", ()):
        file, _, name = test.partition("::")
        name, _, parameters = name.partition("[")
        there = functions(file)
        assert name in there, test
        assert there[name] or not parameters, test


@pytest.mark.parametrize("number", ROWS)
def test_the_breaks_of_a_row_fit_the_product_as_it_is(number):
    for one in ROWS[number].get("breaks", ()):
        text = (CHECKOUT / one["file"]).read_text(encoding="utf-8")
        assert text.count(one["find"]) == 1, one
        assert one["find"] != one["replace"]
        assert not one["file"].startswith("tests/"), "a test is not what is to be broken"


def test_one_break_for_several_rows_turns_different_tests_red():
    seen = {}
    for number, row in ROWS.items():
        if "breaks" in row:
            others = seen.setdefault(repr(row["breaks"]), {})
            assert frozenset(row["tests"]) not in others, (number, others)
            others[frozenset(row["tests"])] = number


def test_few_rows_are_explained_away():
    explained = [number for number, row in ROWS.items() if "explained" in row]
    assert len(explained) <= MOST_EXPLAINED * len(ROWS), explained
