"""A run goes on from another's last checkpoint when asked to, and only where they fit."""

import json
import shutil

import pytest

from lib.errors import InputRefused, StateRefused


def rates(folder):
    """The learning rate of each step of a run."""
    events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return {e["step"]: e["lr"] for e in events if e["kind"] == "metric" and "lr" in e}


@pytest.fixture
def tensors_of(results_of):
    """What a run made, without the header, which names the run."""
    from lib.tensors import decode

    def found(*run):
        return {name: decode(data).tensors for name, data in results_of(*run).items()}

    return found


@pytest.fixture
def short(ensure, tmp_path):
    """A complete run of four steps, by the name of `short`."""
    ensure("train", "name=short", "trainer.max_steps=4")
    return tmp_path / "outputs/short"


@pytest.fixture(scope="module")
def beside(small, put_pictures, tmp_path_factory):
    """Where such a run is that tests only look at: the same overrides for all of them."""
    from lib.events import Events
    from lib.pipeline import graph
    from stages.composing import compose

    root = tmp_path_factory.mktemp("extended")
    place = {"root": root, "data": put_pictures(root / "data")}
    graph.ensure("train", compose(small("name=short", "trainer.max_steps=4", **place)), Events())
    names = ("dataset.root", "paths.store", "paths.outputs")
    return [word for word in small(**place) if word.split("=")[0] in names]


LONGER = ("name=longer", "trainer.max_steps=8", "trainer.extend=short")


def test_an_extended_run_ends_as_one_that_was_as_long_from_the_start(
    short, ensure, tensors_of, tmp_path
):
    left = {path: path.read_bytes() for path in short.rglob("*") if path.is_file()}
    longer = ensure("train", *LONGER)
    assert sorted(rates(tmp_path / "outputs/longer")) == [5, 6, 7, 8]
    whole = ensure("train", "trainer.max_steps=8", root=tmp_path / "whole")
    assert tensors_of(longer) == tensors_of(whole, tmp_path / "whole")
    assert {path: path.read_bytes() for path in short.rglob("*") if path.is_file()} == left


def test_the_key_names_the_checkpoint_and_the_same_command_is_a_hit(short, ensure, seen, tmp_path):
    longer = ensure("train", *LONGER)
    record = json.loads((tmp_path / "outputs/longer/run.json").read_text())
    checkpoint = json.loads((short / "checkpoints/step-00000004/manifest.json").read_text())
    assert record["identity"]["extends"] == checkpoint["digest"]
    assert record["decisions"]["extend"]["value"] == 4
    assert ensure("train", *LONGER).key == longer.key
    assert [e.data["status"] for e in seen if e.kind == "phase" and e.stage == "train"] == ["hit"]


@pytest.mark.parametrize(
    "schedule",
    ["cosine_with_restarts", "linear", pytest.param("cosine", marks=pytest.mark.nightly)],
)
def test_the_rate_is_that_of_the_whole_length_to_the_last_step(
    short, ensure, configure, tmp_path, schedule
):
    """A schedule that had ended would train the rest at rate 0."""
    from lib.optimizers import learning_rate

    overrides = (*LONGER, f"lr_schedule={schedule}", "optimizer.lr=5e-3")
    ensure("train", *overrides)
    found = rates(tmp_path / "outputs/longer")
    config = configure(*overrides).lr_schedule
    expected = [learning_rate(config, base=5e-3, step=s, total_steps=8) for s in range(4, 8)]
    assert list(found.values()) == pytest.approx(expected)
    assert min(found.values()) > 0


def test_an_extended_run_that_is_killed_resumes_from_its_own_checkpoint(
    short, ensure, tensors_of, monkeypatch, tmp_path
):
    from lib.training.step import Trainer

    whole = Trainer.launch

    def dying(self, group, *, rate):
        if group.step == 7:
            raise KeyboardInterrupt
        return whole(self, group, rate=rate)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "launch", dying)
        with pytest.raises(KeyboardInterrupt):
            ensure("train", *LONGER)
    resumed = ensure("train", *LONGER)
    expected = ensure("train", "trainer.max_steps=8", root=tmp_path / "whole")
    assert tensors_of(resumed) == tensors_of(expected, tmp_path / "whole")


