"""Z-Image against diffusers' own pipeline, unmodified, over the same tiny weights."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from lib.errors import InputRefused
from lib.families import z_image
from lib.guidance import classifier_free
from lib.hub import Base
from lib.memory import Memory
from tests.unit.families import reference as ref
from tests.unit.families.reference import CAPTIONS, HEIGHT, LONG, SHORT, WIDTH

# Of one and of two times the 32 tokens that the transformer pads captions to.
PROMPTS = [SHORT, f"{LONG}, {LONG}"]
LENGTH, STEPS, GUIDANCE = 64, 3, 5.0
LATENT = (HEIGHT // 8, WIDTH // 8)
LEVELS = torch.tensor([0.25, 0.9])


def records_of(base):
    """The prompts' records and the unconditional one."""
    encoders = ref.encoders_of(z_image, base)
    records = z_image.encode_captions(encoders, PROMPTS, max_length=LENGTH)
    return records, z_image.encode_unconditional(encoders, max_length=LENGTH)


def pipeline_latents(pipeline, noise, *, guidance):
    return pipeline(
        prompt=list(PROMPTS),  # the pipeline writes into the list that it is given
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=STEPS,
        guidance_scale=guidance,
        latents=noise,
        max_sequence_length=LENGTH,
        output_type="latent",
    ).images


def our_latents(base, denoiser, noise, *, guidance):
    records, other = records_of(base)
    return ref.sampled(
        z_image,
        base,
        denoiser,
        noise,
        records=records,
        steps=STEPS,
        guidance=guidance,
        other=other,
    )


def batch_of(base):
    """Latents as they are trained on, the noise, and the conditioning, by name."""
    autoencoder = z_image.load_autoencoder(base, dtype=torch.float32, device="cpu")
    posterior = z_image.encode_images(autoencoder, ref.drawn(2, 3, HEIGHT, WIDTH, name="pixels"))
    assert z_image.FACTS.draws_mode
    return {
        "latents": z_image.normalise(posterior.mean, z_image.latent_constants(base)),
        "noise": ref.drawn(2, 16, *LATENT),
        "level": LEVELS,
        "conditioning": z_image.conditioning(records_of(base)[0], []),
    }


def scripts_loss(pipeline, transformer):
    """What diffusers' train_dreambooth_lora_z_image.py computes, on the same draws."""
    noise, sigmas = ref.drawn(2, 16, *LATENT), LEVELS.view(-1, 1, 1, 1)
    with torch.no_grad():
        encoded = pipeline.vae.encode(ref.drawn(2, 3, HEIGHT, WIDTH, name="pixels")).latent_dist
        embeds, _ = pipeline.encode_prompt(list(PROMPTS), max_sequence_length=LENGTH)
    config = pipeline.vae.config
    latents = (encoded.mode() - config.shift_factor) * config.scaling_factor
    noisy = (1.0 - sigmas) * latents + sigmas * noise
    time = (1000 - LEVELS * 1000) / 1000
    pictures = list(noisy.unsqueeze(2).unbind(dim=0))
    answers = transformer(pictures, time, embeds, return_dict=False)[0]
    predicted = -torch.stack(answers, dim=0).squeeze(2)
    return ((predicted - (noise - latents)) ** 2).reshape(2, -1).mean(1).mean()


def check_captions(base, pipeline):
    encoders = ref.encoders_of(z_image, base)
    other = z_image.encode_unconditional(encoders, max_length=LENGTH)
    for text in CAPTIONS.values():
        record = z_image.encode_captions(encoders, [text], max_length=LENGTH)[0]
        with torch.no_grad():
            [embeds], [others] = pipeline.encode_prompt(text, max_sequence_length=LENGTH)
        assert record["text_embeds"].shape == embeds.shape
        assert torch.equal(record["text_embeds"], embeds)
        assert torch.equal(other["text_embeds"], others)


def check_predictions(base, pipeline):
    with ref.recorded(pipeline.transformer) as calls:
        pipeline_latents(pipeline, ref.drawn(2, 16, *LATENT), guidance=GUIDANCE)
    assert len(calls) == STEPS
    schedule = z_image.sampling_schedule(STEPS, latent_size=LATENT, base=base)
    denoiser, (records, other) = ref.denoiser_of(z_image, base), records_of(base)
    branches = [records, [other, other]]  # the pipeline's order
    for level, ((seen, _, _), _, (output,)) in zip(schedule.levels, calls, strict=True):
        for rows, branch in zip((slice(0, 2), slice(2, 4)), branches, strict=True):
            predicted = z_image.predict(
                denoiser,
                torch.stack(seen[rows]).squeeze(2),
                torch.full((2,), level),
                conditioning=z_image.conditioning(branch, []),
                guidance=GUIDANCE,
            )
            velocity = -torch.stack(output[rows]).squeeze(2)  # the pipeline's own line
            torch.testing.assert_close(predicted.detach(), velocity, rtol=1e-5, atol=1e-5)


