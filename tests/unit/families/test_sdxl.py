"""SDXL against diffusers' own pipeline, unmodified, over the same tiny weights."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from lib import objectives
from lib.errors import InputRefused
from lib.families import sdxl
from lib.family import Frame, process_of
from lib.guidance import beyond_conditional
from lib.hub import Base
from lib.memory import Memory
from lib.noise import DDPM
from lib.schema import ObjectiveConfig
from tests.unit.families import reference as ref
from tests.unit.families.reference import CAPTIONS, HEIGHT, PROMPTS, WIDTH

# EulerDiscreteScheduler.set_timesteps makes numpy arrays of tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

LENGTH, STEPS, GUIDANCE = 77, 3, 5.0
LATENT = (HEIGHT // 8, WIDTH // 8)
# Numbers that differ from one another, and from those that bfloat16 can tell apart.
FRAMES = [Frame(original=(517, 775), crop=(3, 5), size=(HEIGHT, WIDTH))] * 2
LEVELS = torch.tensor([21.0, 640.0])
VELOCITY = {
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
}


def with_changes(base, folder, file="scheduler/scheduler_config.json", **changes):
    """The same base with some values of a configuration changed."""
    root = folder / "base"
    shutil.copytree(base.root, root)
    path = root / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return Base(str(root), root=root, name=f"file:{root}", memory=Memory(folder / "store"))


@pytest.fixture(scope="module")
def noise_base(tmp_path_factory):
    return ref.make_base(sdxl, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def velocity_base(noise_base, tmp_path_factory):
    return with_changes(noise_base, tmp_path_factory.mktemp("velocity"), **VELOCITY)


@pytest.fixture(scope="module", params=["noise_base", "velocity_base"])
def base(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def pipeline(base):
    return ref.make_pipeline(base)


@pytest.fixture(scope="module")
def noise_pipeline(noise_base):
    return ref.make_pipeline(noise_base)


@pytest.fixture(scope="module")
def velocity_pipeline(velocity_base):
    return ref.make_pipeline(velocity_base)


def records_of(base, *, length=LENGTH):
    """The prompts' records and the unconditional one."""
    encoders = ref.encoders_of(sdxl, base)
    records = sdxl.encode_captions(encoders, PROMPTS, max_length=length)
    return records, sdxl.encode_unconditional(encoders, max_length=length)


def pipeline_latents(pipeline, noise, *, guidance, steps=STEPS):
    return pipeline(
        prompt=PROMPTS,
        height=HEIGHT,
        width=WIDTH,
        original_size=FRAMES[0].original,
        crops_coords_top_left=FRAMES[0].crop,
        num_inference_steps=steps,
        guidance_scale=guidance,
        latents=noise,
        output_type="latent",
    ).images


def our_latents(base, denoiser, noise, *, guidance):
    records, other = records_of(base)
    return ref.sampled(
        sdxl,
        base,
        denoiser,
        noise,
        records=records,
        steps=STEPS,
        guidance=guidance,
        other=other,
        frames=FRAMES,
    )


def batch_of(base):
    """Latents as they are trained on, the noise, and the conditioning."""
    autoencoder = sdxl.load_autoencoder(base, dtype=torch.float32, device="cpu")
    posterior = sdxl.encode_images(autoencoder, ref.drawn(2, 3, HEIGHT, WIDTH, name="pixels"))
    drawn = posterior.mean + posterior.std * ref.drawn(2, 4, *LATENT, name="posterior")
    latents = sdxl.normalise(drawn, sdxl.latent_constants(base))
    noise = ref.drawn(2, 4, *LATENT)
    return latents, noise, sdxl.conditioning(records_of(base)[0], FRAMES)


def our_loss(base, denoiser, batch, weighting="none"):
    latents, noise, conditioning = batch
    process = process_of(sdxl, base)
    noisy = process.add_noise(latents, noise, LEVELS)
    prediction = sdxl.predict(denoiser, noisy, LEVELS, conditioning=conditioning, guidance=1.0)
    losses = objectives.per_sample_loss(prediction, process.target(latents, noise, LEVELS))
    return (losses * process.loss_weight(LEVELS, ObjectiveConfig(weighting=weighting))).mean()


