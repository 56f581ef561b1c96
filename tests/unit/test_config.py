import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.config import parse, read
from lib.errors import InputRefused
from lib.schema import Config, to_plain, value_of

WRONG = {
    "adapter.rank": ["abc", True, False, 1.5, "1.5", "1e309", "", "nan", None, [4], {"a": 1}],
    "trainer.batch_size": [float("nan"), float("inf"), 1e309],
    "trainer.max_steps": ["abc", True, 2.5, float("nan"), [], {}],
    "optimizer.lr": ["abc", True, "", None, [1.0], {}],
    "rerun": ["yes", "", 0, 1, 2.0, None, [], ["true"]],
    "latents.random_flip": ["off", 1],
    "dataset.root": [["a"], None, {"a": 1}],
    "dataset.instance_prompt": [["a"], {}],
    "adapter.targets": ["to_q", [1], [None], [["to_q"]], None, {"to_q": 1}],
}
CASES = [(setting, value) for setting, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("setting", "value"), CASES, ids=str)
def test_a_value_of_another_type_is_refused_by_name(setting, value, valid):
    reading = read(valid({setting: value}))
    mine = [problem for problem in reading.problems if problem.subject == f"{setting}={value}"]
    assert len(mine) == 1
    assert mine[0].why.startswith("not ")
    assert mine[0].allowed
    assert value_of(reading.config, setting) == value_of(Config(), setting)


@pytest.mark.parametrize("value", [float("inf"), 1e309, "1e309", "nan", "-inf"])
def test_a_number_that_is_not_finite_is_refused(value, valid):
    (problem,) = read(valid({"optimizer.lr": value})).problems
    assert problem.subject.startswith("optimizer.lr=")
    assert problem.allowed == "1e-12 to 10"


READ_AS = [
    ("adapter.rank", 8.0, 8),
    ("adapter.rank", "8", 8),
    ("optimizer.lr", "1e-3", 1e-3),
    ("optimizer.lr", 1, 1.0),
    ("adapter.alpha", 2, 2.0),
    ("rerun", "true", True),
    ("rerun", "false", False),
    ("rerun", "False", False),
    ("trainer.micro_batch", None, None),
    ("name", 7, "7"),
    ("adapter.targets", ("to_q", "to_k"), ["to_q", "to_k"]),
]


@pytest.mark.parametrize(("setting", "value", "expected"), READ_AS)
def test_a_value_is_read_as_its_field_s_type(setting, value, expected, valid):
    found = value_of(parse(valid({setting: value})), setting)
    assert (found, type(found)) == (expected, type(expected))


def test_equal_numbers_make_equal_configurations(valid):
    one = parse(valid({"adapter.alpha": 4, "adapter.rank": 4.0}))
    assert one == parse(valid({"adapter.alpha": 4.0, "adapter.rank": "4"}))


@pytest.mark.parametrize("name", ["rank", "trainer.steps", "adapter.Rank", "family.preset.rnk"])
def test_an_unknown_name_is_refused_with_the_known_ones(name, valid):
    raw = valid()
    place = raw
    *groups, last = name.split(".")
    for group in groups:
        place = place.setdefault(group, {})
    place[last] = 4
    (problem,) = read(raw).problems
    assert problem.subject == f"{name}=4"
    assert problem.why == "unknown setting"
    assert len(problem.allowed.split(", ")) > 2


@pytest.mark.parametrize("value", [4, "lora", [1], None])
def test_a_value_where_a_group_belongs_is_refused(value, valid):
    (problem,) = read({**valid(), "optimizer": value}).problems
    assert problem.subject == f"optimizer={value}"
    assert "group of settings" in problem.why


def test_all_problems_are_told_at_once_and_sorted(valid):
    planted = {
        "adapter.rank": 0,
        "optimizer.lr": "fast",
        "trainer.batch_size": True,
        "dataset.root": "no/such/folder",
        "lr_schedule.num_cycles": 3,
        "trainer.steps": 5,
    }
    with pytest.raises(InputRefused) as caught:
        parse(valid(planted))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "adapter.rank=0",
        "dataset.root=no/such/folder",
        "lr_schedule.num_cycles=3",
        "optimizer.lr=fast",
        "trainer.batch_size=True",
        "trainer.steps=5",
    ]
    assert caught.value.exit_code == 2


def test_a_wrong_type_is_told_once_and_not_again_as_a_range(valid):
    problems = read(valid({"trainer.max_steps": "abc", "adapter.targets": "to_q"})).problems
    assert [problem.subject for problem in problems] == [
        "adapter.targets=to_q",
        "trainer.max_steps=abc",
    ]


ranks = st.integers(1, 320)
rates = st.floats(1e-12, 10, allow_nan=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(rank=ranks, lr=rates, seed=st.integers(0, 2**63 - 1))
def test_a_configuration_written_out_reads_back_as_itself(rank, lr, seed, valid):
    config = parse(valid({"adapter.rank": rank, "optimizer.lr": lr, "seed": seed}))
    assert parse(to_plain(config)) == config


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=3,
)
settings_names = st.sampled_from(
    [f"{group.name}.{field.name}" for group in dataclasses.fields(Config)
     if dataclasses.is_dataclass(getattr(Config(), group.name))
     for field in dataclasses.fields(getattr(Config(), group.name))]
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(settings_names, json_like, max_size=4))
def test_whatever_is_given_is_read_or_refused_and_never_crashes(valid, changes):
    reading = read(valid(changes))
    for setting, value in changes.items():
        refused = any(p.subject.startswith(f"{setting}") for p in reading.problems)
        assert refused or is_read(value_of(reading.config, setting), value)


def is_read(found, value):
    """Whether a field holds what was given for it; of a group its own fields are asked."""
    if dataclasses.is_dataclass(found):
        return True
    if isinstance(found, bool | list | dict) or found is None:
        return found == value
    return found == (str(value) if isinstance(found, str) else float(value))


def test_a_configuration_cannot_be_changed_afterwards(valid):
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse(valid()).seed = 3