def check_sampling(base, pipeline):
    noise, denoiser = ref.drawn(2, 16, *LATENT), ref.denoiser_of(z_image, base)
    for guidance in (0.0, 0.5, GUIDANCE):
        expected = pipeline_latents(pipeline, noise, guidance=guidance)
        found = our_latents(base, denoiser, noise, guidance=guidance)
        assert ref.relative(found, expected) < 1e-5


def check_schedule(base, pipeline):
    for steps in (1, 8, 28, 50):
        sigmas = torch.linspace(1.0, 1 / steps, steps).tolist()  # the pipeline's own line
        pipeline.scheduler.set_timesteps(sigmas=sigmas, mu=0.5)
        schedule = z_image.sampling_schedule(steps, latent_size=LATENT, base=base)
        assert torch.equal(torch.tensor(schedule.sigmas), pipeline.scheduler.sigmas[:-1])
        assert schedule.levels == schedule.sigmas
        assert schedule.scale == 1.0


def check_latents(base, pipeline):
    pixels = ref.drawn(1, 3, HEIGHT, WIDTH, name="pixels").clamp(-1, 1)
    autoencoder = z_image.load_autoencoder(base, dtype=torch.float32, device="cpu")
    posterior = z_image.encode_images(autoencoder, pixels)
    with torch.no_grad():
        encoded = pipeline.vae.encode(pixels).latent_dist
    assert torch.equal(posterior.mean, encoded.mode())
    assert torch.equal(posterior.std, encoded.std)
    constants, config = z_image.latent_constants(base), pipeline.vae.config
    latents = z_image.normalise(posterior.mean, constants)
    back = (latents / config.scaling_factor) + config.shift_factor  # the pipeline's own line
    torch.testing.assert_close(back, posterior.mean, rtol=1e-5, atol=1e-6)
    assert torch.equal(z_image.denormalise(latents, constants), back)
    picture = pipeline(
        prompt=SHORT,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=1,
        guidance_scale=0.0,
        max_sequence_length=LENGTH,
        output_type="pt",
        callback_on_step_end=lambda *_: {"latents": latents},
    ).images
    ours = z_image.decode_latents(autoencoder, z_image.denormalise(latents, constants))
    assert torch.equal((ours / 2 + 0.5).clamp(0, 1), picture)


def check_training(base, pipeline):
    config = ref.adapter_config(z_image)
    denoiser, injected = ref.adapted(z_image, base, config, strength=0.1)
    ours = ref.loss_of(z_image, base, denoiser, **batch_of(base))
    theirs = scripts_loss(pipeline, denoiser)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
    found, expected = (ref.gradients(injected.parameters, loss) for loss in (ours, theirs))
    assert expected.norm() > 0
    assert ref.relative(found, expected) < 1e-6


def test_caption_records_equal_the_pipelines_and_the_other_branch_is_the_empty_text(base, pipeline):
    check_captions(base, pipeline)


def test_a_batch_of_captions_equals_each_alone_and_the_longest_is_known_before(base):
    encoders, texts = ref.encoders_of(z_image, base), list(CAPTIONS.values())
    together = z_image.encode_captions(encoders, texts, max_length=LENGTH)
    for text, record in zip(texts, together, strict=True):
        alone = z_image.encode_captions(encoders, [text], max_length=LENGTH)[0]
        torch.testing.assert_close(record["text_embeds"], alone["text_embeds"], rtol=0, atol=1e-5)
        assert record["text_embeds"].untyped_storage().nbytes() == record["text_embeds"].nbytes
    configs = {"text_encoder": base.component("text_encoder").config}
    longest = max((record["text_embeds"] for record in together), key=len)
    shapes = z_image.caption_shapes(configs, max_length=LENGTH)
    assert shapes == {"text_embeds": tuple(longest.shape)}


def test_a_caption_is_the_same_whatever_length_it_was_cut_to(base):
    encoders = ref.encoders_of(z_image, base)
    short, long = (
        z_image.encode_captions(encoders, [SHORT], max_length=length)[0]["text_embeds"]
        for length in (LENGTH, 128)
    )
    torch.testing.assert_close(short, long, rtol=0, atol=1e-5)


def test_a_length_that_the_template_alone_fills_is_refused(base):
    encoders = ref.encoders_of(z_image, base)
    with pytest.raises(InputRefused, match=r"captions.max_length=4: .*no room.* to 512"):
        z_image.encode_captions(encoders, [SHORT], max_length=4)


def test_predict_equals_what_the_pipelines_transformer_produced_in_both_branches(base, pipeline):
    check_predictions(base, pipeline)


