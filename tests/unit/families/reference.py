"""What the families' tests share: a tiny base, its unmodified pipeline, an adapter, mutations.

Everything is float32 on the CPU; the family is an argument.
"""

from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import yaml
from torch.overrides import TorchFunctionMode

from lib import adapter, objectives
from lib.exporting import export_adapter
from lib.family import process_of
from lib.hub import Base, Component
from lib.memory import Memory
from lib.random import normal
from lib.records import to_stored
from lib.sampling import euler
from lib.schema import AdapterConfig, Config
from lib.tensors import encode

CONF = Path(__file__).resolve().parents[3] / "conf" / "family"
HEIGHT, WIDTH = 64, 96
SHORT, LONG = "a red circle", "a watercolor painting of a cat with a hat, in the snow at night"
PROMPTS = [SHORT, LONG]
CAPTIONS = {
    "short": SHORT,
    "empty": "",
    "beyond the maximum": "fox " * 300,
    "not ASCII, and with braces": "caf\u00e9 {0} \u732b <b>",
}


class NoNumbers(TorchFunctionMode):
    """Forbids tensors of Python numbers: on a GPU a copy from the host, which no graph records."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.tensor, torch.as_tensor), "a tensor is made of a number"
        return func(*args, **(kwargs or {}))


def predicts_without_numbers(family, denoiser, records, *, noisy):
    """Fails where a prediction, once its shape is known, makes a tensor of a number."""
    made, levels = family.conditioning(records, ()), torch.tensor([0.3, 0.517])

    def predict():
        return family.predict(denoiser, noisy, levels, conditioning=made, guidance=1.0)

    predict()  # what is made once, for each shape
    with NoNumbers():
        predict()


def make_base(family, folder):
    """The family's tiny base, saved under the folder."""
    family.build_tiny(folder / "tiny")
    root = folder / "tiny"
    return Base(str(root), root=root, name=f"file:{root}", memory=Memory(folder / "store"))


