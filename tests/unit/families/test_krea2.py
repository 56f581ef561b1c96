"""Krea 2 against diffusers' own pipeline, unmodified, over the same tiny weights.

The pipeline pads every text to one length, before the template's end; we pad to the longest of a
batch, after it. Both mask the padding, so that sums run in another order: hence 1e-5, not equality.
"""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from lib import guidance
from lib.errors import InputRefused
from lib.families import krea2 as family
from lib.hub import Base
from tests.unit.families import reference
from tests.unit.families.reference import CAPTIONS, HEIGHT, LONG, PROMPTS, SHORT, WIDTH, drawn

LENGTH, STEPS, SCALE = 48, 3, 4.5
SIZE = (HEIGHT // 8, WIDTH // 8)
NOISE = (2, 16, *SIZE)
encode = reference.encoder(family, length=LENGTH)
predicted = reference.predictor(family, noise=drawn(*NOISE))
our_latents = reference.sampler(
    family, noise=drawn(*NOISE), steps=STEPS, scale=SCALE, length=LENGTH
)
call = reference.argument_mutations(family)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def edited(base, tmp_path):
    """The base with some values of one of its JSON files changed."""

    def edit(file, **values):
        root = shutil.copytree(base.root, tmp_path / "edited")
        content = json.loads((root / file).read_text())
        (root / file).write_text(json.dumps({**content, **values}))
        return Base(str(root), root=root, name=f"file:{root}", memory=base.memory)

    return edit


def unpacked(pipeline, tokens):
    return pipeline._unpack_latents(tokens, HEIGHT, WIDTH)[:, :, 0]


def pipeline_latents(pipeline, scale=SCALE):
    """Latents that the pipeline ends with: b c h w."""
    out = pipeline(
        prompt=PROMPTS,
        guidance_scale=scale,
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
            states, mask = pipeline.encode_prompt(caption, max_sequence_length=LENGTH)
        assert torch.equal(encode(base, [caption])[0]["text_embeds"], states[0][mask[0]])


def check_unconditional(base, pipeline):
    encoders = reference.encoders_of(family, base)
    with reference.recorded(pipeline.transformer) as calls:
        pipeline_latents(pipeline)
    other = family.encode_unconditional(encoders, max_length=LENGTH)["text_embeds"]
    named = calls[1][1]
    for states, mask in zip(
        named["encoder_hidden_states"], named["encoder_attention_mask"], strict=True
    ):
        assert mask.sum() == len(other) == 5
        torch.testing.assert_close(other, states[mask], **CLOSE)


def check_predict(base, pipeline):
    denoiser = reference.denoiser_of(family, base)
    with reference.recorded(pipeline.transformer) as calls:
        pipeline_latents(pipeline)
    assert len(calls) == 2 * STEPS
    for _, named, output in calls:
        texts = zip(named["encoder_hidden_states"], named["encoder_attention_mask"], strict=True)
        records = [{"text_embeds": states[mask]} for states, mask in texts]
        noisy = unpacked(pipeline, named["hidden_states"])
        found = predicted(denoiser, records, named["timestep"].tolist(), noisy)
        torch.testing.assert_close(found.detach(), unpacked(pipeline, output[0]), **CLOSE)


def check_sampling(base, pipeline):
    denoiser = reference.denoiser_of(family, base)
    for scale in (SCALE, 0.5, 0.0):
        ours, theirs = our_latents(base, denoiser, scale), pipeline_latents(pipeline, scale)
        torch.testing.assert_close(ours, theirs, **CLOSE)


def check_schedule(base, pipeline):
    for steps in (1, 4, 28):
        for height, width in (SIZE, (64, 96)):
            mu = 0.5 + (1.15 - 0.5) / (6400 - 256) * (height * width // 4 - 256)
            pipeline.scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
            ours = family.sampling_schedule(steps, latent_size=(height, width), base=base)
            expected = pipeline.scheduler.sigmas[:-1]
            torch.testing.assert_close(torch.tensor(ours.sigmas), expected, rtol=0, atol=1e-7)
            assert ours.levels == ours.sigmas


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
    torch.testing.assert_close(decoded_from[:, :, 0], posterior.mean, **CLOSE)
    with torch.no_grad():
        image = pipeline.vae.decode(decoded_from, return_dict=False)[0][:, :, 0]
    ours = family.decode_latents(autoencoder, family.denormalise(latents, constants))
    torch.testing.assert_close(ours, image, **CLOSE)


def check_loss(base, pipeline):
    """Loss and gradients of an adapter against the public recipe, written out."""
    config = reference.adapter_config(family)
    denoiser, injected = reference.adapted(family, base, config, strength=1.0)
    latents, noise = drawn(*NOISE, name="latents"), drawn(*NOISE, name="noise")
    level = torch.tensor([0.25, 0.8])
    records = encode(base, [SHORT, SHORT])  # of one length: what remains is the same arithmetic
    states = torch.stack([record["text_embeds"] for record in records])
    sigma = level.view(-1, 1, 1, 1)
    noisy = (1.0 - sigma) * latents + sigma * noise
    grid = (SIZE[0] // 2, SIZE[1] // 2)
    output = denoiser(
        hidden_states=pipeline._pack_latents(noisy, 2, 16, *SIZE),
        encoder_hidden_states=states,
        timestep=level,
        position_ids=pipeline.prepare_position_ids(states.shape[1], *grid, "cpu"),
        encoder_attention_mask=torch.ones(states.shape[:2], dtype=torch.bool),
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
        conditioning=family.conditioning(records, ()),
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


def encoder_call(**changes):
    """A mutation of what the text encoder is given."""

    def load(original, *args, **options):
        encoders = original(*args, **options)
        alter = lambda named: {**named, **{n: f(named[n]) for n, f in changes.items()}}  # noqa: E731
        return dataclasses.replace(encoders, model=reference.Altered(encoders.model, alter))

    return reference.alters(family, "load_text_encoders", load)


def _raw_positions(positions):
    return torch.arange(positions.shape[-1]).expand_as(positions)


def _inverted(latents, constants):
    return family.autoencoders.standardised(
        latents, {**constants, "std": [1 / value for value in constants["std"]]}
    )


def _of_space(encoders, *, max_length):
    return family.encode_captions(encoders, [" "], max_length=max_length)[0]


def _suffix_first(tokens, *args, **options):
    """The template's end right after the caption, the padding at the end."""
    ids, valid = tokens(*args, **options)
    order = torch.argsort(~valid, stable=True, dim=1)
    return ids.gather(1, order).roll(-1, dims=1), valid.gather(1, order)


MUTATIONS = {
    "height and width change places": (check_predict, call(position_ids=lambda p: p[:, [0, 2, 1]])),
    "time runs the other way": (check_predict, call(timestep=lambda t: 1 - t)),
    "time goes through half precision": (check_predict, call(timestep=lambda t: t.bfloat16())),
    "the mask is dropped": (check_predict, call(encoder_attention_mask=lambda mask: None)),
    "the mask is turned over": (
        check_predict,
        call(encoder_attention_mask=lambda mask: None if mask is None else ~mask),
    ),
    "the sign is changed": (
        check_predict,
        reference.alters(family, "predict", lambda predict, *a, **k: -predict(*a, **k)),
    ),
    "the sign is changed in training": (
        check_loss,
        reference.alters(family, "predict", lambda predict, *a, **k: -predict(*a, **k)),
    ),
    "latents are not normalised": (
        check_latents,
        reference.replaces(family, "normalise", lambda latents, constants: latents),
    ),
    "the deviation is its reciprocal": (
        check_latents,
        reference.replaces(family, "normalise", _inverted),
    ),
    "padding takes positions": (check_captions, encoder_call(position_ids=_raw_positions)),
    "padding is attended to": (
        check_captions,
        encoder_call(attention_mask=lambda mask: torch.ones_like(mask)),
    ),
    "the layers are counted without the embedding": (
        check_captions,
        reference.alters(
            family, "_taps", lambda taps, settings: tuple(t - 1 for t in taps(settings))
        ),
    ),
    "one token of the template too many is kept": (
        check_captions,
        reference.replaces(family, "PREFIX_TOKENS", family.PREFIX_TOKENS - 1),
    ),
    "the caption has no template": (check_captions, reference.replaces(family, "PREFIX", "")),
    "the template's end is another": (
        check_captions,
        reference.replaces(family, "SUFFIX", "<|im_end|>\n<|im_start|>user\n"),
    ),
    "the template's end takes no room of the caption's": (
        check_captions,
        reference.replaces(family, "SUFFIX_TOKENS", 0),
    ),
    "the template's end comes too early": (
        check_captions,
        reference.alters(family, "_tokens", _suffix_first),
    ),
    "the other branch is of a space": (
        check_unconditional,
        reference.replaces(family, "encode_unconditional", _of_space),
    ),
    "guidance starts from the unconditional": (
        check_sampling,
        reference.replaces(family, "guide", guidance.classifier_free),
    ),
    "guidance is off up to 1": (
        check_sampling,
        reference.replaces(family, "guides", lambda scale, *, base: scale > 1),
    ),
    "the schedule is not shifted by size": (
        check_schedule,
        reference.replaces(family.timesteps, "mu_of_tokens", lambda tokens, **_: 0.5),
    ),
    "the schedule is a distilled base's": (
        check_schedule,
        reference.replaces(family.timesteps, "mu_of_tokens", lambda tokens, **_: 1.15),
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
    lengths = [len(record["text_embeds"]) for record in together]
    assert len(set(lengths)) > 2
    assert max(lengths) == LENGTH
    for caption, record in zip(captions, together, strict=True):
        alone = family.encode_captions(encoders, [caption], max_length=LENGTH)[0]
        torch.testing.assert_close(record, alone, **CLOSE)
        assert record["text_embeds"].untyped_storage().nbytes() == record["text_embeds"].nbytes


def test_a_record_does_not_depend_on_the_length_that_it_was_padded_to(encoders):
    short, long = (
        family.encode_captions(encoders, [SHORT], max_length=length)[0] for length in (LENGTH, 512)
    )
    torch.testing.assert_close(short, long, **CLOSE)


def test_the_longest_record_is_what_plans_count(base, encoders):
    configs = {"text_encoder": base.component("text_encoder").config, "pipeline": base.settings}
    record = family.encode_captions(encoders, ["fox " * 300], max_length=LENGTH)[0]
    shapes = family.caption_shapes(configs, max_length=LENGTH)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in record.items()}


def test_a_base_that_names_no_layers_has_the_pipelines_twelve(base):
    text = {"text_config": {"hidden_size": 2560}}
    shapes = family.caption_shapes({"text_encoder": text, "pipeline": {}}, max_length=512)
    assert shapes == {"text_embeds": (512, 12, 2560)}
    assert tuple(range(2, 36, 3)) == family.TAPS


@pytest.mark.parametrize("mate", [LONG, "fox " * 300], ids=["long", "beyond the maximum"])
def test_a_prediction_depends_neither_on_its_mates_nor_on_padding(encoders, denoiser, mate):
    records = family.encode_captions(encoders, [SHORT, mate], max_length=LENGTH)
    both = predicted(denoiser, records).detach()
    for row, level in enumerate((0.3, 0.517)):
        alone = predicted(denoiser, [records[row]], (level,), drawn(*NOISE)[row : row + 1])
        torch.testing.assert_close(both[row], alone[0].detach(), **CLOSE)


def test_texts_of_one_length_have_no_mask(encoders):
    records = family.encode_captions(encoders, [SHORT, SHORT], max_length=LENGTH)
    made = family.conditioning(records, ())
    assert "text_mask" not in made
    assert made["text_embeds"].shape[1] == len(records[0]["text_embeds"])


def test_a_prediction_of_padded_texts_makes_no_tensor_of_a_number(encoders, denoiser):
    records = family.encode_captions(encoders, [SHORT, LONG], max_length=LENGTH)
    reference.predicts_without_numbers(family, denoiser, records, noisy=drawn(*NOISE))


def test_norms_of_a_half_precision_base_stay_float32(base):
    dtypes = {
        name: parameter.dtype
        for name, parameter in reference.denoiser_of(
            family, base, torch.bfloat16
        ).named_parameters()
    }
    norms = {name for name in dtypes if "norm" in name.split(".")[-2]}
    assert len(norms) == 4 * (2 + 2) + 2  # four blocks, the text's way in, the last layer
    assert {dtypes[name] for name in norms} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name not in norms} == {torch.bfloat16}


def test_a_half_precision_base_predicts_under_autocast(base, encoders):
    records = family.encode_captions(encoders, PROMPTS, max_length=LENGTH)
    full = predicted(reference.denoiser_of(family, base), records).detach()
    denoiser = reference.denoiser_of(family, base, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        half = predicted(denoiser, records).detach()
    assert reference.relative(half.float(), full) < 0.05


def test_a_whole_adapter_learns_one_batch(base, encoders):
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
    assert idle == set()


@pytest.mark.parametrize("alpha", [4.0, 2.0, 8.0])
def test_the_exported_adapter_draws_the_same_latents_in_the_pipeline(base, tmp_path, alpha):
    config = reference.adapter_config(family, alpha=alpha)
    denoiser, _ = reference.adapted(family, base, config, strength=0.25)
    path = reference.exported(family, denoiser, tmp_path, config)
    pipeline = reference.make_pipeline(base)
    bare = pipeline_latents(pipeline)
    pipeline.load_lora_weights(path.parent, weight_name=path.name)
    found = pipeline_latents(pipeline)
    assert reference.relative(found, bare) > 0.1
    assert reference.relative(our_latents(base, denoiser), found) < 1e-5


def test_a_distilled_base_is_known_by_its_setting_and_has_its_own_schedule(base, edited):
    assert family.distillation(base) is None
    distilled = edited("model_index.json", is_distilled=True)
    assert family.distillation(distilled) == "is_distilled is true"
    pipeline = reference.make_pipeline(distilled)
    pipeline_latents(pipeline, 0.0)
    schedule = family.sampling_schedule(STEPS, latent_size=SIZE, base=distilled)
    assert torch.equal(torch.tensor(schedule.sigmas), pipeline.scheduler.sigmas[:-1])


def test_a_tokenizer_that_pads_on_the_left_is_refused(edited):
    base = edited("tokenizer/tokenizer_config.json", padding_side="left")
    with pytest.raises(InputRefused, match=r"pads on the left.*padding_side"):
        reference.encoders_of(family, base)


def test_a_length_that_the_template_fills_is_refused(encoders):
    with pytest.raises(InputRefused, match=r"captions.max_length=5: .*no room.*6 to 512"):
        family.encode_captions(encoders, [SHORT], max_length=5)