def test_the_transformer_is_told_the_very_times_that_the_pipeline_tells_it(base, pipeline):
    with ref.recorded(pipeline.transformer) as calls:
        pipeline_latents(pipeline, ref.drawn(2, 16, *LATENT), guidance=0.0)
    denoiser = ref.denoiser_of(z_image, base)
    with ref.recorded(denoiser) as ours:
        our_latents(base, denoiser, ref.drawn(2, 16, *LATENT), guidance=0.0)
    for ((_, theirs, _), *_), ((_, time, _), *_) in zip(calls, ours, strict=True):
        assert time.dtype == torch.float32
        assert torch.equal(time, theirs)


def test_our_sampling_ends_where_the_pipelines_does_with_guidance_and_without(base, pipeline):
    check_sampling(base, pipeline)


def test_without_guidance_our_sampling_is_the_pipelines_to_the_bit(base, pipeline):
    noise, denoiser = ref.drawn(2, 16, *LATENT), ref.denoiser_of(z_image, base)
    expected = pipeline_latents(pipeline, noise, guidance=0.0)
    assert torch.equal(our_latents(base, denoiser, noise, guidance=0.0), expected)


def test_the_schedule_is_the_schedulers(base, pipeline):
    check_schedule(base, pipeline)


def test_guidance_starts_above_zero_as_the_pipelines(base, pipeline):
    for scale in (0.0, 0.5, 1.0, 5.0):
        pipeline._guidance_scale = scale
        assert z_image.guides(scale, base=base) == pipeline.do_classifier_free_guidance


def test_normalised_modes_are_what_the_pipeline_decodes_from(base, pipeline):
    check_latents(base, pipeline)
    shape = z_image.latent_shape(base.component("vae").config, height=HEIGHT, width=WIDTH)
    assert shape == (16, *LATENT)


def test_loss_and_gradients_equal_those_of_the_public_script(base, pipeline):
    check_training(base, pipeline)


def test_a_prediction_depends_neither_on_its_batch_mates_nor_on_how_they_were_padded(base):
    denoiser, noisy = ref.denoiser_of(z_image, base), ref.drawn(2, 16, *LATENT)
    encoders, records = ref.encoders_of(z_image, base), records_of(base)[0]
    records += z_image.encode_captions(encoders, ["fox " * 300], max_length=96)
    assert [-(-len(record["text_embeds"]) // 32) for record in records] == [1, 2, 3]

    def run(rows, *mates):
        return z_image.predict(
            denoiser,
            noisy[rows],
            LEVELS[rows],
            conditioning=z_image.conditioning(mates, []),
            guidance=1.0,
        ).detach()

    alone = run(slice(0, 1), records[0])
    for mate in records:
        both = run(slice(0, 2), records[0], mate)
        torch.testing.assert_close(both[:1], alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(both[1:], run(slice(1, 2), mate), rtol=1e-5, atol=1e-5)


def test_padding_by_the_caller_would_count_as_text(base):
    denoiser, noisy = ref.denoiser_of(z_image, base), ref.drawn(2, 16, *LATENT)
    made = z_image.conditioning(records_of(base)[0], [])
    padded = replace(made, lengths=(max(made.lengths),) * 2)
    found, usual = (
        z_image.predict(denoiser, noisy, LEVELS, conditioning=given, guidance=1.0)
        for given in (padded, made)
    )
    assert ref.relative(found[0], usual[0]) > 1e-4


def test_a_bfloat16_base_predicts_under_autocast_from_times_in_float32(base):
    denoiser = ref.denoiser_of(z_image, base, dtype=torch.bfloat16)
    with ref.recorded(denoiser) as calls, torch.autocast("cpu", dtype=torch.bfloat16):
        predicted = z_image.predict(
            denoiser,
            ref.drawn(2, 16, *LATENT),
            LEVELS,
            conditioning=z_image.conditioning(records_of(base)[0], []),
            guidance=1.0,
        )
    [((pictures, time, texts), *_)] = calls
    assert time.dtype == torch.float32
    assert {tensor.dtype for tensor in (*pictures, *texts)} == {torch.bfloat16}
    assert predicted.shape == (2, 16, *LATENT)
    assert torch.isfinite(predicted).all()


def test_an_adapter_learns_a_batch_and_every_one_of_its_tensors_has_gradients(base):
    config = ref.adapter_config(z_image, rank=8, alpha=8.0)
    denoiser, injected = ref.adapted(z_image, base, config)
    batch = batch_of(base)
    losses, idle = ref.train(
        injected.parameters, lambda: ref.loss_of(z_image, base, denoiser, **batch)
    )
    assert losses[-1] < 0.8 * losses[0]
    assert idle == set()
    assert any(name.startswith("noise_refiner") for name in injected.parameters)
    assert any(name.startswith("context_refiner") for name in injected.parameters)


def test_the_exported_adapter_draws_the_same_latents_in_the_pipeline(base, tmp_path):
    pipeline = ref.make_pipeline(base)
    config = ref.adapter_config(z_image, rank=4, alpha=2.0)
    denoiser, _ = ref.adapted(z_image, base, config, strength=2.0)
    noise = ref.drawn(2, 16, *LATENT)
    bare = pipeline_latents(pipeline, noise, guidance=0.0)
    path = ref.exported(z_image, denoiser, tmp_path, config)
    pipeline.load_lora_weights(tmp_path, weight_name=path.name)
    with_adapter = pipeline_latents(pipeline, noise, guidance=0.0)
    assert ref.relative(with_adapter, bare) > 0.1
    ours = our_latents(base, denoiser, noise, guidance=0.0)
    assert ref.relative(ours, with_adapter) < 1e-5


def test_turbo_is_known_by_the_shift_of_its_schedule(base, tmp_path):
    root = tmp_path / "turbo"
    shutil.copytree(base.root, root)
    path = root / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "shift": 3.0}))
    turbo = Base(str(root), root=root, name=f"file:{root}", memory=Memory(tmp_path / "store"))
    assert z_image.distillation(base) is None
    assert z_image.distillation(turbo) == "its schedule's shift is 3.0"


