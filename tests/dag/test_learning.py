"""That a run learns, and that it is the plain loop and nothing else."""

import math

import numpy as np
import pytest
import torch

SIGMAS = [0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.99]


def denoiser_with(state, opened, config):
    from lib import adapter

    denoiser = opened.family.load_denoiser(opened.base, dtype=torch.float32, device="cpu")
    injected = adapter.inject(denoiser, config.adapter, seed=config.seed)
    adapter.load_state_dict(injected.parameters, state)
    return denoiser


def mean_loss(denoiser, opened, config, upstream) -> float:
    """Over 8 sigmas and all training pairs, the posterior's mean, one fixed noise a pair."""
    from lib.random import normal
    from lib.training.session import make_assembler

    assembler = make_assembler(
        config, opened.family, opened.base, upstream=upstream, store=opened.store
    )
    losses = []
    for slot in assembler.plan.slots:
        record = assembler.records("latents", slot.latents[0])
        latents = opened.family.normalise(record["mean"][None], assembler.constants)
        shape = tuple(latents.shape)
        noise = torch.from_numpy(
            normal(shape, seed=99, stream="noise", counter=0, sample_id=slot.name)
        )
        text = assembler.records("captions", slot.caption)
        conditioning = opened.family.conditioning([text], slot.frames[:1])
        for sigma in SIGMAS:
            with torch.no_grad():
                prediction = opened.family.predict(
                    denoiser,
                    (1 - sigma) * latents + sigma * noise,
                    torch.tensor([sigma]),
                    conditioning=conditioning,
                    guidance=1.0,
                )
            losses.append(float((prediction - (noise - latents)).square().mean()))
    return float(np.mean(losses))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2))])
def test_the_mean_loss_over_sigmas_and_pairs_falls(encoded, ensure, adapter_of, seed):
    from lib import adapter, tensors
    from lib.records import from_stored

    overrides = (f"seed={seed}", "trainer.max_steps=60", "trainer.save_every=60")
    config, opened, upstream = encoded(*overrides)
    fresh = opened.family.load_denoiser(opened.base, dtype=torch.float32, device="cpu")
    adapter.inject(fresh, config.adapter, seed=seed)
    before = mean_loss(fresh, opened, config, upstream)
    data = adapter_of(ensure("train", *overrides))
    trained = denoiser_with(from_stored(tensors.decode(data).tensors), opened, config)
    after = mean_loss(trained, opened, config, upstream)
    assert after < 0.97 * before


def plain_loop(opened, config, upstream, *, steps: int) -> dict[str, torch.Tensor]:
    """The public recipe restated: PEFT, torch's AdamW, a loop over samples; only draws are ours."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

    from lib import adapter, random
    from lib.training.session import make_assembler

    family = opened.family
    assembler = make_assembler(config, family, opened.base, upstream=upstream, store=opened.store)
    denoiser = family.load_denoiser(opened.base, dtype=torch.float32, device="cpu")
    a = config.adapter
    denoiser.add_adapter(LoraConfig(r=a.rank, lora_alpha=a.alpha, target_modules=list(a.targets)))
    ours = family.load_denoiser(opened.base, dtype=torch.float32, device="cpu")
    adapter.inject(ours, config.adapter, seed=config.seed)
    set_peft_model_state_dict(denoiser, adapter.state_dict(ours))
    trainable = [p for p in denoiser.parameters() if p.requires_grad]
    o = config.optimizer
    optimizer = torch.optim.AdamW(
        trainable,
        lr=o.lr,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
        weight_decay=o.weight_decay,
        fused=False,
        foreach=False,
    )
    for group in assembler.plan.groups(0, steps):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for position, index in enumerate(group.slots):
            slot = assembler.plan.slots[index]
            draw = {"seed": config.seed, "counter": group.first_counter + position}
            draw["sample_id"] = slot.name
            latent = assembler.records("latents", slot.latents[0])
            shape = tuple(latent["mean"][None].shape)
            eps = torch.from_numpy(random.normal(shape, stream="posterior", **draw))
            raw = latent["mean"][None] + latent["std"][None] * eps
            x = (raw - assembler.constants["shift"]) * assembler.constants["scale"]
            noise = torch.from_numpy(random.normal(shape, stream="noise", **draw))
            z = float(random.normal((), stream="timestep", **draw))
            sigma = max(math.ceil(1000 / (1 + math.exp(-z))), 1) / 1000
            text = assembler.records("captions", slot.caption)
            height, width = shape[2] // 2, shape[3] // 2
            ids = torch.zeros(height, width, 3)
            ids[..., 1] += torch.arange(height)[:, None]
            ids[..., 2] += torch.arange(width)[None, :]

            def pack(t, h=height, w=width):
                return t.view(1, -1, h, 2, w, 2).permute(0, 2, 4, 1, 3, 5).reshape(1, h * w, -1)

            prediction = denoiser(
                hidden_states=pack((1 - sigma) * x + sigma * noise),
                timestep=torch.tensor([sigma]),
                guidance=torch.tensor([1.0]),
                pooled_projections=text["pooled_embeds"][None],
                encoder_hidden_states=text["text_embeds"][None],
                txt_ids=torch.zeros(text["text_embeds"].shape[0], 3),
                img_ids=ids.reshape(-1, 3),
                return_dict=False,
            )[0]
            loss = loss + (prediction - pack(noise - x)).square().mean() / len(group.slots)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, config.trainer.max_grad_norm)
        optimizer.step()
    return {n: t.detach() for n, t in get_peft_model_state_dict(denoiser).items()}


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, pytest.param(4, marks=pytest.mark.nightly)])
def test_twenty_steps_equal_a_plain_restatement(encoded, ensure, adapter_of, micro):
    """Groups of four over three buckets, mixed groups and fillers included."""
    from lib import tensors
    from lib.records import from_stored

    overrides = (
        "trainer.max_steps=20",
        "trainer.save_every=20",
        "trainer.batch_size=4",
        f"trainer.micro_batch={micro}",
        "optimizer.lr=1e-3",
        "optimizer.weight_decay=0.01",
        "trainer.max_grad_norm=0.05",
    )
    config, opened, upstream = encoded(*overrides)
    ours = from_stored(tensors.decode(adapter_of(ensure("train", *overrides))).tensors)
    theirs = plain_loop(opened, config, upstream, steps=20)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert float((ours[name] - tensor).abs().max()) < 1e-6, name
