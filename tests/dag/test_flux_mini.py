"""Learning, on the shipped small base: what a run improves, and the faults that its held-out loss shows."""

import json
import shutil

import pytest
import torch

from lib.intervals import change
from stages.composing import compose

LOOK = ("validation.every=100", "validation.num_draws=2")
SHORT = (
    "trainer.max_steps=15",
    "trainer.batch_size=4",
    "lr_schedule.warmup_steps=2",
    "optimizer.lr=2e-3",
)


def train(root, *overrides):
    """The folder of a demo's run, cut short; what is cached in `root` is not cached again."""
    from lib import runs
    from lib.events import Events
    from lib.pipeline import graph

    where = (f"paths.store={root}/store", f"paths.outputs={root}/outputs", "tracker=none")
    config = compose(["+experiment=flat_style", *LOOK, *SHORT, *where, *overrides])
    manifest = graph.ensure("train", config, Events())
    folder = runs.completed(root / "store", manifest.key)
    assert folder is not None
    return folder


def held_out(folder, *, step, name="held_out_loss"):
    """Loss by picture."""
    return json.loads((folder / "validation.json").read_text())[str(step)][name]


def between(before, after):
    """The change from one set of losses to another, picture by picture."""
    assert before.keys() == after.keys()
    return change([before[name] for name in before], [after[name] for name in before])


def test_no_prompt_of_the_demo_is_a_caption_that_trains(tmp_path):
    from lib.events import Events
    from lib.pipeline import graph

    config = compose(["+experiment=flat_style", f"paths.store={tmp_path}/store"])
    prepared = graph.ensure("prepare_dataset", config, Events()).payload
    assert len(prepared["samples"]) > 24
    assert {sample["caption"] for sample in prepared["held_out"]} >= set(config.sample.prompts)
    assert not set(prepared["captions"]) & set(config.sample.prompts)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Where all runs of this file lie, so that pictures and captions are encoded once."""
    return tmp_path_factory.mktemp("mini")


@pytest.fixture(scope="module")
def honest(root):
    """A run as it should be."""
    return train(root)


@pytest.fixture
def after(honest):
    """Loss by picture at the end of that run."""
    return held_out(honest, step=15)


@pytest.mark.slow
def test_a_few_steps_lower_the_held_out_loss_raw_and_averaged(honest):
    for name in ("held_out_loss", "held_out_loss_ema"):
        fall = between(held_out(honest, step=0, name=name), held_out(honest, step=15, name=name))
        assert fall.high < 0


@pytest.mark.nightly
def test_more_rank_learns_no_worse(after, root):
    fewer = held_out(train(root, "adapter.rank=2"), step=15)
    assert between(fewer, after).mean < 0.01


@pytest.mark.slow
def test_the_strength_of_an_adapter_scales_with_its_alpha(honest):
    """Half the alpha is half the change of every weight."""
    from lib import adapter, runs, tensors
    from lib.pipeline import graph
    from lib.records import from_stored
    from lib.schema import AdapterConfig

    config = compose(["+experiment=flat_style", f"paths.store={honest.parent.parent}/store"])
    state = from_stored(tensors.decode((honest / runs.ADAPTER_FILE).read_bytes()).tensors)
    changes = {}
    for alpha in (8.0, 16.0, 32.0):
        settings = AdapterConfig(rank=16, alpha=alpha, targets=config.adapter.targets)
        opened = graph.open_inputs(config)
        denoiser = opened.family.load_denoiser(opened.base, dtype=torch.float32, device="cpu")
        injected = adapter.inject(denoiser, settings, seed=0)
        adapter.load_state_dict(injected.parameters, state)
        plain = {n: p.clone() for n, p in denoiser.named_parameters() if "base_layer" in n}
        denoiser.fuse_lora()
        changes[alpha] = {n: p - plain[n] for n, p in denoiser.named_parameters() if n in plain}
    for name, whole in changes[16.0].items():
        torch.testing.assert_close(2 * changes[8.0][name], whole, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(0.5 * changes[32.0][name], whole, rtol=1e-4, atol=1e-6)
    assert any(whole.abs().max() > 0 for whole in changes[16.0].values())


@pytest.fixture
def wrong_sign(monkeypatch):
    """A target that points from the noise to the latents."""
    from lib.noise import Flow

    monkeypatch.setattr(Flow, "target", lambda self, latents, noise, level: latents - noise)
    return ()


@pytest.fixture
def wrong_time(monkeypatch):
    """A denoiser that is told 1 - sigma."""
    from lib.families import flux

    right = flux.predict

    def predict(denoiser, noisy, level, **rest):
        return right(denoiser, noisy, 1 - level, **rest)

    monkeypatch.setattr(flux, "predict", predict)
    return ()


@pytest.fixture
def shuffled_captions(tmp_path):
    """A data set in which every picture has its neighbour's caption."""
    folder = tmp_path / "shuffled"
    shutil.copytree(compose(["+experiment=flat_style"]).dataset.root, folder)
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    texts = [row["text"] for row in rows]
    moved = [{**row, "text": text} for row, text in zip(rows, texts[1:] + texts[:1], strict=True)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in moved))
    return (f"dataset.root={folder}",)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["wrong_sign", "wrong_time", "shuffled_captions"])
def test_a_fault_shows_in_the_held_out_loss(fault, after, root, request):
    overrides = request.getfixturevalue(fault)
    found = held_out(train(root, *overrides, "rerun=true"), step=15)
    assert between(after, found).low > 0


def test_the_demo_s_settings_and_base_have_no_problem():
    from lib.pipeline import graph
    from stages.composing import compose

    assert list(graph.problems(compose(["+experiment=flat_style"]), online=True)) == []