def scripts_loss(base, pipeline, unet, weighting):
    """What diffusers' train_text_to_image_lora_sdxl.py computes, on the same draws."""
    from diffusers import DDPMScheduler
    from diffusers.training_utils import compute_snr

    scheduler = DDPMScheduler.from_pretrained(base.root, subfolder="scheduler")
    steps, noise = LEVELS.long(), ref.drawn(2, 4, *LATENT)
    with torch.no_grad():
        encoded = pipeline.vae.encode(ref.drawn(2, 3, HEIGHT, WIDTH, name="pixels")).latent_dist
        embeds, _, pooled, _ = pipeline.encode_prompt(PROMPTS, do_classifier_free_guidance=False)
    latents = encoded.mean + encoded.std * ref.drawn(2, 4, *LATENT, name="posterior")
    latents = latents * pipeline.vae.config.scaling_factor
    noisy = scheduler.add_noise(latents, noise, steps)
    ids = torch.tensor([[517, 775, 3, 5, HEIGHT, WIDTH]] * 2)
    added = {"time_ids": ids, "text_embeds": pooled}
    predicted = unet(noisy, steps, embeds, added_cond_kwargs=added).sample
    velocity = scheduler.config.prediction_type == "v_prediction"
    target = scheduler.get_velocity(latents, noise, steps) if velocity else noise
    losses = torch.nn.functional.mse_loss(predicted, target, reduction="none").mean((1, 2, 3))
    if weighting == "min_snr":
        snr = compute_snr(scheduler, steps)
        gammas = 5.0 * torch.ones_like(snr)
        least = torch.stack([snr, gammas], dim=1).min(dim=1)[0]
        losses = losses * (least / (snr + 1) if velocity else least / snr)
    return losses.mean()


def check_captions(base, pipeline):
    encoders = ref.encoders_of(sdxl, base)
    zeros = sdxl.encode_unconditional(encoders, max_length=LENGTH)
    for text in CAPTIONS.values():
        record = sdxl.encode_captions(encoders, [text], max_length=LENGTH)[0]
        with torch.no_grad():
            embeds, no_embeds, pooled, no_pooled = pipeline.encode_prompt(text)
        assert torch.equal(record["text_embeds"], embeds[0])
        assert torch.equal(record["pooled_embeds"], pooled[0])
        assert torch.equal(zeros["text_embeds"], no_embeds[0])
        assert torch.equal(zeros["pooled_embeds"], no_pooled[0])


def check_predictions(base, pipeline):
    with ref.recorded(pipeline.unet) as calls:
        pipeline_latents(pipeline, ref.drawn(2, 4, *LATENT), guidance=GUIDANCE)
    assert len(calls) == STEPS
    denoiser, (records, other) = ref.denoiser_of(sdxl, base), records_of(base)
    branches = [[other, other], records]  # the pipeline's order
    for (seen, step), _, (output,) in calls:
        for rows, branch in zip((slice(0, 2), slice(2, 4)), branches, strict=True):
            predicted = sdxl.predict(
                denoiser,
                seen[rows],
                step.expand(2),
                conditioning=sdxl.conditioning(branch, FRAMES),
                guidance=GUIDANCE,
            )
            torch.testing.assert_close(predicted.detach(), output[rows], rtol=1e-5, atol=1e-5)


def check_sampling(base, pipeline):
    noise, denoiser = ref.drawn(2, 4, *LATENT), ref.denoiser_of(sdxl, base)
    for guidance in (1.0, GUIDANCE):
        expected = pipeline_latents(pipeline, noise, guidance=guidance)
        found = our_latents(base, denoiser, noise, guidance=guidance)
        assert ref.relative(found, expected) < 1e-5


def check_latents(base, pipeline):
    pixels = ref.drawn(1, 3, HEIGHT, WIDTH, name="pixels").clamp(-1, 1)
    autoencoder = sdxl.load_autoencoder(base, dtype=torch.float32, device="cpu")
    posterior = sdxl.encode_images(autoencoder, pixels)
    with torch.no_grad():
        encoded = pipeline.vae.encode(pixels).latent_dist
    assert torch.equal(posterior.mean, encoded.mean)
    assert torch.equal(posterior.std, encoded.std)
    constants = sdxl.latent_constants(base)
    latents = sdxl.normalise(posterior.mean, constants)
    back = latents / pipeline.vae.config.scaling_factor  # the pipeline's own line
    torch.testing.assert_close(back, posterior.mean, rtol=1e-5, atol=1e-6)
    assert torch.equal(sdxl.denormalise(latents, constants), back)
    picture = pipeline(
        prompt=PROMPTS[0],
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=1,
        guidance_scale=1.0,
        output_type="pt",
        callback_on_step_end=lambda *_: {"latents": latents},
    ).images
    ours = sdxl.decode_latents(autoencoder, sdxl.denormalise(latents, constants))
    assert torch.equal((ours / 2 + 0.5).clamp(0, 1), picture)


