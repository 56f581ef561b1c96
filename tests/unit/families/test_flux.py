"""FLUX against diffusers' own pipeline, unmodified, over the same tiny weights."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lib import adapter
from lib.families import flux
from lib.family import Conditioning
from lib.random import normal
from lib.schema import AdapterConfig, Config, ExportConfig
from tests.unit.families import reference

HEIGHT, WIDTH, LENGTH, STEPS, GUIDANCE = 64, 96, 48, 3, 3.5
LATENT = (HEIGHT // 8, WIDTH // 8)
encoded = reference.encoder(flux, length=LENGTH)
call = reference.argument_mutations(flux)
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "proj_mlp"]


@pytest.fixture
def pipeline(base):
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(base.root, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def noise() -> torch.Tensor:
    shape = (2, 16, *LATENT)
    return torch.from_numpy(normal(shape, seed=1, stream="noise", counter=0, sample_id="test"))


def pipeline_latents(pipe, prompts: list[str]) -> torch.Tensor:
    """Latents the pipeline ends with, unpacked: b c h w."""
    packed = pipe._pack_latents(noise(), 2, 16, *LATENT)
    out = pipe(
        prompt=prompts,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        latents=packed,
        max_sequence_length=LENGTH,
        output_type="latent",
    ).images
    return pipe._unpack_latents(out, HEIGHT, WIDTH, 8)


def our_latents(base, denoiser, prompts: list[str]) -> torch.Tensor:
    records = [record for prompt in prompts for record in encoded(base, [prompt])]
    settings = {"records": records, "steps": STEPS, "guidance": GUIDANCE}
    return reference.sampled(flux, base, denoiser, noise(), **settings)


PROMPTS = ["a red circle", "a watercolor painting of a cat with a hat"]


def exported(base, tmp_path, *, alpha: float, dtype: str = "fp32"):
    """A denoiser whose adapter has a drawn B, and the folder with the exported file."""
    from lib.exporting import export_adapter
    from lib.records import to_stored
    from lib.tensors import encode

    config = Config(
        adapter=AdapterConfig(rank=4, alpha=alpha, targets=TARGETS),
        export=ExportConfig(dtype=dtype),
    )
    denoiser = flux.load_denoiser(base, dtype=torch.float32, device="cpu")
    injected = adapter.inject(denoiser, config.adapter, seed=0)
    for name, parameter in injected.parameters.items():
        if "lora_B" in name:
            shape = tuple(parameter.shape)
            drawn = normal(shape, seed=5, stream="noise", counter=0, sample_id=name)
            parameter.data = 4 * torch.from_numpy(drawn)
    source = tmp_path / "adapter.safetensors"
    state = adapter.state_dict(denoiser)
    source.write_bytes(encode(to_stored(state), metadata={}))
    options = {"config": config, "family": flux, "denoiser": base.component("transformer")}
    export_adapter(source, tmp_path, provenance={}, **options)
    return denoiser, tmp_path


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_another_text_length_changes_the_conditioning(base):
    encoders = flux.load_text_encoders(base, dtype=torch.float32, device="cpu")
    denoiser = flux.load_denoiser(base, dtype=torch.float32, device="cpu")
    found = []
    for length in (32, 64):
        records = flux.encode_captions(encoders, PROMPTS, max_length=length)
        found.append(
            flux.predict(
                denoiser,
                noise(),
                torch.tensor([0.5, 0.5]),
                conditioning=flux.conditioning(records, ()),
                guidance=1.0,
            )
        )
    assert relative(found[0], found[1]) > 1e-3


def test_a_batch_of_captions_equals_each_alone(base):
    encoders = flux.load_text_encoders(base, dtype=torch.float32, device="cpu")
    together = flux.encode_captions(encoders, PROMPTS, max_length=LENGTH)
    for text, record in zip(PROMPTS, together, strict=True):
        alone = flux.encode_captions(encoders, [text], max_length=LENGTH)[0]
        for name, tensor in alone.items():
            torch.testing.assert_close(record[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alpha", [4.0, 2.0, 8.0])
def test_the_exported_adapter_draws_the_same_latents_in_the_pipeline(
    base, pipeline, tmp_path, alpha
):
    denoiser, folder = exported(base, tmp_path, alpha=alpha)
    bare = pipeline_latents(pipeline, PROMPTS)
    pipeline.load_lora_weights(folder, weight_name="pytorch_lora_weights.safetensors")
    adapted = pipeline_latents(pipeline, PROMPTS)
    assert relative(adapted, bare) > 0.1
    assert torch.equal(our_latents(base, denoiser, PROMPTS), adapted)


@pytest.mark.parametrize("loss", ["module", "alpha"])
def test_an_export_that_lost_a_module_or_its_alpha_draws_other_latents(
    base, pipeline, tmp_path, loss
):
    denoiser, folder = exported(base, tmp_path, alpha=2.0)
    path = folder / "pytorch_lora_weights.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    if loss == "alpha":
        described = json.loads(metadata["lora_adapter_metadata"])
        described.pop("transformer.lora_alpha")
        metadata["lora_adapter_metadata"] = json.dumps(described)
    else:
        gone = next(name for name in tensors if "proj_mlp" in name).rsplit(".lora_", 1)[0]
        tensors = {n: t for n, t in tensors.items() if not n.startswith(gone)}
    save_file(tensors, path, metadata=metadata)
    expected = pytest.warns(RuntimeWarning) if loss == "module" else nullcontext()
    with expected:
        pipeline.load_lora_weights(folder, weight_name=path.name)
    assert not torch.equal(
        our_latents(base, denoiser, PROMPTS), pipeline_latents(pipeline, PROMPTS)
    )


@pytest.mark.parametrize("steps", [1, 4, 28])
def test_the_sampling_schedule_is_the_schedulers(base, pipeline, steps):
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    tokens = (LATENT[0] // 2) * (LATENT[1] // 2)
    pipeline.scheduler.set_timesteps(
        sigmas=np.linspace(1.0, 1 / steps, steps), mu=calculate_shift(tokens)
    )
    ours = flux.sampling_schedule(steps, latent_size=LATENT, base=base)
    assert list(ours.sigmas) == pipeline.scheduler.sigmas[:-1].tolist()
    assert ours.levels == ours.sigmas


def test_normalised_latents_are_what_the_pipeline_decodes_from(base, pipeline):
    pixels = torch.rand(1, 3, HEIGHT, WIDTH) * 2 - 1
    autoencoder = flux.load_autoencoder(base, dtype=torch.float32, device="cpu")
    posterior = flux.encode_images(autoencoder, pixels)
    with torch.no_grad():
        reference = pipeline.vae.encode(pixels).latent_dist
    assert torch.equal(posterior.mean, reference.mean)
    assert torch.equal(posterior.std, reference.std)
    constants = flux.latent_constants(base)
    latents = flux.normalise(posterior.mean, constants)
    config = pipeline.vae.config
    back = latents / config.scaling_factor + config.shift_factor  # the pipeline's own line
    torch.testing.assert_close(back, posterior.mean, rtol=1e-5, atol=1e-6)
    shape = flux.latent_shape(base.component("vae").config, height=HEIGHT, width=WIDTH)
    assert shape == tuple(posterior.mean.shape[1:])


def test_without_guidance_embeds_the_denoiser_gets_no_guidance(base):
    from diffusers import FluxTransformer2DModel

    denoiser = FluxTransformer2DModel(**{**flux.TINY["transformer"], "guidance_embeds": False})
    records = [{"text_embeds": torch.zeros(8, 32), "pooled_embeds": torch.zeros(32)}] * 2
    for guidance in (1.0, 9.0):
        out = flux.predict(
            denoiser.eval(),
            noise(),
            torch.tensor([0.2, 0.9]),
            conditioning=flux.conditioning(records, ()),
            guidance=guidance,
        )
        assert out.shape == noise().shape


def test_a_prediction_does_not_depend_on_its_batch_mates(base):
    denoiser = flux.load_denoiser(base, dtype=torch.float32, device="cpu")
    encoders = flux.load_text_encoders(base, dtype=torch.float32, device="cpu")
    records = flux.encode_captions(encoders, PROMPTS, max_length=LENGTH)
    levels = torch.tensor([0.3, 0.8])

    def run(rows: slice) -> torch.Tensor:
        return flux.predict(
            denoiser,
            noise()[rows],
            levels[rows],
            conditioning=flux.conditioning(records[rows], ()),
            guidance=1.0,
        )

    both = run(slice(0, 2))
    for row in range(2):
        torch.testing.assert_close(both[row : row + 1], run(slice(row, row + 1)))


# Checks written as functions, so that each can be seen red under a mutation.


def check_captions(base, pipe):
    for caption in reference.CAPTIONS.values():
        with torch.no_grad():
            embeds, pooled, _ = pipe.encode_prompt(caption, None, max_sequence_length=LENGTH)
        record = encoded(base, [caption])[0]
        assert torch.equal(record["text_embeds"], embeds[0])
        assert torch.equal(record["pooled_embeds"], pooled[0])


def check_predict(base, pipe):
    denoiser = reference.denoiser_of(flux, base)
    with reference.recorded(pipe.transformer) as calls:
        expected = pipeline_latents(pipe, PROMPTS)
    records = encoded(base, PROMPTS)
    for _, named, output in calls:
        found = flux.predict(
            denoiser,
            pipe._unpack_latents(named["hidden_states"], HEIGHT, WIDTH, 8),
            named["timestep"],
            conditioning=flux.conditioning(records, ()),
            guidance=GUIDANCE,
        )
        torch.testing.assert_close(
            found.detach(), pipe._unpack_latents(output[0], HEIGHT, WIDTH, 8)
        )
    assert torch.equal(our_latents(base, denoiser, PROMPTS), expected)


def check_latents(base, pipe):
    autoencoder = flux.load_autoencoder(base, dtype=torch.float32, device="cpu")
    posterior = flux.encode_images(autoencoder, reference.drawn(1, 3, HEIGHT, WIDTH).clamp(-1, 1))
    constants = flux.latent_constants(base)
    latents = flux.normalise(posterior.mean, constants)
    config = pipe.vae.config
    with torch.no_grad():  # the pipeline's own line, from latents to the picture
        image = pipe.vae.decode(latents / config.scaling_factor + config.shift_factor)[0]
    ours = flux.decode_latents(autoencoder, posterior.mean)
    torch.testing.assert_close(ours, image, rtol=1e-5, atol=1e-5)


def check_loss(base, pipe):
    """Loss and gradients of an adapter against the public recipe, written out."""
    config = reference.adapter_config(flux)
    denoiser, injected = reference.adapted(flux, base, config, strength=1.0)
    latents, noised = reference.drawn(2, 16, *LATENT, name="latents"), noise()
    level = torch.tensor([0.25, 0.8])
    with torch.no_grad():
        embeds, pooled, text_ids = pipe.encode_prompt(PROMPTS, None, max_sequence_length=LENGTH)
    sigma = level.view(-1, 1, 1, 1)
    noisy = (1.0 - sigma) * latents + sigma * noised
    output = denoiser(
        hidden_states=pipe._pack_latents(noisy, 2, 16, *LATENT),
        timestep=level,
        guidance=torch.ones(2),
        pooled_projections=pooled,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=pipe._prepare_latent_image_ids(
            2, LATENT[0] // 2, LATENT[1] // 2, "cpu", torch.float32
        ),
        return_dict=False,
    )[0]
    unpacked = pipe._unpack_latents(output, HEIGHT, WIDTH, 8)
    expected = ((unpacked - (noised - latents)) ** 2).mean()
    reference.assert_same_training(
        flux,
        base,
        denoiser,
        injected,
        expected,
        latents=latents,
        noise=noised,
        level=level,
        conditioning=flux.conditioning(encoded(base, PROMPTS), ()),
    )


CHECKS = (check_captions, check_predict, check_latents, check_loss)


def _zeroed_pads(conditioning, records, frames):
    made = dict(conditioning(records, frames))
    text = made["text_embeds"].clone()
    text[:, LENGTH // 2 :] = 0
    return Conditioning({**made, "text_embeds": text})


MUTATIONS = {
    "height and width change places": (check_predict, call(img_ids=lambda ids: ids[:, [0, 2, 1]])),
    "time runs the other way": (check_predict, call(timestep=lambda t: 1 - t)),
    "guidance is not fed": (check_predict, call(guidance=torch.ones_like)),
    "guidance is fed times 1000": (check_loss, call(guidance=lambda g: 1000 * g)),
    "the pooled state is dropped": (check_predict, call(pooled_projections=torch.zeros_like)),
    "the pads are zero": (check_predict, reference.alters(flux, "conditioning", _zeroed_pads)),
    "the sign is changed": (
        check_predict,
        reference.alters(flux, "predict", lambda predict, *a, **k: -predict(*a, **k)),
    ),
    "the sign is changed in training": (
        check_loss,
        reference.alters(flux, "predict", lambda predict, *a, **k: -predict(*a, **k)),
    ),
    "latents are not normalised": (
        check_latents,
        reference.replaces(flux, "normalise", lambda latents, constants: latents),
    ),
    "latents lose the shift": (
        check_latents,
        reference.alters(flux, "normalise", lambda f, x, c: f(x, {**c, "shift": 0.0})),
    ),
    "the scale is its reciprocal": (
        check_latents,
        reference.alters(flux, "normalise", lambda f, x, c: f(x, {**c, "scale": 1 / c["scale"]})),
    ),
    "captions are cut to a shorter length": (
        check_captions,
        reference.alters(
            flux, "encode_captions", lambda f, *a, max_length: f(*a, max_length=LENGTH - 1)
        ),
    ),
    "the schedule is not shifted by size": (
        check_predict,
        reference.replaces(flux, "mu_of_tokens", lambda tokens, **_: 0.0),
    ),
}


@pytest.mark.parametrize("check", CHECKS)
def test_holds(check, base, pipeline):
    check(base, pipeline)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_turns_its_check_red(name, base, pipeline, monkeypatch):
    check, mutate = MUTATIONS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(base, pipeline)


def test_an_adapter_learns_one_batch(base):
    config = reference.adapter_config(flux, rank=8, alpha=8.0)
    denoiser, injected = reference.adapted(flux, base, config)
    made = flux.conditioning(encoded(base, PROMPTS), ())
    batch = {"latents": reference.drawn(2, 16, *LATENT, name="latents"), "noise": noise()}
    losses, idle = reference.train(
        injected.parameters,
        lambda: reference.loss_of(
            flux, base, denoiser, level=torch.tensor([0.25, 0.8]), conditioning=made, **batch
        ),
    )
    assert losses[-1] < 0.8 * losses[0]
    assert idle == set()
