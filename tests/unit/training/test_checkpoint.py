import dataclasses
import json
import shutil

import pytest
import torch

from lib import files
from lib.errors import Problem, StateRefused
from lib.keys import digest
from lib.optimizers import make_optimizer, set_rate, update
from lib.schema import OptimizerConfig
from lib.training import checkpoint
from lib.training.checkpoint import MANIFEST, STATE, Checkpoint, OptimizerState

KEY = digest("run")


def at(step):
    def filled(*shape):
        return torch.full(shape, float(step))

    return Checkpoint(
        step=step,
        num_samples_seen=4 * step,
        adapter={"a.lora_A.weight": filled(2, 3), "a.lora_B.weight": filled(3, 2)},
        optimizer=OptimizerState(
            "adamw",
            {
                "a.lora_A.default.weight": {
                    "step": filled(),
                    "exp_avg": filled(2, 3) / 2,
                    "exp_avg_sq": filled(2, 3) / 3,
                },
                "a.lora_B.default.weight": {
                    "step": step,
                    "beta": step + 0.5,
                    "state1": filled(3, 2).to(torch.uint8),
                },
            },
        ),
    )


def plain(state):
    """A checkpoint as lists, which compare."""
    return (
        state.step,
        state.num_samples_seen,
        {name: tensor.tolist() for name, tensor in state.adapter.items()},
        state.optimizer.name,
        {
            name: {own: told(value) for own, value in held.items()}
            for name, held in state.optimizer.held.items()
        },
    )