def check_training(base, pipeline):
    config = ref.adapter_config(sdxl)
    denoiser, injected = ref.adapted(sdxl, base, config, strength=0.1)
    batch = batch_of(base)
    for weighting in ("none", "min_snr"):
        ours = our_loss(base, denoiser, batch, weighting)
        theirs = scripts_loss(base, pipeline, denoiser, weighting)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.0)
        found, expected = (ref.gradients(injected.parameters, loss) for loss in (ours, theirs))
        assert expected.norm() > 0
        assert ref.relative(found, expected) < 1e-6


def test_caption_records_equal_the_pipelines_and_the_other_branch_is_zeros(
    noise_base, noise_pipeline
):
    check_captions(noise_base, noise_pipeline)


def test_a_base_may_ask_for_the_empty_texts_states_instead_of_zeros(noise_base):
    encoders = replace(ref.encoders_of(sdxl, noise_base), zeros_for_empty=False)
    record = sdxl.encode_unconditional(encoders, max_length=LENGTH)
    pipeline = ref.make_pipeline(noise_base)
    pipeline.register_to_config(force_zeros_for_empty_prompt=False)
    with torch.no_grad():
        _, embeds, _, pooled = pipeline.encode_prompt("a red circle")
    assert torch.equal(record["text_embeds"], embeds[0])
    assert torch.equal(record["pooled_embeds"], pooled[0])
    assert "force_zeros_for_empty_prompt" in sdxl.FACTS.caption_settings


def test_a_batch_of_captions_equals_each_alone_and_the_shapes_are_known_before(noise_base):
    encoders = ref.encoders_of(sdxl, noise_base)
    texts = list(CAPTIONS.values())
    names = ("text_encoder", "text_encoder_2")
    configs = {name: noise_base.component(name).config for name in names}
    for text, record in zip(
        texts, sdxl.encode_captions(encoders, texts, max_length=32), strict=True
    ):
        alone = sdxl.encode_captions(encoders, [text], max_length=32)[0]
        assert record.keys() == alone.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(record[name], tensor, rtol=1e-5, atol=1e-5)
        shapes = {name: tuple(tensor.shape) for name, tensor in record.items()}
        assert shapes == sdxl.caption_shapes(configs, max_length=32)
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in record.values())


def test_predict_equals_what_the_pipelines_unet_produced_in_both_branches(base, pipeline):
    check_predictions(base, pipeline)


def test_our_sampling_ends_where_the_pipelines_does_with_guidance_and_without(base, pipeline):
    check_sampling(base, pipeline)


def test_without_guidance_our_sampling_is_the_pipelines_to_the_bit(base, pipeline):
    noise, denoiser = ref.drawn(2, 4, *LATENT), ref.denoiser_of(sdxl, base)
    expected = pipeline_latents(pipeline, noise, guidance=1.0)
    assert torch.equal(our_latents(base, denoiser, noise, guidance=1.0), expected)


@pytest.mark.parametrize("steps", [1, 4, 27, 50])
def test_the_schedule_is_the_schedulers(base, pipeline, steps):
    pipeline.scheduler.set_timesteps(steps)
    schedule = sdxl.sampling_schedule(steps, latent_size=LATENT, base=base)
    sigmas, levels = torch.tensor(schedule.sigmas), torch.tensor(schedule.levels)
    assert torch.equal(sigmas, pipeline.scheduler.sigmas[:-1])
    assert torch.equal(levels, pipeline.scheduler.timesteps)
    assert torch.tensor(schedule.scale) == pipeline.scheduler.init_noise_sigma
    assert float(pipeline.scheduler.sigmas[-1]) == 0.0


def test_guidance_starts_above_one_as_the_pipelines(noise_base, noise_pipeline):
    for scale in (0.0, 1.0, 1.001, 5.0):
        noise_pipeline._guidance_scale = scale
        found = sdxl.guides(scale, base=noise_base)
        assert found == noise_pipeline.do_classifier_free_guidance


def test_normalised_latents_are_what_the_pipeline_decodes_from(noise_base, noise_pipeline):
    check_latents(noise_base, noise_pipeline)
    shape = sdxl.latent_shape(noise_base.component("vae").config, height=HEIGHT, width=WIDTH)
    assert shape == (4, *LATENT)


