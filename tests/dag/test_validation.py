"""The held-out loss: on pictures that never train, with draws that never change."""

import json
import math

import numpy as np
import pytest
import torch

HELD_OUT = ("validation.fraction=0.4", "validation.num_draws=4", "validation.every=3")


@pytest.fixture
def losses(ensure, seen, tmp_path):
    """The held-out metrics of a run by step, and the run's folder."""

    def made(*overrides):
        from lib import runs

        manifest = ensure("train", *HELD_OUT, *overrides)
        metrics = [dict(e.data) for e in seen if e.kind == "metric" and "held_out_loss" in e.data]
        folder = runs.completed(tmp_path / "store", manifest.key)
        return {m.pop("step"): m for m in metrics}, folder

    return made


def test_what_is_held_out_is_in_no_step_and_is_cached_in_one_variant(encoded):
    from lib.training.session import make_assembler

    overrides = (*HELD_OUT, "latents.variants=3", "latents.random_flip=true")
    config, opened, upstream = encoded(*overrides)
    assembler = make_assembler(
        config, opened.family, opened.base, upstream=upstream, store=opened.store
    )
    trained = {slot.name for slot in assembler.plan.slots}
    held_out = {sample["name"] for sample in upstream["prepare_dataset"].payload["held_out"]}
    assert trained
    assert held_out
    assert not trained & held_out
    entries = {role: len(refs) for role, refs in upstream["build_latent_cache"].entries.items()}
    assert entries["held_out"] == len(held_out)
    assert entries["train"] > len(trained)


def test_the_loss_is_told_before_the_first_step_at_every_look_and_at_the_end(losses):
    found, folder = losses("trainer.max_steps=4")
    assert list(found) == [0, 3, 4]
    assert found[0]["held_out_loss"] == found[0]["held_out_loss_ema"]
    assert found[4]["held_out_loss"] != found[0]["held_out_loss"]
    kept = json.loads((folder / "validation.json").read_text())
    for step, metrics in found.items():
        pictures = kept[str(step)]["held_out_loss"].values()
        assert math.fsum(pictures) / len(pictures) == pytest.approx(metrics["held_out_loss"])


def test_the_bands_of_sigma_average_to_the_loss(losses):
    found, _ = losses("trainer.max_steps=3")
    for metrics in found.values():
        bands = [value for name, value in metrics.items() if name.startswith("held_out_loss_sigma")]
        assert len(bands) == 4  # four draws, one in each quarter
        assert math.fsum(bands) / 4 == pytest.approx(metrics["held_out_loss"])


def test_looking_more_often_or_less_moves_no_bit_of_the_adapter(ensure, results_of, tmp_path):
    roots = [tmp_path / name for name in ("one", "two", "three")]
    looks = (("validation.every=1",), ("validation.every=6", "validation.num_draws=1"))
    made = [
        results_of(ensure("train", HELD_OUT[0], "adapter.dropout=0.3", *look, root=root), root)
        for look, root in zip(looks, roots, strict=False)
    ]
    assert made[0] == made[1]


def test_held_out_draws_are_shifted_as_in_training(encoded):
    from lib.family import process_of
    from lib.timesteps import mu_of_tokens, shift_sigma
    from lib.training.watching import make_held_out

    def draws(*overrides):
        config, opened, upstream = encoded(*HELD_OUT, *overrides)
        process = process_of(opened.family, opened.base)
        held = make_held_out(config, opened.family, process, upstream, opened.store)
        return opened.base.component("scheduler").config, held.draws

    (_, plain), (scheduler, shifted) = draws(), draws("timesteps.shift_by=tokens")
    assert plain
    for one, other in zip(plain, shifted, strict=True):
        tokens = (one.slot.bucket.height // 16) * (one.slot.bucket.width // 16)
        shift = math.exp(mu_of_tokens(tokens, scheduler=scheduler))
        assert other.level == float(shift_sigma(np.float32(one.level), shift=shift))
        assert other.level > one.level


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.nightly), 0.3])
def test_the_loss_is_the_plain_mean_square_over_the_drawn_levels(losses, encoded, dropout):
    """A plain restatement: the adapter as left, one draw at a time, no batches, no dropout."""
    from lib import adapter, runs, tensors
    from lib.family import process_of
    from lib.records import from_stored
    from lib.training.validation import fixed_draws
    from lib.training.watching import make_held_out

    overrides = ("trainer.max_steps=3", f"adapter.dropout={dropout}")
    found, folder = losses(*overrides)
    config, opened, upstream = encoded(*HELD_OUT, *overrides)
    process = process_of(opened.family, opened.base)
    held_out = make_held_out(config, opened.family, process, upstream, opened.store)
    assert list(held_out.draws) == fixed_draws(
        list(dict.fromkeys(draw.slot for draw in held_out.draws)),
        num_draws=4,
        process=process,
        timesteps=config.timesteps,
        divisor=16,
    )
    for name, file in (
        ("held_out_loss", runs.ADAPTER_FILE),
        ("held_out_loss_ema", runs.EMA_FILE),
    ):
        denoiser = opened.family.load_denoiser(opened.base, dtype=torch.float32, device="cpu")
        injected = adapter.inject(denoiser, config.adapter, seed=0)
        state = from_stored(tensors.decode((folder / file).read_bytes()).tensors)
        adapter.load_state_dict(injected.parameters, state)
        denoiser.eval()
        values = []
        for draw in held_out.draws:
            mean = held_out.records("latents", draw.slot.latents[0])["mean"][None]
            latents = opened.family.normalise(mean, held_out.constants)
            noise = held_out.noise(draw, tuple(latents.shape[1:]))
            sigma = torch.tensor([draw.level])
            record = held_out.records("captions", draw.slot.caption)
            with torch.no_grad():
                velocity = opened.family.predict(
                    denoiser,
                    (1 - sigma) * latents + sigma * noise,
                    sigma,
                    conditioning=opened.family.conditioning([record], draw.slot.frames),
                    guidance=1.0,
                )
            values.append(float((velocity - (noise - latents)).square().mean()))
        assert math.fsum(values) / len(values) == pytest.approx(found[3][name], rel=1e-5)


def test_the_draws_are_the_same_for_every_seed_of_the_run(losses, tmp_path):
    first, _ = losses("trainer.max_steps=1")
    other, _ = losses("trainer.max_steps=1", "seed=5")
    assert first[0]["held_out_loss"] == pytest.approx(other[0]["held_out_loss"], rel=1e-5)


def test_the_change_over_the_run_ends_the_stage(ensure, seen):
    ensure("train", *HELD_OUT)
    done = [e.data for e in seen if e.kind == "phase" and e.stage == "train"][-1]
    assert "95 % interval" in done["held_out_loss"]
    assert "95 % interval" in done["held_out_loss_ema"]