def make_pipeline(base):
    """The base as diffusers loads it."""
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(base.root, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def targets_of(family):
    """The adapter targets of the family's preset."""
    path = CONF / f"{family.FACTS.name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))["preset"]["targets"]


def drawn(*shape, name="test"):
    return torch.from_numpy(normal(shape, seed=1, stream="noise", counter=0, sample_id=name))


def relative(a, b):
    return float((a - b).norm() / b.norm())


def denoiser_of(family, base, dtype=torch.float32):
    return family.load_denoiser(base, dtype=dtype, device="cpu")


def encoders_of(family, base):
    return family.load_text_encoders(base, dtype=torch.float32, device="cpu")


@contextmanager
def recorded(module):
    """The calls of a module while the context lasts: positional and named arguments, output."""
    calls = []
    handle = module.register_forward_hook(
        lambda _module, args, named, output: calls.append((args, named, output)), with_kwargs=True
    )
    try:
        yield calls
    finally:
        handle.remove()


def sampled(
    family, base, denoiser, noise, *, records, steps, guidance, other=None, frames=(), size=None
):
    """Latents that our own sampler ends with; `other` is the unconditional record.

    `size` is that of raw latents, where the noise has another.
    """
    both = family.guides(guidance, base=base)
    others = family.conditioning([other] * len(records), frames) if both else None
    size = size or (noise.shape[2], noise.shape[3])
    return euler(
        family,
        denoiser,
        noise,
        conditioning=family.conditioning(records, frames),
        schedule=family.sampling_schedule(steps, latent_size=size, base=base),
        guidance=guidance,
        process=process_of(family, base),
        unconditional=others,
    )


def encoder(family, *, length):
    """`encode(base, captions)`: their records, of this length at most."""

    def encode(base, captions):
        return family.encode_captions(encoders_of(family, base), captions, max_length=length)

    return encode


def predictor(family, *, noise):
    """`predicted(denoiser, records, level, noise)`, of a batch of two unless told otherwise."""

    def predicted(denoiser, records, level=(0.3, 0.517), noise=noise):
        return family.predict(
            denoiser,
            noise,
            torch.tensor(level),
            conditioning=family.conditioning(records, ()),
            guidance=1.0,
        )

    return predicted


def sampler(family, *, noise, steps, scale, length, size=None):
    """`our_latents(base, denoiser, scale)`: what our sampler ends with, of PROMPTS."""

    def our_latents(base, denoiser, scale=scale):
        encoders = encoders_of(family, base)
        return sampled(
            family,
            base,
            denoiser,
            noise,
            records=family.encode_captions(encoders, PROMPTS, max_length=length),
            other=family.encode_unconditional(encoders, max_length=length),
            steps=steps,
            guidance=scale,
            size=size,
        )

    return our_latents


def loss_of(family, base, denoiser, *, latents, noise, level, conditioning, guidance=1.0):
    """Our training loss over a batch, unweighted."""
    process = process_of(family, base)
    prediction = family.predict(
        denoiser,
        process.add_noise(latents, noise, level),
        level,
        conditioning=conditioning,
        guidance=guidance,
    )
    target = process.target(latents, noise, level)
    return objectives.per_sample_loss(prediction, target).mean()


def adapter_config(family, *, rank=4, alpha=2.0):
    return AdapterConfig(rank=rank, alpha=alpha, targets=targets_of(family))


def adapted(family, base, config, *, strength=0.0):
    """A denoiser with an adapter; its B is drawn where a strength is given."""
    denoiser = denoiser_of(family, base)
    injected = adapter.inject(denoiser, config, seed=0)
    for name, parameter in injected.parameters.items():
        if strength and "lora_B" in name:
            parameter.data = strength * drawn(*parameter.shape, name=name)
    return denoiser, injected


def exported(family, denoiser, folder, config):
    """The adapter in a file that `load_lora_weights` reads; its path."""
    source = folder / "adapter.safetensors"
    source.write_bytes(encode(to_stored(adapter.state_dict(denoiser)), metadata={}))
    made_of = Component(type(denoiser).__name__, config=dict(denoiser.config), weights={})
    options = {"config": Config(adapter=config), "family": family, "denoiser": made_of}
    return export_adapter(source, folder, provenance={}, **options).path


def train(parameters, loss, *, steps=60, lr=1e-2):
    """AdamW on one fixed batch: the losses, and the tensors that never had a gradient but 0."""
    optimizer = torch.optim.AdamW(parameters.values(), lr=lr)
    losses, idle = [], set(parameters)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        losses.append(float(value.detach()))
        for name, parameter in parameters.items():
            if parameter.grad is not None and parameter.grad.any():
                assert torch.isfinite(parameter.grad).all(), name
                idle.discard(name)
        optimizer.step()
    return losses, {name.replace(".default", "") for name in idle}


def gradients(parameters, loss):
    """Every tensor's gradient of the loss, zeros where it has none, in one vector."""
    for parameter in parameters.values():
        parameter.grad = None
    loss.backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()]
    return torch.cat([gradient.flatten() for gradient in found])


def assert_same_training(family, base, denoiser, injected, expected, **batch):
    """Our loss over a batch, and its gradients, are those of a recipe written out: to 1e-6."""
    ours = loss_of(family, base, denoiser, **batch)
    assert relative(ours.detach(), expected.detach()) < 1e-6
    theirs = gradients(injected.parameters, expected)
    assert relative(gradients(injected.parameters, ours), theirs) < 1e-6


class Altered:
    """A denoiser whose named arguments are altered before each call."""

    def __init__(self, denoiser, alter):
        self._denoiser, self._alter = denoiser, alter

    def __getattr__(self, name):
        return getattr(self._denoiser, name)

    def __call__(self, *args, **named):
        return self._denoiser(*args, **self._alter(named))


def alters_call(family, alter):
    """A mutation: what `predict` gives its denoiser by name is altered."""

    def mutate(patch):
        predict = family.predict
        mutated = lambda denoiser, *a, **k: predict(Altered(denoiser, alter), *a, **k)  # noqa: E731
        patch.setattr(family, "predict", mutated)

    return mutate


def alters(family, name, change):
    """A mutation: a function of the family's, given to `change`, becomes what it returns."""
    return lambda patch: patch.setattr(family, name, partial(change, getattr(family, name)))


def replaces(family, name, value):
    """A mutation: something of the family's is another."""
    return lambda patch: patch.setattr(family, name, value)


def argument_mutations(family):
    """`call(name=change)`: a mutation of what the denoiser is given under these names."""

    def call(**changes):
        return alters_call(
            family, lambda named: {**named, **{n: f(named[n]) for n, f in changes.items()}}
        )

    return call