def test_a_run_is_named_by_its_folder_wherever_it_lies_and_whatever_its_name(
    short, ensure, results_of, tmp_path
):
    first = ensure("train", *LONGER)
    results = results_of(first)
    moved = tmp_path / "my backup-v2-final"
    shutil.move(short, moved)
    again = ensure("train", "trainer.max_steps=8", f"trainer.extend='{moved}'")
    assert again.key == first.key
    assert results_of(again) == results


def test_a_stopped_run_can_be_extended_and_the_last_sound_checkpoint_counts(
    short, ensure, seen, tmp_path
):
    newest = short / "checkpoints/step-00000004/state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    ensure("train", *LONGER)
    extended = [
        e.data["value"] for e in seen if e.kind == "decision" and e.data["name"] == "extend"
    ]
    assert extended == [2]


REFUSED = {
    "adapter.rank=8 adapter.alpha=4": ["adapter.rank=8", "allowed: 4"],
    "adapter.targets=[to_q]": ["adapter.targets"],
    "optimizer.weight_decay=0.5": ["optimizer.weight_decay=0.5"],
    "trainer.batch_size=4": ["trainer.batch_size=4", "allowed: 2"],
    "trainer.ema_decay=0": ["trainer.ema_decay=0", "allowed: 0.99"],
    "seed=3": ["seed=3"],
    "trainer.max_steps=4": ["trainer.max_steps=4", "more than 4 steps"],
    "trainer.extend=nothing": ["trainer.extend=nothing", "no such run"],
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_does_not_fit_is_named_before_anything_is_made(beside, configure, change):
    from lib.pipeline import graph

    config = configure(*beside, *LONGER, *change.split())
    problems = [str(p) for p in graph.problems(config, online=False)]
    assert len(problems) == 1
    for words in REFUSED[change]:
        assert words in problems[0]


def test_all_that_does_not_fit_is_one_report(beside, configure):
    from lib.pipeline import graph

    changes = ("adapter.alpha=2", "seed=3", "optimizer.beta1=0.5")
    config = configure(*beside, *LONGER, *changes)
    problems = [str(p) for p in graph.problems(config, online=False)]
    assert [p.partition("=")[0] for p in sorted(problems)] == [
        "adapter.alpha",
        "optimizer.beta1",
        "seed",
    ]


def test_another_data_set_is_refused_with_the_fields_that_differ(short, ensure, data):
    (data / "fox.txt").write_text("a wolf", encoding="utf-8")
    with pytest.raises(InputRefused) as refused:
        ensure("train", *LONGER)
    fields = {problem.subject.partition("=")[0] for problem in refused.value.problems}
    assert fields == {"manifest", "captions"}


def test_a_run_that_is_running_is_not_extended(short, ensure, tmp_path):
    from lib import runs
    from lib.leases import this_process

    key = json.loads((short / "run.json").read_text())["keys"]["train"]
    path = runs.record_path(tmp_path / "store", key)
    process = vars(this_process())
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "state": "running", "process": process})
    )
    with pytest.raises(StateRefused, match="is running"):
        ensure("train", *LONGER)


def test_a_folder_that_is_no_run_is_refused(short, configure, tmp_path):
    from lib.pipeline import graph

    (tmp_path / "outputs/other").mkdir()
    config = configure("trainer.extend=other")
    (problem,) = graph.problems(config, online=False)
    assert "no run.json" in problem.why


def test_without_being_asked_a_longer_run_starts_at_step_0(short, ensure, tmp_path):
    ensure("train", "name=longer", "trainer.max_steps=8")
    assert sorted(rates(tmp_path / "outputs/longer")) == list(range(1, 9))


def test_the_plan_counts_what_is_left(beside, plan_text):
    assert "4 of 8" in plan_text(*beside, *LONGER)
