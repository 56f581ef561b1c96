"""Adapters as training leaves them, of every family and scale, for the tests of exported files.

What an adapter does is asked of PEFT's own layers, on a denoiser of the real class whose weights take
no memory; so no scale and no name of ours is in it.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

from lib import families
from lib.changes import Change, changes_of
from lib.formats import DIFFUSERS_FILE, Target, adapter_file
from lib.hollow import hollow_denoiser, linear_sizes
from lib.hub import Component
from lib.naming import PEFT
from lib.proof import loaded_changes, prove
from lib.random import normal

CONF = Path(__file__).resolve().parents[3] / "conf" / "family"
RANK = 4
SCALES = {
    "alpha = rank": {},
    "half": {"lora_alpha": RANK / 2},
    "double": {"lora_alpha": RANK * 2},
    "rsLoRA": {"lora_alpha": 3.0, "use_rslora": True},
    "mixed ranks": {
        "lora_alpha": 3.0,
        "rank_pattern": {"to_q": 6, r"0\.[^.]+\.to_k|to_k": 2},
        "alpha_pattern": {"to_q": 1.5},
    },
}
CELLS = [(name, format) for name in families.names() for format in families.get(name).NAMES.formats]
# Ranks and scales that differ are the hardest; each kind alone is watched in one family.
SCALED = [
    pytest.param(name, format, scale, marks=() if watched else pytest.mark.nightly)
    for name, format in CELLS
    for scale in SCALES
    for watched in [name == "flux" or scale == "mixed ranks"]
]
# diffusers' converter of kohya's FLUX files knows the full width alone; weightless, it costs nothing.
FULL_WIDTH = {"attention_head_dim": 128, "num_attention_heads": 24, "axes_dims_rope": [16, 56, 56]}


@dataclass(frozen=True)
class Trained:
    """An adapter: its tensors, PEFT's description, and what PEFT's layers make of both."""

    family: Any
    component: Component
    description: LoraConfig
    state: dict[str, torch.Tensor]
    changes: dict[str, Change]
    sizes: dict[str, tuple[int, int]]

    def target(self, format, dtype="fp32"):
        facts = self.family.FACTS
        return Target(format, dtype, self.family.NAMES, facts.denoiser, self.sizes)

    def write(self, folder, format, *, dtype="fp32", provenance=None):
        """The exported file, not proven."""
        made = adapter_file(
            changes_of(self.state, self.description),
            self.target(format, dtype),
            description=self.description,
            provenance=provenance or {},
        )
        path = folder / (DIFFUSERS_FILE if format == PEFT else f"{format}.safetensors")
        path.write_bytes(made.data)
        return path

    def prove(self, path, format, *, dtype="fp32", **options):
        """Against what PEFT's layers do."""
        target = self.target(format, dtype)
        options = {"family": self.family, "denoiser": self.component, **options}
        prove(path, self.changes, target, **options)


def component_of(family):
    """The tiny denoiser's recipe; FLUX's as wide as the real one."""
    facts = family.FACTS
    wide = FULL_WIDTH if facts.name == "flux" else {}
    config = {**family.TINY[facts.denoiser], **wide}
    return Component(facts.classes[facts.denoiser], config, {})


def targets_of(family):
    text = (CONF / f"{family.FACTS.name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["preset"]["targets"]


def drawn(name, shape):
    return torch.from_numpy(normal(shape, seed=1, stream="noise", counter=0, sample_id=name))


@cache
def trained(name, scale="alpha = rank", *, targets=None):
    """An adapter on the targets of the family's preset, or on others."""
    family = families.get(name)
    component, wanted = component_of(family), list(targets or targets_of(family))
    denoiser = hollow_denoiser(component)
    sizes = linear_sizes(denoiser)
    starred = any("*" in one for one in wanted)
    modules = r"(?:.*\.)?(?:" + "|".join(one.replace("*", "[^.]+") for one in wanted) + ")"
    description = LoraConfig(
        **{"r": RANK, "lora_alpha": RANK, **SCALES[scale]},
        target_modules=modules if starred else wanted,
    )
    with torch.random.fork_rng(devices=[]):
        denoiser.add_adapter(description, adapter_name="default")
    for path, parameter in denoiser.named_parameters():
        if "lora_" in path:
            parameter.data = drawn(path, tuple(parameter.shape))
    state = {n: t.detach() for n, t in get_peft_model_state_dict(denoiser).items()}
    changes = loaded_changes(denoiser, adapter="default")
    return Trained(family, component, description, state, changes, sizes)


def keys_of(path):
    return set(load_file(path))
