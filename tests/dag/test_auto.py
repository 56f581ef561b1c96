"""`precision=auto`: decided once for a request, kept in the store, heeded by every stage."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
AUTO = "precision=auto"


@pytest.fixture
def machine(monkeypatch):
    """A machine on which the choice falls on a precision, and how often it was asked."""
    from lib import choosing
    from lib.footprint import Way

    asked = []

    def made(mode, *, refused=False):
        def choose(needs, device, **options):
            asked.append(mode)
            return choosing.Choice(Way(mode, False), f"planted {mode}", refused=refused)

        monkeypatch.setattr(choosing, "choose", choose)
        return asked

    return made


def decisions(root):
    found = sorted((root / "store" / "decisions").glob("*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in found]


def precision_of(manifest):
    return manifest.inputs["settings"]["precision.mode"]


def told(seen):
    """What was recorded of the precision."""
    events = [event.data for event in seen if event.kind == "decision"]
    return [data for data in events if data["name"] == "precision.mode"]


def statuses(seen):
    return {event.stage: event.data["status"] for event in seen if event.kind == "phase"}


def test_on_a_cpu_it_is_fp32_the_same_run_as_when_asked_for(ensure, seen, tmp_path):
    made = ensure("train", AUTO)
    assert precision_of(made) == "fp32"
    (data,) = told(seen)
    assert (data["value"], data["source"]) == ("fp32", "auto")
    assert "no GPU" in data["reason"]
    assert decisions(tmp_path) == [{"mode": "fp32", "reason": "there is no GPU"}]
    assert ensure("train", "precision=fp32").key == made.key
    assert statuses(seen)["train"] == "hit"


def test_run_json_says_what_was_decided_and_why(ensure, machine, tmp_path):
    machine("bf16")
    ensure("train", AUTO, "name=run")
    record = json.loads((tmp_path / "outputs/run/run.json").read_text(encoding="utf-8"))
    decided = record["decisions"]["precision.mode"]
    assert (decided["value"], decided["reason"]) == ("bf16", "planted bf16")
    config = (tmp_path / "outputs/run/config.yaml").read_text(encoding="utf-8")
    assert "mode: bf16" in config  # the run can be made again elsewhere by its own file


@pytest.mark.slow
def test_the_second_time_is_a_hit_that_imports_no_torch(ensure, settings):
    key = ensure("train", AUTO).key
    script = (
        f"import sys; sys.argv = ['train', *{settings(AUTO)!r}]\n"
        f"sys.path.insert(0, {str(CHECKOUT)!r})\n"
        "import runpy\n"
        "try:\n    runpy.run_module('stages.train', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'peft'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert key[:8] in done.stdout + done.stderr


def test_a_plan_says_that_nothing_is_decided_and_then_what_was(ensure, plan_text, machine):
    assert "decided when it trains" in plan_text(AUTO)
    ensure("build_latent_cache", AUTO)
    ensure("encode_captions", AUTO)
    asked = machine("bf16")
    assert "decided when it trains" in plan_text(AUTO)
    assert asked == []  # a plan decides nothing
    ensure("train", AUTO)
    (line,) = [text for text in plan_text(AUTO).splitlines() if text.startswith("train")]
    assert "hit" in line
    other = plan_text(AUTO, "precision.redecide=true")
    assert "decided when it trains" in other


def test_what_was_decided_stands_on_another_machine(ensure, machine, seen, tmp_path):
    first = ensure("train", AUTO)
    asked = machine("bf16")
    assert ensure("train", AUTO).key == first.key
    assert (asked, statuses(seen)["train"]) == ([], "hit")
    assert [found["mode"] for found in decisions(tmp_path)] == ["fp32"]


def test_another_rank_is_another_request(ensure, machine, tmp_path):
    ensure("train", AUTO)
    asked = machine("bf16")
    other = ensure("train", AUTO, "adapter.rank=2", "trainer.max_steps=2")
    assert (precision_of(other), asked) == ("bf16", ["bf16"])
    assert sorted(found["mode"] for found in decisions(tmp_path)) == ["bf16", "fp32"]


@pytest.mark.parametrize(
    "lever",
    [
        pytest.param("trainer.micro_batch=1", marks=pytest.mark.nightly),
        "trainer.gradient_checkpointing=always",
        pytest.param("name=other", marks=pytest.mark.nightly),
    ],
)
def test_a_lever_is_no_other_request(ensure, machine, lever):
    first = ensure("train", AUTO)
    asked = machine("bf16")
    assert ensure("train", AUTO, lever).key == first.key
    assert asked == []


def test_asked_to_it_decides_again_and_that_then_stands(ensure, machine, tmp_path):
    ensure("train", AUTO)
    machine("bf16")
    again = ensure("train", AUTO, "precision.redecide=true")
    assert precision_of(again) == "bf16"
    assert [found["mode"] for found in decisions(tmp_path)] == ["bf16"]
    machine("fp32")
    assert ensure("train", AUTO).key == again.key


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("", marks=pytest.mark.nightly),
        "{",
        pytest.param("[]", marks=pytest.mark.nightly),
        '{"mode": "bf16"}',
        pytest.param('{"other": 1}', marks=pytest.mark.nightly),
    ],
)
def test_a_damaged_decision_is_made_again(ensure, tmp_path, damage):
    first = ensure("train", AUTO)
    (path,) = (tmp_path / "store" / "decisions").glob("*.json")
    path.write_text(damage, encoding="utf-8")
    assert ensure("train", AUTO).key == first.key
    assert [found["mode"] for found in decisions(tmp_path)] == ["fp32"]


@pytest.mark.parametrize("mode", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16"])
def test_an_extended_run_goes_on_in_its_precision(ensure, machine, seen, tmp_path, mode):
    ensure("train", f"precision={mode}", "name=short", "trainer.max_steps=4")
    asked = machine("bf16" if mode == "fp32" else "fp32")
    longer = ensure("train", AUTO, "trainer.extend=short", "trainer.max_steps=8")
    assert (precision_of(longer), asked, decisions(tmp_path)) == (mode, [], [])
    (data,) = told(seen)
    assert "extended" in data["reason"]


def test_exports_and_samples_follow(ensure, configure, machine):
    from lib.pipeline import graph

    machine("bf16")
    draws = ("sample.steps=1", "sample.prompts=[a fox]")
    made = ensure("sample", AUTO, *draws)
    plans = graph.plan("sample", configure("precision=bf16", *draws))
    assert all(plan.hit for plan in plans)
    assert plans[-1].known().key == made.key
    assert not any(plan.hit for plan in graph.plan("sample", configure(*draws))[-3:])
    assert all(plan.hit for plan in graph.plan("sample", configure(AUTO, *draws)))


def test_where_nothing_can_fit_it_is_refused_with_what_would_help(ensure, machine, tmp_path):
    from lib.errors import InputRefused

    machine("nf4", refused=True)
    with pytest.raises(InputRefused) as caught:
        ensure("train", AUTO)
    (problem,) = caught.value.problems
    assert problem.subject == "precision.mode=auto"
    assert "buckets.resolution" in problem.remedy
    assert decisions(tmp_path) == []


def test_several_processes_do_not_decide_again(configure, monkeypatch):
    from lib.pipeline import graph

    config = configure(AUTO, "precision.redecide=true")
    assert list(graph.problems(config, online=False)) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    (problem,) = graph.problems(config, online=False)
    assert problem.subject == "precision.redecide=True"
    assert "2 processes" in problem.why


@pytest.fixture
def planned(settings, monkeypatch, capsys):
    """What the command prints."""

    def made(*overrides):
        monkeypatch.setattr(sys, "argv", ["plan", *settings(*overrides)])
        monkeypatch.delitem(sys.modules, "stages.plan", raising=False)
        with pytest.raises(SystemExit) as exit:
            runpy.run_module("stages.plan", run_name="__main__")
        out, err = capsys.readouterr()
        assert (exit.value.code, err) == (0, "")
        return out.splitlines()

    return made


def test_the_plan_tells_the_memory_of_a_step_in_every_precision(planned, ensure):
    def memory(*overrides):
        lines = planned(*overrides)
        first = next(place for place, line in enumerate(lines) if line.startswith("GPU memory"))
        return lines[first], lines[first + 1 : first + 6]

    ensure("prepare_dataset")
    head, rows = memory()
    assert "48x96, 2 at once, 24 text tokens, not compiled" in head  # the largest bucket
    assert [row.split()[0] for row in rows] == ["fp32", "bf16", "fp8", "int8", "nf4"]
    assert [row.split()[0] for row in rows if "this run" in row] == ["fp32"]
    head, rows = memory("precision=nf4", "trainer.max_steps=500", "trainer.micro_batch=1")
    assert "1 at once, 24 text tokens, compiled" in head
    assert [row.split()[0] for row in rows if "this run" in row] == ["nf4"]
    _, rows = memory(AUTO)
    assert not any("this run" in row for row in rows)
    ensure("train", AUTO)
    _, rows = memory(AUTO)
    assert [row.split()[0] for row in rows if "this run" in row] == ["fp32"]


def test_the_plan_tells_which_precisions_this_machine_computes(planned, ensure, monkeypatch):
    from lib import choosing

    faults = {"fp8": "needs another GPU"}
    monkeypatch.setattr(choosing, "fault_of", lambda mode, device: faults.get(mode, ""))
    ensure("prepare_dataset")
    lines = planned(AUTO, "modes=true")
    here = next(place for place, line in enumerate(lines) if line.startswith("this machine"))
    assert "the CPU computes" in lines[here]
    rows = {line.split()[0]: line for line in lines[here + 1 :]}
    assert list(rows) == ["fp32", "bf16", "fp8", "int8", "nf4", "auto"]
    able = [mode for mode, row in rows.items() if row.endswith(" can be computed")]
    assert able == ["fp32", "bf16", "int8", "nf4"]
    assert rows["fp8"].endswith(" needs another GPU")
    assert "fp32: there is no GPU" in rows["auto"]
    assert not any(line.startswith("this machine") for line in planned(AUTO))


def test_an_explicit_precision_that_cannot_be_computed_is_refused_before_anything_is_encoded(
    ensure, seen, monkeypatch, tmp_path
):
    from lib import frozen
    from lib.errors import InputRefused

    monkeypatch.setattr(frozen, "fault_of", lambda mode, device: f"no {mode} units")
    with pytest.raises(
        InputRefused, match=r"precision\.mode=int8: no int8 units; allowed: fp32, bf16"
    ):
        ensure("train", "precision=int8")
    assert not any(event.kind == "phase" for event in seen)
    assert not (tmp_path / "store" / "manifests").exists()


def test_what_is_trained_is_found_where_its_precision_cannot_be_computed(ensure, monkeypatch):
    from lib import frozen

    made = ensure("train", "precision=int8", "trainer.max_steps=1")
    monkeypatch.setattr(frozen, "fault_of", lambda mode, device: f"no {mode} units")
    assert ensure("train", "precision=int8", "trainer.max_steps=1").key == made.key


def test_a_base_stored_in_4_bits_is_trained_so_and_nothing_is_measured(
    ensure, base, machine, seen, tmp_path
):
    pytest.importorskip("bitsandbytes", exc_type=ImportError)
    from tests.unit import stored_in_nf4

    few = stored_in_nf4.store(base, tmp_path / "few")
    asked = machine("bf16")
    made = ensure("train", AUTO, f"family.base={few}", "trainer.max_steps=2")
    assert (precision_of(made), asked) == ("nf4", [])
    (data,) = told(seen)
    assert "as the base is stored" in data["reason"]
