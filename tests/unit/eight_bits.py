"""Stands in for bitsandbytes where it is not installed: the same arguments, the same kind of state.

A parameter's state is a number of steps beside tensors of bytes with their scales, or of float32
where the parameter is small; the moments are rounded to 255 levels in blocks of 256.
"""

import math
from types import ModuleType

import torch

BLOCK = 256


class AdamW8bit(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, eps, weight_decay, min_8bit_size):
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.min_8bit_size = min_8bit_size

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert isinstance(group["lr"], float)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, **{n: v for n, v in group.items() if n != "params"})

    def _move(self, parameter, *, lr, betas, eps, weight_decay):
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        first, second = (self._read(state, n, parameter) for n in (1, 2))
        first = betas[0] * first + (1 - betas[0]) * parameter.grad
        second = betas[1] * second + (1 - betas[1]) * parameter.grad.square()
        rise = 1 - betas[0] ** state["step"]
        spread = math.sqrt(1 - betas[1] ** state["step"])
        parameter.mul_(1 - lr * weight_decay)
        parameter.sub_(lr / rise * first / (second.sqrt() / spread + eps))
        for number, moment in ((1, first), (2, second.sqrt())):
            self._write(state, number, moment)

    def _read(self, state, number, parameter):
        if f"state{number}" not in state:
            return torch.zeros_like(parameter)
        moment = state[f"state{number}"].float()
        if f"absmax{number}" in state:
            blocks = (moment.reshape(-1, BLOCK) - 127) / 127
            moment = (blocks * state[f"absmax{number}"][:, None]).view(parameter.shape)
        return moment if number == 1 else moment.square()

    def _write(self, state, number, moment):
        if moment.numel() < self.min_8bit_size:
            state[f"state{number}"] = moment
            return
        blocks = moment.reshape(-1, BLOCK)
        largest = blocks.abs().amax(dim=1).clamp(min=1e-30)
        levels = (blocks / largest[:, None] * 127).round() + 127
        state[f"absmax{number}"] = largest
        state[f"state{number}"] = levels.to(torch.uint8).view(moment.shape)


def module():
    """What `import bitsandbytes` then finds."""
    made, made_optim = ModuleType("bitsandbytes"), ModuleType("bitsandbytes.optim")
    made_optim.AdamW8bit = AdamW8bit
    made.optim = made_optim
    return made
