"""Field reports on resuming, on the small run: what is put back, what is left, what is kept."""

import shutil

import pytest

from lib import runs


@pytest.fixture
def killed(ensure, monkeypatch):
    """Trains until a step begins and dies there, as by a power cut; nothing is saved."""

    def run(at, *overrides, **options):
        from lib.training.step import Trainer

        whole = Trainer.launch

        def dying(self, group, **named):
            if group.step == at:
                raise KeyboardInterrupt
            return whole(self, group, **named)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "launch", dying)
            with pytest.raises(KeyboardInterrupt):
                ensure("train", *overrides, **options)

    return run


def state_of(path, manifest):
    """A checkpoint's tensors, flat."""
    from lib.training import checkpoint

    found = checkpoint.load(path, train_key=manifest.key)
    held = {
        f"{name}/{own}": value
        for name, values in found.optimizer.held.items()
        for own, value in values.items()
    }
    return {"adapter": found.adapter, "ema": found.ema, "optimizer": held}


def same(one, other):
    """The names under which both hold the same; their orders are of no account."""
    assert one.keys() == other.keys()
    return {name for name in one if one[name].equal(other[name])}


NAMED = "name=mine"


def test_the_average_goes_on_where_it_was_and_as_fast(killed, ensure, tmp_path):
    """Its decay grows with the steps of the run, not with those since the start of a process."""
    killed(4, NAMED)
    broken, whole = ensure("train", NAMED), ensure("train", NAMED, root=tmp_path / "whole")
    last = "outputs/mine/checkpoints/step-00000006"
    found, expected = (
        state_of(root / last, made)["ema"]
        for root, made in ((tmp_path, broken), (tmp_path / "whole", whole))
    )
    assert found
    assert same(found, expected) == expected.keys()


def test_what_is_saved_after_a_resume_is_what_was_trained_since(killed, ensure, tmp_path):
    killed(2, NAMED)
    checkpoints = tmp_path / "outputs/mine/checkpoints"
    shutil.copytree(checkpoints / "step-00000002", tmp_path / "before")
    made = ensure("train", NAMED)
    before, four, six = (
        state_of(path, made)
        for path in (
            tmp_path / "before",
            checkpoints / "step-00000004",
            checkpoints / "step-00000006",
        )
    )
    for earlier, later in ((before, four), (four, six)):
        for part in ("adapter", "ema", "optimizer"):
            assert same(earlier[part], later[part]) == set()
    whole = ensure("train", NAMED, root=tmp_path / "whole")
    unbroken = state_of(tmp_path / "whole/outputs/mine/checkpoints/step-00000006", whole)
    for part, expected in unbroken.items():
        assert same(six[part], expected) == expected.keys()


LENGTHS = {
    "trainer.max_steps=6": 6,
    "trainer.max_steps=null trainer.num_epochs=2": 8,
}


@pytest.mark.parametrize("length", LENGTHS)
def test_a_resumed_run_makes_the_steps_that_are_left(killed, ensure, tmp_path, length):
    words = (NAMED, *length.split())
    killed(2, *words)
    ensure("train", *words)
    losses = runs.recorded_metric(tmp_path / "outputs/mine", "loss")
    assert [step for step, _ in losses] == list(range(1, LENGTHS[length] + 1))
    lines = (tmp_path / "outputs/mine/events.jsonl").read_text().splitlines()
    assert len([line for line in lines if '"loss"' in line]) == LENGTHS[length]


def test_a_finished_run_makes_no_step_and_changes_no_file(ensure, tmp_path, monkeypatch):
    from lib.training.step import Trainer

    first = ensure("train", NAMED)
    outputs = tmp_path / "outputs"
    left = {path: path.read_bytes() for path in outputs.rglob("*") if path.is_file()}
    monkeypatch.delattr(Trainer, "launch")
    assert ensure("train", NAMED).key == first.key
    assert {path: path.read_bytes() for path in outputs.rglob("*") if path.is_file()} == left


def test_a_checkpoint_renamed_or_copied_by_hand_disturbs_neither_plan_nor_resume(
    killed, ensure, plan_text, tmp_path
):
    killed(5, NAMED)
    checkpoints = tmp_path / "outputs/mine/checkpoints"
    shutil.copytree(checkpoints / "step-00000004", checkpoints / "step-00000004-backup")
    (checkpoints / "step-00000004").rename(checkpoints / "backup-checkpoint-3000")
    assert "4 of 6" in plan_text(NAMED)
    ensure("train", NAMED)
    there = {path.name for path in checkpoints.iterdir()}
    assert {"step-00000004-backup", "backup-checkpoint-3000", "step-00000006"} <= there
    ensure("train", "name=longer", "trainer.max_steps=8", "trainer.extend=mine")


def test_a_second_run_of_a_name_costs_the_first_no_checkpoint(ensure, tmp_path):
    """The second one's steps are fewer, so that an order by steps would drop them first."""
    ensure("train", NAMED)
    first = tmp_path / "outputs/mine/checkpoints"
    left = {path: path.read_bytes() for path in first.rglob("*") if path.is_file()}
    second = ensure("train", NAMED, "seed=7", "trainer.max_steps=2")
    assert {path: path.read_bytes() for path in first.rglob("*") if path.is_file()} == left
    folder = runs.completed(tmp_path / "store", second.key)
    assert folder is not None
    assert [path.name for path in runs.checkpoints(folder / "checkpoints")] == ["step-00000002"]