def told(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    return type(value), value


def flip(path, place=-1):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_loaded(folder):
    path = checkpoint.save(folder, at(7), train_key=KEY)
    assert path.name == "step-00000007"
    assert plain(checkpoint.load(path, train_key=KEY)) == plain(at(7))
    assert plain(checkpoint.latest(folder, train_key=KEY).checkpoint) == plain(at(7))


def test_two_are_kept_and_the_newest_is_the_latest(folder):
    for step in (2, 9, 10, 100):
        checkpoint.save(folder, at(step), train_key=KEY)
    assert names(folder) == ["step-00000010", "step-00000100"]
    assert checkpoint.latest(folder, train_key=KEY).checkpoint.step == 100


def test_steps_are_ordered_as_numbers(folder):
    for step in range(8, 13):
        checkpoint.save(folder, at(step), train_key=KEY)
        assert checkpoint.latest(folder, train_key=KEY).checkpoint.step == step
    assert names(folder) == ["step-00000011", "step-00000012"]


def test_copies_and_renamed_ones_are_neither_counted_nor_touched(folder):
    for step in (2, 4):
        checkpoint.save(folder, at(step), train_key=KEY)
    for name in ("step-00000002-backup", "step-4", "step-latest"):
        shutil.copytree(folder / "step-00000002", folder / name)
    (folder / "step-00000002").rename(folder / "my backup-v2-final")
    for step in (6, 8):
        checkpoint.save(folder, at(step), train_key=KEY)
    copies = ["my backup-v2-final", "step-00000002-backup", "step-4", "step-latest"]
    assert names(folder) == sorted([*copies, "step-00000006", "step-00000008"])
    assert checkpoint.latest(folder, train_key=KEY).checkpoint.step == 8


def test_what_a_crash_left_half_made_is_not_counted(folder):
    whole = checkpoint.save(folder, at(2), train_key=KEY)
    left = folder / f"{files.temporary_prefix(1)}half"
    shutil.copytree(whole, left)
    (left / MANIFEST).unlink()
    latest = checkpoint.latest(folder, train_key=KEY)
    assert (latest.checkpoint.step, latest.damaged) == (2, ())
    for step in (4, 6):
        checkpoint.save(folder, at(step), train_key=KEY)
    assert left.is_dir()
    assert [name for name in names(folder) if name[0] != "."] == ["step-00000004", "step-00000006"]


@pytest.mark.parametrize("failing", ["write", "reading back"])
def test_a_save_that_fails_costs_no_earlier_checkpoint(folder, monkeypatch, failing):
    for step in (5, 10):
        checkpoint.save(folder, at(step), train_key=KEY)

    def fails(*_args, **_names):
        raise files.StorageFailed(Problem("disk", "is full"))

    with monkeypatch.context() as patch:
        place = (files, "write_bytes") if failing == "write" else (checkpoint, "load")
        patch.setattr(*place, fails)
        with pytest.raises(files.StorageFailed):
            checkpoint.save(folder, at(15), train_key=KEY)
    assert {"step-00000005", "step-00000010"} <= set(names(folder))
    checkpoint.save(folder, at(15), train_key=KEY)
    assert names(folder) == ["step-00000010", "step-00000015"]


def test_no_checkpoint_is_no_damage(folder):
    assert checkpoint.latest(folder, train_key=KEY) == checkpoint.Latest(None, ())


def harm_flip(path):
    flip(path / STATE)


def harm_header(path):
    flip(path / STATE, 20)


def harm_short(path):
    (path / STATE).write_bytes((path / STATE).read_bytes()[:-4])


def harm_empty(path):
    (path / STATE).write_bytes(b"")


def harm_missing(path):
    (path / STATE).unlink()


def harm_manifest(path):
    (path / MANIFEST).write_bytes(b"{")


def harm_no_manifest(path):
    (path / MANIFEST).unlink()


def harm_fields(path):
    record = json.loads((path / MANIFEST).read_bytes())
    del record["num_samples_seen"]
    (path / MANIFEST).write_text(json.dumps(record))


def harm_list(path):
    (path / MANIFEST).write_text("[]")


def harm_other_step(path):
    record = json.loads((path / MANIFEST).read_bytes())
    (path / MANIFEST).write_text(json.dumps({**record, "step": 3}))


HARMS = [
    harm_flip,
    harm_header,
    harm_short,
    harm_empty,
    harm_missing,
    harm_manifest,
    harm_no_manifest,
    harm_fields,
    harm_list,
    harm_other_step,
]


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_newest_one_is_skipped_and_named(folder, harm):
    for step in (5, 10):
        checkpoint.save(folder, at(step), train_key=KEY)
    harm(folder / "step-00000010")
    latest = checkpoint.latest(folder, train_key=KEY)
    assert plain(latest.checkpoint) == plain(at(5))
    (damage,) = latest.damaged
    assert damage.startswith("step-00000010: ")
    assert names(folder) == ["damaged-step-00000010", "step-00000005"]


@pytest.mark.parametrize("harm", HARMS)
def test_saving_over_a_damaged_one_keeps_it_aside(folder, harm):
    checkpoint.save(folder, at(10), train_key=KEY)
    harm(folder / "step-00000010")
    checkpoint.save(folder, at(10), train_key=KEY)
    assert names(folder) == ["damaged-step-00000010", "step-00000010"]
    assert plain(checkpoint.latest(folder, train_key=KEY).checkpoint) == plain(at(10))
    harm(folder / "step-00000010")
    checkpoint.save(folder, at(10), train_key=KEY)
    assert len(names(folder)) == 3


def test_all_damaged_means_none_and_all_are_named(folder):
    for step in (5, 10):
        harm_flip(checkpoint.save(folder, at(step), train_key=KEY))
    latest = checkpoint.latest(folder, train_key=KEY)
    assert latest.checkpoint is None
    assert [text.split(":")[0] for text in latest.damaged] == ["step-00000010", "step-00000005"]


def test_a_sound_one_is_not_written_again(folder):
    path = checkpoint.save(folder, at(10), train_key=KEY)
    before = (path / STATE).stat().st_ino
    checkpoint.save(folder, at(10), train_key=KEY)
    assert (path / STATE).stat().st_ino == before
    assert names(folder) == ["step-00000010"]


def test_another_run_s_checkpoint_is_refused(folder):
    path = checkpoint.save(folder, at(10), train_key=KEY)
    with pytest.raises(ValueError, match="another run"):
        checkpoint.load(path, train_key=digest("other"))
    latest = checkpoint.latest(folder, train_key=digest("other"))
    assert latest.checkpoint is None
    assert "another run" in latest.damaged[0]


def test_what_is_not_finite_is_not_saved_and_the_old_one_stays(folder):
    checkpoint.save(folder, at(5), train_key=KEY)
    state = at(10)
    state.adapter["a.lora_A.weight"][0, 0] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        checkpoint.save(folder, state, train_key=KEY)
    assert names(folder) == ["step-00000005"]


def parameters():
    """One tensor that 8 bits hold and one that is too small for them."""
    source = torch.Generator().manual_seed(0)
    shapes = {"w": (80, 64), "v": (3, 4)}
    return {n: torch.nn.Parameter(torch.randn(s, generator=source)) for n, s in shapes.items()}


def step(tensors, optimizer, number):
    source = torch.Generator().manual_seed(number)
    for tensor in tensors.values():
        tensor.grad = torch.randn(tensor.shape, generator=source)
    set_rate(optimizer, 0.01 * (number + 1))
    update(optimizer, finite=torch.tensor(True))


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_an_optimizer_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    name, folder, bitsandbytes
):
    config = OptimizerConfig(name=name, lr=0.1)
    straight = parameters()
    optimizer = make_optimizer(straight.values(), config)
    assert checkpoint.optimizer_state(optimizer, straight) == OptimizerState(name)
    for number in range(3):
        step(straight, optimizer, number)
    held = checkpoint.optimizer_state(optimizer, straight)
    saved = checkpoint.save(folder, dataclasses.replace(at(3), optimizer=held), train_key=KEY)
    resumed = parameters()
    with torch.no_grad():
        for own, parameter in resumed.items():
            parameter.copy_(straight[own])
    fresh = make_optimizer(resumed.values(), config)
    checkpoint.restore_optimizer(fresh, resumed, checkpoint.load(saved, train_key=KEY).optimizer)
    for number in range(3, 6):
        step(straight, optimizer, number)
        step(resumed, fresh, number)
    assert all(torch.equal(resumed[own], straight[own]) for own in straight)
    one, other = (
        checkpoint.optimizer_state(o, p).held for o, p in ((optimizer, straight), (fresh, resumed))
    )
    for own in straight:
        assert {n: told(v) for n, v in one[own].items()} == {
            n: told(v) for n, v in other[own].items()
        }


@pytest.mark.parametrize("saved", ["adamw", "adamw_8bit"])
def test_another_optimizer_s_moments_are_refused_with_both_names(saved, bitsandbytes):
    (live,) = {"adamw", "adamw_8bit"} - {saved}
    tensors = parameters()
    optimizer = make_optimizer(tensors.values(), OptimizerConfig(name=live))
    with pytest.raises(StateRefused) as caught:
        checkpoint.restore_optimizer(optimizer, tensors, OptimizerState(saved))
    (problem,) = caught.value.problems
    assert problem.subject == f"optimizer.name={live}"
    assert saved in problem.why
    assert "rerun=true" in problem.remedy