def time_of_noise(predict, denoiser, noisy, level, **named):
    return predict(denoiser, noisy, 1 - level, **named)


def unnegated(predict, *args, **named):
    return -predict(*args, **named)


def transposed(predict, denoiser, noisy, level, **named):
    return predict(denoiser, noisy.mT, level, **named).mT


def padded_by_the_caller(conditioning, records, frames):
    made = conditioning(records, frames)
    return replace(made, lengths=(max(made.lengths),) * len(records))


def zeroed_ends(conditioning, records, frames):
    made = conditioning(records, frames)
    text = made["text_embeds"].clone()
    text[:, 8:] = 0
    return replace(made, tensors={"text_embeds": text})


def all_positions(encode, encoders, captions, *, max_length):
    records = encode(encoders, captions, max_length=max_length)
    return [
        {"text_embeds": torch.nn.functional.pad(t, (0, 0, 0, max_length - len(t)))}
        for t in (record["text_embeds"] for record in records)
    ]


def of_a_space(_encode, encoders, *, max_length):
    return z_image.encode_captions(encoders, [" "], max_length=max_length)[0]


def unshifted(schedule, steps, **named):
    sigmas = tuple(torch.linspace(1.0, 1 / steps, steps).tolist())
    return replace(schedule(steps, **named), sigmas=sigmas, levels=sigmas)


MUTATIONS = {
    "sigma for 1 - sigma": (ref.alters(z_image, "predict", time_of_noise), check_predictions),
    "sigma for 1 - sigma in training": (
        ref.alters(z_image, "predict", time_of_noise),
        check_training,
    ),
    "no negation": (ref.alters(z_image, "predict", unnegated), check_predictions),
    "no negation in training": (ref.alters(z_image, "predict", unnegated), check_training),
    "height and width swapped": (ref.alters(z_image, "predict", transposed), check_predictions),
    "padded by the caller": (
        ref.alters(z_image, "conditioning", padded_by_the_caller),
        check_predictions,
    ),
    "text zeroed": (ref.alters(z_image, "conditioning", zeroed_ends), check_training),
    "records with their padding": (
        ref.alters(z_image, "encode_captions", all_positions),
        check_captions,
    ),
    "last hidden layer": (ref.replaces(z_image, "TEXT_LAYER", -1), check_captions),
    "thinking off": (ref.replaces(z_image, "THINKING", False), check_captions),
    "no template": (
        ref.replaces(z_image, "_in_template", lambda _tokenizer, caption: caption or "fox"),
        check_captions,
    ),
    "a space for the empty text": (
        ref.alters(z_image, "encode_unconditional", of_a_space),
        check_captions,
    ),
    "latents not normalised": (
        ref.replaces(z_image, "normalise", lambda raw, _constants: raw),
        check_training,
    ),
    "scale before shift": (
        ref.replaces(z_image, "normalise", lambda raw, c: raw * c["scale"] - c["shift"]),
        check_latents,
    ),
    "latents divided by the factor": (
        ref.replaces(z_image, "normalise", lambda raw, c: (raw - c["shift"]) / c["scale"]),
        check_latents,
    ),
    "schedule not shifted": (ref.alters(z_image, "sampling_schedule", unshifted), check_schedule),
    "guidance from the unconditional": (
        ref.replaces(z_image, "guide", classifier_free),
        check_sampling,
    ),
    "guidance from above one": (
        ref.replaces(z_image, "guides", lambda scale, base: scale > 1),
        check_sampling,
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_turns_its_check_red(base, pipeline, monkeypatch, name):
    mutate, check = MUTATIONS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(base, pipeline)