def test_latents_are_encoded_in_float32_alone():
    assert sdxl.FACTS.latent_dtypes == ("fp32",)


def test_loss_and_gradients_equal_those_of_the_public_script(base, pipeline):
    check_training(base, pipeline)


def test_time_ids_are_original_crop_and_bucket_with_the_height_first_in_float32():
    frame = Frame(original=(517, 1031), crop=(7, 11), size=(64, 96))
    record = {"text_embeds": torch.zeros(8, 64), "pooled_embeds": torch.zeros(32)}
    half = {name: tensor.bfloat16() for name, tensor in record.items()}
    ids = sdxl.conditioning([half], [frame])["time_ids"]
    assert ids.dtype == torch.float32
    assert ids.tolist() == [[517.0, 1031.0, 7.0, 11.0, 64.0, 96.0]]


def test_time_ids_reach_a_bfloat16_unet_in_float32_under_autocast(noise_base):
    denoiser = ref.denoiser_of(sdxl, noise_base, dtype=torch.bfloat16)
    with ref.recorded(denoiser) as calls, torch.autocast("cpu", dtype=torch.bfloat16):
        predicted = sdxl.predict(
            denoiser,
            ref.drawn(2, 4, *LATENT),
            LEVELS,
            conditioning=sdxl.conditioning(records_of(noise_base)[0], FRAMES),
            guidance=1.0,
        )
    [((seen, step), named, _)] = calls
    assert (seen.dtype, step.dtype) == (torch.bfloat16, torch.float32)
    assert named["added_cond_kwargs"]["time_ids"].dtype == torch.float32
    assert torch.isfinite(predicted).all()


def test_a_prediction_does_not_depend_on_its_batch_mates(noise_base):
    denoiser, records = ref.denoiser_of(sdxl, noise_base), records_of(noise_base)[0]
    noisy = ref.drawn(2, 4, *LATENT)
    frames = [FRAMES[0], Frame(original=(90, 70), crop=(0, 0), size=(HEIGHT, WIDTH))]

    def run(rows):
        conditioning = sdxl.conditioning(records[rows], frames[rows])
        return sdxl.predict(
            denoiser, noisy[rows], LEVELS[rows], conditioning=conditioning, guidance=1.0
        )

    both = run(slice(0, 2))
    for row in (slice(0, 1), slice(1, 2)):
        torch.testing.assert_close(both[row], run(row), rtol=1e-5, atol=1e-5)


def test_another_text_length_and_another_cut_change_the_prediction(noise_base):
    denoiser, noisy = ref.denoiser_of(sdxl, noise_base), ref.drawn(2, 4, *LATENT)

    def run(length, frame):
        conditioning = sdxl.conditioning(records_of(noise_base, length=length)[0], [frame] * 2)
        return sdxl.predict(denoiser, noisy, LEVELS, conditioning=conditioning, guidance=1.0)

    usual = run(64, FRAMES[0])
    assert ref.relative(run(32, FRAMES[0]), usual) > 1e-4
    assert ref.relative(run(64, replace(FRAMES[0], crop=(0, 0))), usual) > 1e-4


def test_an_adapter_learns_a_batch_and_every_one_of_its_tensors_has_gradients(noise_base):
    config = ref.adapter_config(sdxl, rank=8, alpha=8.0)
    denoiser, injected = ref.adapted(sdxl, noise_base, config)
    batch = batch_of(noise_base)
    losses, idle = ref.train(injected.parameters, lambda: our_loss(noise_base, denoiser, batch))
    assert losses[-1] < 0.8 * losses[0]
    assert idle == set()


def test_the_exported_adapter_draws_the_same_latents_in_the_pipeline(base, tmp_path):
    pipeline = ref.make_pipeline(base)
    config = ref.adapter_config(sdxl, rank=4, alpha=2.0)
    denoiser, _ = ref.adapted(sdxl, base, config, strength=2.0)
    noise = ref.drawn(2, 4, *LATENT)
    bare = pipeline_latents(pipeline, noise, guidance=1.0)
    path = ref.exported(sdxl, denoiser, tmp_path, config)
    pipeline.load_lora_weights(tmp_path, weight_name=path.name)
    with_adapter = pipeline_latents(pipeline, noise, guidance=1.0)
    assert ref.relative(with_adapter, bare) > 0.1
    ours = our_latents(base, denoiser, noise, guidance=1.0)
    assert ref.relative(ours, with_adapter) < 1e-5


