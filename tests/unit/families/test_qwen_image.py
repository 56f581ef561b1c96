"""Qwen-Image against diffusers' own pipeline, unmodified, over the same tiny weights."""

import numpy as np
import pytest
import torch

from lib import guidance, schedules
from lib.families import qwen_image as family
from tests.unit.families import reference
from tests.unit.families.reference import CAPTIONS, HEIGHT, LONG, PROMPTS, SHORT, WIDTH, drawn

LENGTH, STEPS, SCALE = 48, 3, 4.0
SIZE = (HEIGHT // 8, WIDTH // 8)
NOISE = (2, 16, *SIZE)
encode = reference.encoder(family, length=LENGTH)
predicted = reference.predictor(family, noise=drawn(*NOISE))
our_latents = reference.sampler(
    family, noise=drawn(*NOISE), steps=STEPS, scale=SCALE, length=LENGTH
)
call = reference.argument_mutations(family)


def unpacked(pipeline, tokens):
    return pipeline._unpack_latents(tokens, HEIGHT, WIDTH, 8)[:, :, 0]


def pipeline_latents(pipeline, scale=SCALE):
    """Latents that the pipeline ends with: b c h w."""
    out = pipeline(
        prompt=PROMPTS,
        negative_prompt=[" "] * 2 if scale > 1 else None,
        true_cfg_scale=scale,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=STEPS,
        latents=pipeline._pack_latents(drawn(*NOISE), 2, 16, *SIZE),
        max_sequence_length=LENGTH,
        output_type="latent",
    ).images
    return unpacked(pipeline, out)


# Checks: each holds, and each turns red under the mutations named further down.


def check_captions(base, pipeline):
    for caption in CAPTIONS.values():
        with torch.no_grad():  # as in the pipeline's call; torch takes other kernels with gradients
            expected, mask = pipeline.encode_prompt(caption, max_sequence_length=LENGTH)
        assert mask is None
        assert torch.equal(encode(base, [caption])[0]["text_embeds"], expected[0])


def check_unconditional(base, pipeline):
    encoders = reference.encoders_of(family, base)
    with reference.recorded(pipeline.transformer) as calls:
        pipeline_latents(pipeline)
    other = family.encode_unconditional(encoders, max_length=LENGTH)["text_embeds"]
    assert torch.equal(other.expand(2, -1, -1), calls[1][1]["encoder_hidden_states"])


def check_predict(base, pipeline):
    denoiser = reference.denoiser_of(family, base)
    with reference.recorded(pipeline.transformer) as calls:
        pipeline_latents(pipeline)
    assert len(calls) == 2 * STEPS
    masks = [named["encoder_hidden_states_mask"] for _, named, _ in calls]
    assert [mask is None for mask in masks] == [False, True] * STEPS
    for _, named, output in calls:
        states, mask = named["encoder_hidden_states"], named["encoder_hidden_states_mask"]
        valid = torch.ones(states.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        records = [{"text_embeds": s[v]} for s, v in zip(states, valid, strict=True)]
        noisy = unpacked(pipeline, named["hidden_states"])
        found = predicted(denoiser, records, named["timestep"].tolist(), noisy)
        # The level fed back goes through another times 1000 / 1000: the last bit may differ.
        torch.testing.assert_close(found.detach(), unpacked(pipeline, output[0]))


def check_sampling(base, pipeline):
    denoiser = reference.denoiser_of(family, base)
    for scale in (SCALE, 1.0, 0.5):
        assert torch.equal(our_latents(base, denoiser, scale), pipeline_latents(pipeline, scale))


def check_schedule(base, pipeline):
    for steps in (2, 4, 50):
        for height, width in (SIZE, (64, 96)):
            tokens = height * width // 4
            slope = (0.9 - 0.5) / (8192 - 256)
            mu = 0.5 + slope * (tokens - 256)
            pipeline.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
            ours = family.sampling_schedule(steps, latent_size=(height, width), base=base)
            expected = pipeline.scheduler.sigmas[:-1]
            torch.testing.assert_close(torch.tensor(ours.sigmas), expected, rtol=0, atol=1e-7)
            assert ours.levels == ours.sigmas
            assert ours.sigmas[-1] == pytest.approx(0.02, abs=1e-6)


def check_latents(base, pipeline):
    pixels = drawn(1, 3, HEIGHT, WIDTH).clamp(-1, 1)
    autoencoder = family.load_autoencoder(base, dtype=torch.float32, device="cpu")
    posterior = family.encode_images(autoencoder, pixels)
    with torch.no_grad():
        expected = pipeline.vae.encode(pixels[:, :, None]).latent_dist
    assert torch.equal(posterior.mean, expected.mean[:, :, 0])
    assert torch.equal(posterior.std, expected.std[:, :, 0])
    config = base.component("vae").config
    shape = family.latent_shape(config, height=HEIGHT, width=WIDTH)
    assert shape == tuple(posterior.mean.shape[1:]) == (16, *SIZE)
    constants = family.latent_constants(base)
    latents = family.normalise(posterior.mean, constants)
    # The pipeline's own lines, from latents to what it decodes.
    mean = torch.tensor(pipeline.vae.config.latents_mean).view(1, 16, 1, 1, 1)
    reciprocal = 1.0 / torch.tensor(pipeline.vae.config.latents_std).view(1, 16, 1, 1, 1)
    decoded_from = latents[:, :, None] / reciprocal + mean
    torch.testing.assert_close(decoded_from[:, :, 0], posterior.mean, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        image = pipeline.vae.decode(decoded_from, return_dict=False)[0][:, :, 0]
    ours = family.decode_latents(autoencoder, family.denormalise(latents, constants))
    torch.testing.assert_close(ours, image, rtol=1e-5, atol=1e-5)


def check_loss(base, pipeline):
    """Loss and gradients of an adapter against the public recipe, written out."""
    config = reference.adapter_config(family)
    denoiser, injected = reference.adapted(family, base, config, strength=1.0)
    latents, noise = drawn(*NOISE, name="latents"), drawn(*NOISE, name="noise")
    level = torch.tensor([0.25, 0.8])
    with torch.no_grad():
        embeds, mask = pipeline.encode_prompt(PROMPTS, max_sequence_length=LENGTH)
    sigma = level.view(-1, 1, 1, 1)
    noisy = (1.0 - sigma) * latents + sigma * noise
    output = denoiser(
        hidden_states=pipeline._pack_latents(noisy, 2, 16, *SIZE),
        timestep=level,
        encoder_hidden_states=embeds,
        encoder_hidden_states_mask=mask,
        img_shapes=[[(1, SIZE[0] // 2, SIZE[1] // 2)]] * 2,
        return_dict=False,
    )[0]
    expected = ((unpacked(pipeline, output) - (noise - latents)) ** 2).mean()
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
    "the unconditional record is what the pipeline's other branch uses": check_unconditional,
    "predict equals what the pipeline's denoiser produced": check_predict,
    "our sampling equals the pipeline's, with guidance and without": check_sampling,
    "the schedule is the scheduler's": check_schedule,
    "normalised latents are what the pipeline decodes from": check_latents,
    "loss and gradients equal the public recipe's": check_loss,
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_holds(check, base, pipeline):
    check(base, pipeline)


def _turned(shapes):
    return [[(frames, width, height)] for ((frames, height, width),) in shapes]


def _unnormed(load, *args, **options):
    encoders = load(*args, **options)
    encoders.model.model.language_model.norm = torch.nn.Identity()
    return encoders


def _per_pixel(conditional, unconditional, *, scale):
    combined = guidance.classifier_free(conditional, unconditional, scale=scale)
    return combined * (conditional.norm(dim=1, keepdim=True) / combined.norm(dim=1, keepdim=True))


def _unstretched(steps, *, scheduler, mu):
    config = {**scheduler, "shift_terminal": None}
    return schedules_flow(steps, scheduler=config, mu=mu)


def _inverted(latents, constants):
    return family.autoencoders.standardised(
        latents, {**constants, "std": [1 / value for value in constants["std"]]}
    )


def _padded_with_rubbish(conditioning, records, frames):
    made = conditioning(records, frames)
    mask = made.get("text_mask")
    if mask is None:
        return made
    text = torch.where(mask[..., None], made["text_embeds"], 7.0)
    return type(made)({**made.tensors, "text_embeds": text}, made.lengths)


schedules_flow = schedules.flow_schedule
MUTATIONS = {
    "height and width change places": (check_predict, call(img_shapes=_turned)),
    "time runs the other way": (check_predict, call(timestep=lambda t: 1 - t)),
    "time goes through half precision": (check_predict, call(timestep=lambda t: t.bfloat16())),
    "the mask is dropped": (check_predict, call(encoder_hidden_states_mask=lambda mask: None)),
    "the mask is turned over": (
        check_predict,
        call(encoder_hidden_states_mask=lambda mask: None if mask is None else ~mask),
    ),
    "the sign is changed": (
        check_predict,
        reference.alters(family, "predict", lambda predict, *a, **k: -predict(*a, **k)),
    ),
    "the sign is changed in training": (
        check_loss,
        reference.alters(family, "predict", lambda predict, *a, **k: -predict(*a, **k)),
    ),
    "squares are read column first": (
        check_predict,
        reference.alters(family.packing, "packed", lambda pack, x: pack(x.mT).clone()),
    ),
    "latents are not normalised": (
        check_latents,
        reference.replaces(family, "normalise", lambda latents, constants: latents),
    ),
    "the deviation is its reciprocal": (
        check_latents,
        reference.replaces(family, "normalise", _inverted),
    ),
    "one token of the template too many is kept": (
        check_captions,
        reference.replaces(family, "TEMPLATE_TOKENS", family.TEMPLATE_TOKENS - 1),
    ),
    "the caption has no template": (check_captions, reference.replaces(family, "TEMPLATE", "{}")),
    "captions are cut to a shorter length": (
        check_captions,
        reference.alters(
            family, "encode_captions", lambda encode, *a, max_length: encode(*a, max_length=47)
        ),
    ),
    "states are taken before the last norm": (
        check_captions,
        reference.alters(family, "load_text_encoders", _unnormed),
    ),
    "the other branch is of the empty text": (
        check_unconditional,
        reference.replaces(
            family,
            "encode_unconditional",
            lambda encoders, *, max_length: family.encode_captions(
                encoders, [""], max_length=max_length
            )[0],
        ),
    ),
    "guidance keeps its own length": (
        check_sampling,
        reference.replaces(family, "guide", guidance.classifier_free),
    ),
    "guidance goes beyond the conditional": (
        check_sampling,
        reference.replaces(family, "guide", guidance.beyond_conditional),
    ),
    "lengths are of pixels, not of tokens": (
        check_sampling,
        reference.replaces(family, "guide", _per_pixel),
    ),
    "guidance is on at every scale": (
        check_sampling,
        reference.replaces(family, "guides", lambda scale, *, base: True),
    ),
    "the schedule is not stretched": (
        check_schedule,
        reference.replaces(family.schedules, "flow_schedule", _unstretched),
    ),
    "the schedule is not shifted by size": (
        check_schedule,
        reference.replaces(family.timesteps, "mu_of_tokens", lambda tokens, **_: 0.5),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_turns_its_check_red(name, base, pipeline, monkeypatch):
    check, mutate = MUTATIONS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(base, pipeline)


def test_what_stands_at_the_padding_changes_nothing(base, pipeline, monkeypatch):
    reference.alters(family, "conditioning", _padded_with_rubbish)(monkeypatch)
    check_predict(base, pipeline)


def test_a_batch_of_captions_equals_each_alone(encoders):
    captions = list(CAPTIONS.values())
    together = family.encode_captions(encoders, captions, max_length=LENGTH)
    lengths = [len(record["text_embeds"]) for record in together]
    assert len(set(lengths)) > 2
    assert max(lengths) == LENGTH
    for caption, record in zip(captions, together, strict=True):
        alone = family.encode_captions(encoders, [caption], max_length=LENGTH)[0]
        torch.testing.assert_close(record, alone, rtol=1e-5, atol=1e-5)
        assert record["text_embeds"].untyped_storage().nbytes() == record["text_embeds"].nbytes


def test_the_longest_record_is_what_plans_count(base, encoders):
    configs = {"text_encoder": base.component("text_encoder").config, "pipeline": base.settings}
    record = family.encode_captions(encoders, ["fox " * 300], max_length=LENGTH)[0]
    shapes = family.caption_shapes(configs, max_length=LENGTH)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in record.items()}


@pytest.mark.parametrize("mate", [LONG, "fox " * 300], ids=["long", "beyond the maximum"])
def test_a_prediction_depends_neither_on_its_mates_nor_on_padding(encoders, denoiser, mate):
    records = family.encode_captions(encoders, [SHORT, mate], max_length=LENGTH)
    both = predicted(denoiser, records).detach()
    for row, level in enumerate((0.3, 0.517)):
        alone = predicted(denoiser, [records[row]], (level,), drawn(*NOISE)[row : row + 1])
        torch.testing.assert_close(both[row], alone[0].detach(), rtol=1e-5, atol=1e-5)


def test_texts_of_one_length_have_no_mask(encoders):
    records = family.encode_captions(encoders, [SHORT, SHORT], max_length=LENGTH)
    made = family.conditioning(records, ())
    assert "text_mask" not in made
    assert made["text_embeds"].shape[1] == len(records[0]["text_embeds"])


def test_a_prediction_of_padded_texts_makes_no_tensor_of_a_number(encoders, denoiser):
    records = family.encode_captions(encoders, [SHORT, LONG], max_length=LENGTH)
    reference.predicts_without_numbers(family, denoiser, records, noisy=drawn(*NOISE))


def test_a_half_precision_base_predicts_under_autocast(base, encoders):
    records = family.encode_captions(encoders, PROMPTS, max_length=LENGTH)
    full = predicted(reference.denoiser_of(family, base), records).detach()
    denoiser = reference.denoiser_of(family, base, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        half = predicted(denoiser, records).detach()
    assert reference.relative(half.float(), full) < 0.05


def test_an_adapter_learns_one_batch_but_for_the_last_blocks_text_side(base, encoders):
    config = reference.adapter_config(family, rank=8, alpha=8.0)
    denoiser, injected = reference.adapted(family, base, config)
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
    last = "transformer_blocks.1.attn"  # what the text becomes after it is read by nobody
    unread = (f"{last}.{name}" for name in ("add_q_proj", "to_add_out"))
    assert idle == {f"{name}.lora_{side}.weight" for name in unread for side in "AB"}


@pytest.mark.parametrize("alpha", [4.0, 2.0, 8.0])
def test_the_exported_adapter_draws_the_same_latents_in_the_pipeline(base, tmp_path, alpha):
    config = reference.adapter_config(family, alpha=alpha)
    denoiser, _ = reference.adapted(family, base, config, strength=4.0)
    path = reference.exported(family, denoiser, tmp_path, config)
    pipeline = reference.make_pipeline(base)
    bare = pipeline_latents(pipeline)
    pipeline.load_lora_weights(path.parent, weight_name=path.name)
    found = pipeline_latents(pipeline)
    assert reference.relative(found, bare) > 0.1
    assert torch.equal(our_latents(base, denoiser), found)


def test_one_step_goes_from_noise_to_the_end(base):
    schedule = family.sampling_schedule(1, latent_size=SIZE, base=base)
    assert schedule.sigmas == schedule.levels == (1.0,)


def test_no_base_of_the_family_is_known_as_distilled(base):
    assert family.distillation(base) is None
