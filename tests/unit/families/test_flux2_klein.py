"""FLUX.2 klein against diffusers' own pipeline, unmodified, over the same tiny weights."""

import json
import shutil

import numpy as np
import pytest
import torch

from lib import guidance, timesteps
from lib.families import flux2_klein as family
from lib.hub import Base
from lib.memory import Memory
from tests.unit.families import reference
from tests.unit.families.reference import CAPTIONS, HEIGHT, LONG, PROMPTS, SHORT, WIDTH, drawn

LENGTH, STEPS, SCALE = 48, 3, 4.0
SIZE = (HEIGHT // 8, WIDTH // 8)
NOISE = (2, 32, SIZE[0] // 2, SIZE[1] // 2)  # patchified
encode = reference.encoder(family, length=LENGTH)
predicted = reference.predictor(family, noise=drawn(*NOISE))
sampled = reference.sampler(
    family, noise=drawn(*NOISE), steps=STEPS, scale=SCALE, length=LENGTH, size=SIZE
)
call = reference.argument_mutations(family)


def unpacked(tokens):
    return tokens.mT.reshape(len(tokens), -1, *NOISE[2:])


def pipeline_latents(pipeline, scale=SCALE):
    """Raw latents that the pipeline ends with: b c h w."""
    return pipeline(
        prompt=list(PROMPTS),
        guidance_scale=scale,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=STEPS,
        latents=drawn(*NOISE),
        max_sequence_length=LENGTH,
        output_type="latent",
    ).images


def our_latents(base, denoiser, scale=SCALE):
    """As the pipeline ends: raw."""
    return family.denormalise(sampled(base, denoiser, scale), family.latent_constants(base))


# Checks: each holds, and each turns red under the mutations named further down.


def check_captions(base, pipeline):
    for caption in CAPTIONS.values():
        with torch.no_grad():  # as in the pipeline's call; torch takes other kernels with gradients
            expected, _ = pipeline.encode_prompt(caption, max_sequence_length=LENGTH)
        assert torch.equal(encode(base, [caption])[0]["text_embeds"], expected[0])


def check_predict(base, pipeline):
    denoiser = reference.denoiser_of(family, base)
    other = family.encode_unconditional(reference.encoders_of(family, base), max_length=LENGTH)
    with reference.recorded(pipeline.transformer) as calls:
        pipeline_latents(pipeline)
    assert len(calls) == 2 * STEPS
    for number, (_, named, output) in enumerate(calls):
        records = [{"text_embeds": states} for states in named["encoder_hidden_states"]]
        if number % 2:
            expected = other["text_embeds"].expand(2, -1, -1)
            torch.testing.assert_close(named["encoder_hidden_states"], expected)
        noisy = unpacked(named["hidden_states"])
        found = predicted(denoiser, records, named["timestep"].tolist(), noisy)
        # The level fed back goes through another times 1000 / 1000: the last bit may differ.
        torch.testing.assert_close(found.detach(), unpacked(output[0]))


def check_sampling(base, pipeline):
    denoiser = reference.denoiser_of(family, base)
    for scale in (SCALE, 1.0, 0.5):
        torch.testing.assert_close(
            our_latents(base, denoiser, scale), pipeline_latents(pipeline, scale)
        )


def check_schedule(base, pipeline):
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    for steps in (2, 4, 50):
        for height, width in (SIZE, (64, 96), (256, 256)):
            mu = compute_empirical_mu(height * width // 4, steps)
            pipeline.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
            ours = family.sampling_schedule(steps, latent_size=(height, width), base=base)
            assert list(ours.sigmas) == pipeline.scheduler.sigmas[:-1].tolist()
            assert ours.levels == ours.sigmas


def check_latents(base, pipeline):
    pixels = drawn(1, 3, HEIGHT, WIDTH).clamp(-1, 1)
    autoencoder = family.load_autoencoder(base, dtype=torch.float32, device="cpu")
    posterior = family.encode_images(autoencoder, pixels)
    with torch.no_grad():
        expected = pipeline.vae.encode(pixels).latent_dist
        from_pipeline = pipeline._encode_vae_image(pixels, generator=None)
    assert torch.equal(posterior.mean, expected.mean)
    assert torch.equal(posterior.std, expected.std)
    config = base.component("vae").config
    shape = family.latent_shape(config, height=HEIGHT, width=WIDTH)
    assert shape == tuple(posterior.mean.shape[1:]) == (8, *SIZE)
    constants = family.latent_constants(base)
    latents = family.normalise(posterior.mean, constants)
    assert latents.shape == (1, *NOISE[1:])
    torch.testing.assert_close(latents, from_pipeline)
    torch.testing.assert_close(family.denormalise(latents, constants), posterior.mean)


def check_loss(base, pipeline):
    """Loss and gradients of an adapter against the public recipe, written out."""
    config = reference.adapter_config(family)
    denoiser, injected = reference.adapted(family, base, config, strength=1.0)
    latents, noise = drawn(*NOISE, name="latents"), drawn(*NOISE, name="noise")
    level = torch.tensor([0.25, 0.8])
    with torch.no_grad():
        embeds, text_ids = pipeline.encode_prompt(list(PROMPTS), max_sequence_length=LENGTH)
    sigma = level.view(-1, 1, 1, 1)
    noisy = (1.0 - sigma) * latents + sigma * noise
    output = denoiser(
        hidden_states=pipeline._pack_latents(noisy),
        timestep=level,
        guidance=None,
        encoder_hidden_states=embeds,
        txt_ids=text_ids,
        img_ids=pipeline._prepare_latent_ids(noisy),
        return_dict=False,
    )[0]
    expected = ((unpacked(output) - (noise - latents)) ** 2).mean()
    reference.assert_same_training(
        family,
        base,
        denoiser,
        injected,
        expected,
        latents=latents,
        noise=noise,
        level=level,
        conditioning=family.conditioning(encode(base, PROMPTS), ()),
    )


CHECKS = {
    "caption records equal the pipeline's encode": check_captions,
    "predict equals what the pipeline's denoiser produced": check_predict,
    "our sampling equals the pipeline's, with guidance and without": check_sampling,
    "the schedule is the scheduler's": check_schedule,
    "normalised latents are what the pipeline decodes from": check_latents,
    "loss and gradients equal the public recipe's": check_loss,
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_holds(check, base, pipeline):
    check(base, pipeline)


def _zeroed_pads(conditioning, records, frames):
    """As if the text's end were padding that the denoiser does not see."""
    made = conditioning(records, frames)["text_embeds"].clone()
    made[:, LENGTH // 2 :] = 0
    return family.Conditioning({"text_embeds": made})


def _not_patchified(normalise, raw_latents, constants):
    """The patches' channels in another order: each pixel of a patch beside the others'."""
    made = normalise(raw_latents, constants)
    batch, channels, height, width = made.shape
    return made.view(batch, channels // 4, 4, height, width).transpose(1, 2).reshape(made.shape)


def _inverted(moments, patches, constants):
    mean, std = moments(patches, constants)
    return mean, 1 / std


MUTATIONS = {
    "height and width change places": (check_predict, call(img_ids=lambda i: i[..., [0, 2, 1, 3]])),
    "text has no positions": (check_predict, call(txt_ids=torch.zeros_like)),
    "time runs the other way": (check_predict, call(timestep=lambda t: 1 - t)),
    "the sign is changed": (
        check_predict,
        reference.alters(family, "predict", lambda predict, *a, **k: -predict(*a, **k)),
    ),
    "the pads are zero": (
        check_predict,
        reference.alters(family, "conditioning", _zeroed_pads),
    ),
    "latents are not normalised": (
        check_latents,
        reference.replaces(
            family, "_moments", lambda patches, constants: (patches.new_zeros(1), 1.0)
        ),
    ),
    "the deviation is its reciprocal": (
        check_latents,
        reference.alters(family, "_moments", _inverted),
    ),
    "the deviation is the variance's, without eps": (
        check_latents,
        reference.alters(family, "_moments", lambda moments, x, c: moments(x, {**c, "eps": 0.5})),
    ),
    "patches are read in another order": (
        check_latents,
        reference.alters(family, "normalise", _not_patchified),
    ),
    "another layer is read": (
        check_captions,
        reference.replaces(family, "TEXT_LAYERS", (9, 18, 26)),
    ),
    "layers are side by side in another order": (
        check_captions,
        reference.replaces(family, "TEXT_LAYERS", (27, 18, 9)),
    ),
    "the caption has no template": (
        check_captions,
        reference.replaces(family, "_templated", lambda tokenizer, caption: caption),
    ),
    "thinking is on": (
        check_captions,
        reference.replaces(
            family,
            "_templated",
            lambda tokenizer, caption: tokenizer.apply_chat_template(
                [{"role": "user", "content": caption}], tokenize=False, add_generation_prompt=True
            ),
        ),
    ),
    "the other branch is of a space": (
        check_predict,
        reference.replaces(
            family,
            "encode_unconditional",
            lambda encoders, *, max_length: family.encode_captions(
                encoders, [" "], max_length=max_length
            )[0],
        ),
    ),
    "guidance goes beyond the conditional": (
        check_sampling,
        reference.replaces(family, "guide", guidance.beyond_conditional),
    ),
    "guidance is on at every scale": (
        check_sampling,
        reference.replaces(family, "guides", lambda scale, *, base: True),
    ),
    "the schedule is FLUX.1's": (
        check_schedule,
        reference.replaces(
            family, "_mu", lambda tokens, steps: timesteps.mu_of_tokens(tokens, scheduler={})
        ),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_turns_its_check_red(name, base, pipeline, monkeypatch):
    check, mutate = MUTATIONS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(base, pipeline)


def test_a_batch_of_captions_equals_each_alone(encoders):
    captions = list(CAPTIONS.values())
    together = family.encode_captions(encoders, captions, max_length=LENGTH)
    for caption, record in zip(captions, together, strict=True):
        alone = family.encode_captions(encoders, [caption], max_length=LENGTH)[0]
        torch.testing.assert_close(record, alone, rtol=1e-5, atol=1e-5)
        assert record["text_embeds"].untyped_storage().nbytes() == record["text_embeds"].nbytes


def test_the_longest_record_is_what_plans_count(base, encoders):
    configs = {"text_encoder": base.component("text_encoder").config, "pipeline": base.settings}
    record = family.encode_captions(encoders, [SHORT], max_length=LENGTH)[0]
    shapes = family.caption_shapes(configs, max_length=LENGTH)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in record.items()}


def test_another_text_length_changes_the_prediction(encoders, denoiser):
    found = [
        predicted(denoiser, family.encode_captions(encoders, PROMPTS, max_length=length)).detach()
        for length in (32, 64)
    ]
    assert reference.relative(*found) > 1e-3


def test_a_prediction_does_not_depend_on_its_batch_mates(encoders, denoiser):
    records = family.encode_captions(encoders, [SHORT, LONG], max_length=LENGTH)
    both = predicted(denoiser, records).detach()
    for row, level in enumerate((0.3, 0.517)):
        alone = predicted(denoiser, [records[row]], (level,), drawn(*NOISE)[row : row + 1])
        torch.testing.assert_close(both[row], alone[0].detach(), rtol=1e-5, atol=1e-5)


def test_a_half_precision_base_predicts_under_autocast(base, encoders):
    records = family.encode_captions(encoders, PROMPTS, max_length=LENGTH)
    full = predicted(reference.denoiser_of(family, base), records).detach()
    denoiser = reference.denoiser_of(family, base, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        half = predicted(denoiser, records).detach()
    assert reference.relative(half.float(), full) < 0.05


def test_an_adapter_learns_one_batch(base, encoders):
    config = reference.adapter_config(family, rank=8, alpha=8.0)
    denoiser, injected = reference.adapted(family, base, config)
    assert injected.matches["single_transformer_blocks.*.attn.to_out"] == 2
    assert min(injected.matches.values()) > 0
    records = family.encode_captions(encoders, PROMPTS, max_length=LENGTH)
    made = family.conditioning(records, ())
    batch = {"latents": drawn(*NOISE, name="latents"), "noise": drawn(*NOISE, name="noise")}
    level = torch.tensor([0.25, 0.8])
    losses, idle = reference.train(
        injected.parameters,
        lambda: reference.loss_of(family, base, denoiser, level=level, conditioning=made, **batch),
    )
    assert losses[-1] < 0.8 * losses[0]
    assert idle == set()


@pytest.mark.parametrize("alpha", [4.0, 2.0])
def test_the_exported_adapter_draws_the_same_latents_in_the_pipeline(base, tmp_path, alpha):
    config = reference.adapter_config(family, alpha=alpha)
    denoiser, _ = reference.adapted(family, base, config, strength=4.0)
    path = reference.exported(family, denoiser, tmp_path, config)
    pipeline = reference.make_pipeline(base)
    bare = pipeline_latents(pipeline)
    pipeline.load_lora_weights(path.parent, weight_name=path.name)
    adapted = pipeline_latents(pipeline)
    assert reference.relative(adapted, bare) > 0.1
    torch.testing.assert_close(our_latents(base, denoiser), adapted, rtol=1e-4, atol=1e-4)


def test_the_moments_are_known_when_the_autoencoder_is_gone(base, tmp_path):
    root, memory = shutil.copytree(base.root, tmp_path / "base"), tmp_path / "memory"
    there = Base(str(root), root=root, name=f"file:{root}", memory=Memory(memory))
    expected = family.latent_constants(there)
    (root / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    again = Base(str(root), root=root, name=f"file:{root}", memory=Memory(memory))
    assert family.latent_constants(again) == expected


def test_a_distilled_base_is_known_by_its_index_and_takes_no_guidance(base, tmp_path):
    root = shutil.copytree(base.root, tmp_path / "base")
    index = json.loads((root / "model_index.json").read_text())
    (root / "model_index.json").write_text(json.dumps({**index, "is_distilled": True}))
    distilled = Base(str(root), root=root, name=f"file:{root}", memory=Memory(tmp_path))
    assert family.distillation(base) is None
    assert family.distillation(distilled) == "is_distilled is true"
    assert family.guides(SCALE, base=base)
    assert not family.guides(SCALE, base=distilled)


def test_the_state_layers_are_in_the_caption_key():
    rule = family.FACTS.caption_rule
    assert rule["states"] == list(family.TEXT_LAYERS)
    assert family.FACTS.caption_settings == ()