def test_few_step_bases_are_known_by_their_scheduler_and_velocity_bases_are_not_taken_for_them(
    base, noise_base, tmp_path
):
    assert sdxl.distillation(base) is None
    turbo = with_changes(noise_base, tmp_path, timestep_spacing="trailing")
    assert sdxl.distillation(turbo) == "timestep_spacing is trailing"


def test_a_unet_that_is_fed_the_guidance_is_known_and_refused(noise_base, tmp_path):
    consistent = with_changes(noise_base, tmp_path, "unet/config.json", time_cond_proj_dim=16)
    assert sdxl.distillation(consistent) == "time_cond_proj_dim is set"
    with pytest.raises(InputRefused, match=r"family.base=.*time_cond_proj_dim"):
        ref.denoiser_of(sdxl, consistent)


def reordered(*order):
    """The conditioning with its time ids in another order."""

    def change(conditioning, records, frames):
        made = conditioning(records, frames)
        ids = made["time_ids"][:, list(order)]
        return replace(made, tensors={**made.tensors, "time_ids": ids})

    return change


def zero_text_pads(conditioning, records, frames):
    made = conditioning(records, frames)
    text = made["text_embeds"].clone()
    text[:, 20:] = 0
    return replace(made, tensors={**made.tensors, "text_embeds": text})


def coarse_ids(conditioning, records, frames):
    made = conditioning(records, frames)
    return replace(made, tensors={**made.tensors, "time_ids": made["time_ids"].bfloat16().float()})


def bare_betas(patch):
    of = DDPM.of
    names = ("beta_start", "beta_end", "beta_schedule")
    bare = lambda given: of({n: v for n, v in given.items() if n not in names})  # noqa: E731
    patch.setattr(DDPM, "of", bare)


def unscaled_noise(schedule, steps, **named):
    return replace(schedule(steps, **named), scale=1.0)


def later_step(predict, denoiser, noisy, level, **named):
    return predict(denoiser, noisy, level + 1, **named)


def always_noise(patch):
    patch.setattr(DDPM, "target", lambda _self, _latents, noise, _level: noise)


def unscaled_input(patch):
    patch.setattr(DDPM, "denoiser_input", lambda _self, latents, _sigma: latents)


def pooled_of_the_first(encode, encoders, captions, **named):
    exchanged = replace(encoders, first=encoders.second, first_tokenizer=encoders.second_tokenizer)
    return encode(exchanged, captions, **named)


MUTATIONS = {
    "height and width swapped": (
        ref.alters(sdxl, "conditioning", reordered(1, 0, 3, 2, 5, 4)),
        check_predictions,
    ),
    "bucket for original": (
        ref.alters(sdxl, "conditioning", reordered(4, 5, 2, 3, 0, 1)),
        check_training,
    ),
    "time ids rounded to bfloat16": (
        ref.alters(sdxl, "conditioning", coarse_ids),
        check_predictions,
    ),
    "text pads zeroed": (ref.alters(sdxl, "conditioning", zero_text_pads), check_predictions),
    "last hidden layer": (ref.replaces(sdxl, "TEXT_LAYER", -1), check_captions),
    "the second encoder twice": (
        ref.alters(sdxl, "encode_captions", pooled_of_the_first),
        check_captions,
    ),
    "empty text for zeros": (
        ref.alters(sdxl, "encode_unconditional", lambda _f, encoders, **named: (
            sdxl.encode_captions(encoders, [""], **named)[0]
        )),
        check_captions,
    ),
    "latents not normalised": (
        ref.replaces(sdxl, "normalise", lambda raw, _constants: raw),
        check_training,
    ),
    "latents divided by the factor": (
        ref.replaces(sdxl, "normalise", lambda raw, constants: raw / constants["scale"]),
        check_latents,
    ),
    "betas of a bare scheduler": (bare_betas, check_training),
    "noise for velocity": (always_noise, check_training),
    "a step later": (ref.alters(sdxl, "predict", later_step), check_predictions),
    "input not scaled to unit variance": (unscaled_input, check_sampling),
    "first noise not scaled": (
        ref.alters(sdxl, "sampling_schedule", unscaled_noise),
        check_sampling,
    ),
    "guidance beyond the conditional": (
        ref.replaces(sdxl, "guide", beyond_conditional),
        check_sampling,
    ),
    "no guidance": (
        ref.replaces(sdxl, "guides", lambda _scale, base: False),
        check_sampling,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_turns_its_check_red(velocity_base, velocity_pipeline, monkeypatch, name):
    mutate, check = MUTATIONS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(velocity_base, velocity_pipeline)
