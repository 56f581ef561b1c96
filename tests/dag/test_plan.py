"""`plan` says what the run then does: hits, misses with the reason, steps, buckets, bytes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
CASES = {
    "cold": (),
    "another rank": ("adapter.rank=8",),
    "another resolution": ("buckets.resolution=96",),
    "more variants": ("latents.variants=3", "latents.random_flip=true"),
    "epochs and a longer text": (
        "trainer.max_steps=null",
        "trainer.num_epochs=2",
        "captions.max_length=32",
    ),
}


HERE = ("another resolution", "epochs and a longer text")
NIGHTLY = [
    pytest.param(case, marks=pytest.mark.nightly) for case in ("another rank", "more variants")
]


@pytest.fixture
def planned(configure):
    def made(*overrides):
        from lib.pipeline import graph

        return {plan.stage: plan for plan in graph.plan("export", configure(*overrides))}

    return made


def tensor_bytes(store: Path, kind: str) -> int:
    from lib.tensors import decode

    found = [decode(p.read_bytes()) for p in store.glob(f"{kind}/*/*.safetensors")]
    return sum(len(t.data) for entry in found for t in entry.tensors.values())


@pytest.mark.parametrize("case", ["cold", *HERE, *NIGHTLY])
def test_the_plan_is_what_the_run_then_does(planned, ensure, seen, tmp_path, case):
    if case != "cold":
        ensure("export")
    store = tmp_path / "store"
    before = {kind: tensor_bytes(store, kind) for kind in ("captions", "latents")}
    plans = planned(*CASES[case])
    manifest = ensure("export", *CASES[case])
    status = {e.stage: e.data["status"] for e in seen if e.kind == "phase"}
    for stage, plan in plans.items():
        assert plan.hit == (status[stage] == "hit"), stage
        assert plan.known().key == {**{"export": manifest.key}, **keys(seen)}[stage]
    made = {e.stage: e.data.get("made", 0) for e in seen if e.kind == "phase"}
    for stage, kind in (("encode_captions", "captions"), ("build_latent_cache", "latents")):
        assert plans[stage].missing == made[stage]
        assert plans[stage].missing_bytes == tensor_bytes(store, kind) - before[kind]
    steps = [event.data["step"] for event in seen if event.kind == "metric"]
    assert plans["train"].missing == len(steps)
    assert steps == list(range(1, plans["train"].total + 1))


def keys(seen) -> dict[str, str]:
    return {e.stage: e.data["key"] for e in seen if e.kind == "phase" and "key" in e.data}


def test_after_the_run_everything_is_a_hit(planned, ensure):
    ensure("export")
    assert all(plan.hit and not plan.missing for plan in planned().values())


def test_a_miss_names_the_settings_that_changed(ensure, plan_text):
    ensure("export")
    shown = plan_text("buckets.resolution=96", "optimizer.lr=1e-3")
    lines = {line.split()[0]: line for line in shown.splitlines()}
    assert "hit" in lines["encode_captions"]
    assert "buckets.resolution 64 -> 96" in lines["build_latent_cache"]
    assert "8 of 8" in lines["build_latent_cache"]
    assert "optimizer.lr 0.01 -> 0.001" in lines["train"]
    assert "the latents changed" in lines["train"]


def test_a_changed_caption_is_named_as_such(ensure, plan_text, data):
    ensure("train")
    (data / "fox.txt").write_text("another caption", encoding="utf-8")
    shown = plan_text()
    assert re.search(r"encode_captions +miss +1 of 9 captions missing", shown)
    assert re.search(r"build_latent_cache +hit", shown)
    assert "the data set changed" in shown


def test_the_bucket_table_counts_every_picture(plan_text):
    shown = plan_text()
    table = dict(re.findall(r"^  (\d+x\d+) +(\d+)", shown, flags=re.MULTILINE))
    assert sum(map(int, table.values())) == 8
    assert len(table) == 3


def test_an_interrupted_run_plans_the_steps_that_are_left(planned, ensure, monkeypatch):
    from lib.training import step

    whole = step.Trainer.launch

    def failing(self, group, *, rate):
        if group.step == 4:
            raise RuntimeError("planted")
        return whole(self, group, rate=rate)

    monkeypatch.setattr(step.Trainer, "launch", failing)
    with pytest.raises(RuntimeError, match="planted"):
        ensure("train")
    plan = planned()["train"]
    assert (plan.hit, plan.missing, plan.total) == (False, 2, 6)


def test_an_unbuilt_tiny_base_counts_as_all_missing_with_its_bytes(planned, ensure, tmp_path):
    plans = planned("family.base=tiny", "captions.dtype=fp32")
    assert not (tmp_path / "store" / "bases").exists()
    ensure("build_latent_cache", "family.base=tiny", "captions.dtype=fp32")
    ensure("encode_captions", "family.base=tiny", "captions.dtype=fp32")
    for stage, kind in (("encode_captions", "captions"), ("build_latent_cache", "latents")):
        assert plans[stage].missing == plans[stage].total
        assert plans[stage].missing_bytes == tensor_bytes(tmp_path / "store", kind)


@pytest.mark.slow
def test_plan_imports_no_torch_and_makes_nothing(settings, tmp_path):
    script = (
        f"import sys; sys.argv = ['plan', *{settings()!r}]\n"
        f"sys.path.insert(0, {str(CHECKOUT)!r})\n"
        "import runpy\n"
        "try:\n    runpy.run_module('stages.plan', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'peft'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "to write" in done.stdout
    made = (
        {path.name for path in (tmp_path / "store").iterdir()}
        if (tmp_path / "store").exists()
        else set()
    )
    assert made <= {"memory"}
    assert not (tmp_path / "outputs").exists()
