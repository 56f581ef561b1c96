"""How adapter files of all tools spell their keys: which module, which part, which kind.

Kinds that are not read here are told by their names, so that nobody takes them for LoRA.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lib.changes import unwrapped
from lib.naming import COMFYUI, KOHYA, PEFT
from lib.reading import split_key

LORA, DORA, CONVOLUTION = "LoRA", "DoRA", "LoCon (of a convolution)"
BARE, WRAPPED, ONE_TRAINER = (
    "names alone",
    "PEFT's own",
    "OneTrainer's",
)  # formats that are never written here
LONGEST_KEY = 1000  # longer ones are nobody's, and expressions would take their time over them
_OTHERS = {
    "LoHa": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"),
    "LoKr": (
        *("lokr_w1", "lokr_w1_a", "lokr_w1_b"),
        *("lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"),
    ),
    "LoCon (with a core)": ("lora_mid.weight",),
    "OFT": ("oft_blocks", "oft_diag", "oft_R.weight"),
    "whole differences": ("diff", "diff_b", "w_norm", "b_norm", "set_weight", "reshape_weight"),
}
_KINDS = {f".{ending}": kind for kind, endings in _OTHERS.items() for ending in endings}
# Keys of their own form, without a part that stands for itself.
_PROCESSOR = re.compile(r"(.+\.processor)\..*(?:lora|proj).*\.weight")
_EMBEDDING = re.compile(r"(bundle_emb|emb_params|clip_[gl]|<.+>)(\..*)?")
_FORMATS = {
    **{"lora_unet_": KOHYA, "lora_transformer_": ONE_TRAINER},
    **{"diffusion_model.": COMFYUI, "model.diffusion_model.": COMFYUI},
    **{"transformer.": PEFT, "unet.": PEFT, "base_model.model.": WRAPPED},
}
_TEXT = (
    *("lora_te_", "lora_te1_", "lora_te2_", "lora_te3_", "te1_", "te2_", "te1.", "te2."),
    *("text_encoder.", "text_encoder_2.", "text_encoder_3.", "text_encoders.", "text_model."),
)


@dataclass(frozen=True)
class Module:
    """An adapted module as the file spells it; `parts` maps part of the pair, or ending, to key."""

    name: str
    parts: Mapping[str, str]

    @property
    def kind(self) -> str:
        found = [_KINDS[part] for part in self.parts if part in _KINDS]
        if found:
            return found[0]
        return DORA if "magnitude" in self.parts else LORA

    @property
    def prefix(self) -> str:
        return next((prefix for prefix in _FORMATS if self.name.startswith(prefix)), "")

    @property
    def format(self) -> str:
        return _FORMATS.get(self.prefix, BARE)

    @property
    def stem(self) -> str:
        """The module's name in its model."""
        return unwrapped(self.name.removeprefix(self.prefix))

    @property
    def of_text(self) -> bool:
        """It is of a text encoder."""
        return self.name.startswith(_TEXT)

    @property
    def flat(self) -> str:
        """The same for all spellings of one module."""
        return ("text " if self.of_text else "") + self.stem.replace(".", "_")

    @property
    def block(self) -> str:
        """What the module is part of: its name up to the first number."""
        found = re.match(r"(.*?\D[._])?\d+(?=[._]|$)", self.stem)
        return found[0] if found else "(other)"


@dataclass(frozen=True)
class Spelt:
    """The keys of a file by module; those of other kinds; those nobody knows."""

    modules: tuple[Module, ...]
    others: Mapping[str, tuple[str, ...]]  # kind without modules -> keys
    unknown: tuple[str, ...]
    twins: tuple[str, ...]  # modules with one part under two keys, or under two names

    @property
    def formats(self) -> tuple[str, ...]:
        """What the modules of the denoiser are spelt as; `.alpha` among PEFT's is ComfyUI's."""
        ours = [module for module in self.modules if not module.of_text]
        found = {module.format for module in ours}
        if found == {PEFT} and any("alpha" in module.parts for module in ours):
            return (COMFYUI,)
        return tuple(sorted(found))


def spelt(keys: Iterable[str]) -> Spelt:
    """Sort the keys of a file."""
    parts: dict[str, dict[str, str]] = {}
    others: defaultdict[str, list[str]] = defaultdict(list)
    unknown, twins = [], set()
    for key in sorted(keys):
        named = _split(key)
        if named is None:
            kind = _lone_kind(key)
            (others[kind] if kind else unknown).append(key)
            continue
        module, part = named
        if part in parts.setdefault(module, {}):
            twins.add(module)
        parts[module][part] = key
    modules = tuple(Module(name, of) for name, of in parts.items())
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module in modules:
        places[module.flat].append(module.name)
    twins |= {name for names in places.values() if len(names) > 1 for name in names}
    lone = {kind: tuple(keys) for kind, keys in others.items()}
    return Spelt(modules, lone, tuple(unknown), tuple(sorted(twins)))


def _split(key: str) -> tuple[str, str] | None:
    if len(key) > LONGEST_KEY:
        return None
    if ".processor." in key:  # its endings look like a pair's, of a module that is none
        return None
    if named := split_key(key):
        return named if named[0] else None
    for ending in _KINDS:
        if key.endswith(ending) and key != ending:
            return key.removesuffix(ending), ending
    return None


def _lone_kind(key: str) -> str:
    if len(key) > LONGEST_KEY:
        return ""
    if _PROCESSOR.fullmatch(key):
        return "attention processors (of older diffusers, or XLabs)"
    return "textual inversion" if _EMBEDDING.fullmatch(key) else ""
