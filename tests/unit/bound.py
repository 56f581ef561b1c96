"""Tiny denoisers with an adapter, one batch of each, and what binding makes of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bench.full_size import make_batch, make_denoiser, preset_of
from lib import adapter, ema, families
from lib.batches import Batch
from lib.binding import bind
from lib.objectives import per_sample_loss
from lib.optimizers import make_optimizer
from lib.schema import AdapterConfig, OptimizerConfig
from lib.training.step import Trainer

CPU = torch.device("cpu")
SIDE = 64  # pixels


@dataclass
class Tiny:
    """A family's denoiser in float32 whose adapter is not zero, and a batch."""

    family: Any
    denoiser: Any
    config: AdapterConfig
    parameters: Any
    batch: Batch
    weights: Any = None

    def bind(self, *, mode="fp32", dtype=torch.float32, dropout=False):
        """Bound by the family's own facts."""
        self.weights = bind(
            self.denoiser,
            self.parameters,
            shared=self.family.FACTS.shared_inputs,
            mode=mode,
            device=CPU,
            dtype=dtype,
            scale=adapter.scale_of(self.config),
            dropout=dropout,
        )
        return self.weights

    def predict(self, denoiser=None, batch=None):
        batch = batch or self.batch
        return self.family.predict(
            denoiser or self.denoiser,
            batch.noisy,
            batch.level,
            conditioning=batch.conditioning,
            guidance=1.0,
        )

    def loss(self, batch=None):
        batch = batch or self.batch
        return per_sample_loss(self.predict(batch=batch), batch.target).mean()

    def gradients(self, batch=None):
        """The loss's value, and its gradients by name; None where there is none."""
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.weights is not None:
            self.weights.clear()
        loss = self.loss(batch)
        loss.backward()
        if self.weights is not None:
            self.weights.gather()
        found = {n: None if p.grad is None else p.grad.clone() for n, p in self.named()}
        return float(loss.detach()), found

    def named(self):
        return self.parameters.items()

    def groups(self):
        """The groups of a bound denoiser, each once."""
        held = [getattr(module, "group", None) for module in self.denoiser.modules()]
        return list({id(group): group for group in held if group is not None}.values())


def trainer_of(made, *, lr=0.0, decay=0.0, weight_decay=0.0):
    """Training's own step over a bound denoiser."""
    config = OptimizerConfig(lr=lr, weight_decay=weight_decay)
    return Trainer(
        family=made.family,
        denoiser=made.denoiser,
        parameters=made.parameters,
        optimizer=make_optimizer(made.parameters.values(), config),
        device=CPU,
        autocast_dtype=None,
        max_grad_norm=0.0,
        seed=0,
        dropout=0.0,
        ema_decay=decay,
        ema=ema.start(made.parameters) if decay else {},
        weights=made.weights,
    )


def tiny(name, *, rank=4, alpha=8.0, side=SIDE, **settings):
    """By a family's name; B is drawn, since a gradient of A is zero where B is."""
    family, preset = families.get(name), preset_of(name)
    recipe = {n: part for n, part in family.TINY.items() if isinstance(part, Mapping)}
    denoiser = make_denoiser(family, recipe, device=CPU).float()
    config = AdapterConfig(rank=rank, alpha=alpha, targets=list(preset["targets"]), **settings)
    injected = adapter.inject(denoiser, config, seed=0)
    fill(injected.parameters)
    batch = make_batch(family, recipe, preset, side=side)
    widened = [t.float() if t.is_floating_point() else t for t in batch.tensors()]
    return Tiny(family, denoiser, config, injected.parameters, batch.with_tensors(widened))


@torch.no_grad()
def fill(parameters, *, seed=3, std=0.1):
    """Draw every B."""
    source = torch.Generator().manual_seed(seed)
    for name, parameter in parameters.items():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=source) * std)


def scattered(made):
    """Weights of norms that are not all alike, as those of a new denoiser are."""
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in made.denoiser.named_parameters():
            if "norm" in name and parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=source) / 4)
    return made


def learnt(made):
    """The loss and the gradient of each adapted weight."""
    loss = made.loss()
    names = list(made.parameters)
    found = torch.autograd.grad(loss, list(made.parameters.values()), allow_unused=True)
    zeros = (torch.zeros_like(made.parameters[name]) for name in names)
    filled = (zero if grad is None else grad for grad, zero in zip(found, zeros, strict=True))
    return loss.detach(), dict(zip(names, filled, strict=True))


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors.values() if t is not None])


def relative(one, other):
    """The distance of two tensors as a share of the second's length."""
    return float((one - other).norm() / other.norm())


def storages(tensors):
    """Where they lie; parts of one buffer lie in one."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
