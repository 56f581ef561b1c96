"""How adapter files name a denoiser's modules: layouts, and other tools' names for the modules.

diffusers splits what the authors' code keeps in one matrix (query, key and value), so one original
module may be several of diffusers', whose rows lie one after the other.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

PEFT, KOHYA, COMFYUI = "diffusers", "kohya", "comfyui"  # the values of `export.format`
FORMATS = (PEFT, KOHYA, COMFYUI)

Groups = Mapping[str, tuple[str, ...]]  # original module -> diffusers' modules, in row order


@dataclass(frozen=True)
class Layout:
    """How the keys of one file are spelt: `<prefix><module>.<half>.weight`, perhaps `.alpha`."""

    prefix: str
    halves: tuple[str, str]
    original: bool  # modules by their original names, fused ones fused; else by diffusers'
    flat: bool = False  # dots within the module's name become underscores
    alpha: bool = False

    def key(self, module: str) -> str:
        """What stands before the half."""
        return self.prefix + (module.replace(".", "_") if self.flat else module)


DOWN_UP, A_B = ("lora_down", "lora_up"), ("lora_A", "lora_B")
KOHYA_LAYOUT = Layout("lora_unet_", DOWN_UP, original=True, flat=True, alpha=True)


@dataclass(frozen=True)
class Names:
    """A family's names in other tools, declared in the family's file."""

    layouts: Mapping[str, Layout]  # by format; `diffusers` is there for every family
    original: Callable[[Sequence[str]], Groups]  # of all linear modules of a denoiser
    # Before diffusers' own names ComfyUI takes these too; one that ends in `_` is for flat ones.
    aliases: tuple[str, ...] = ()
    # Original modules that diffusers' converter of that format drops or refuses, by how they begin.
    lost: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Widths at which that converter splits a fused matrix; it knows no other size of the model.
    widths: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # That converter has one alpha for all modules: files of mixed ranks do without, which is rank.
    one_alpha: bool = False

    @property
    def formats(self) -> tuple[str, ...]:
        """What an adapter of this family can be exported as."""
        return tuple(name for name in FORMATS if name == PEFT or name in self.layouts)

    def lost_modules(self, format: str) -> tuple[str, ...]:
        """Diffusers' modules that are lost in a format, as far as a table tells without a model."""
        groups = self.original.patterns if isinstance(self.original, Table) else {}
        begins = self.lost.get(format, ())
        return tuple(m for name, parts in groups.items() if name.startswith(begins) for m in parts)


def same_names(modules: Sequence[str]) -> Groups:
    """The original names are diffusers' own."""
    return {module: (module,) for module in modules}


@dataclass(frozen=True)
class Table:
    """Groups by a table of patterns, in which `*` is one number, the same on both sides."""

    patterns: Groups

    def __call__(self, modules: Sequence[str]) -> Groups:
        there, found = set(modules), {}
        for original, parts in self.patterns.items():
            for number in _numbers(parts[0], modules):
                filled = tuple(part.replace("*", number) for part in parts)
                if there.issuperset(filled):
                    found[original.replace("*", number)] = filled
        return found


def by_table(table: Mapping[str, str | tuple[str, ...]]) -> Table:
    """A table in which a module that is one of diffusers' stands without parentheses."""
    return Table({n: (of,) if isinstance(of, str) else of for n, of in table.items()})


def is_named(module: str, *, target: str) -> bool:
    """Whether a target means a module: its whole name or a dotted suffix."""
    return re.fullmatch(rf"(?:.*\.)?{expression(target)}", module) is not None


def expression(target: str) -> str:
    """A target as a regular expression: `*` stands for one part of a name."""
    return re.escape(target).replace(r"\*", "[^.]+")


def _numbers(pattern: str, modules: Sequence[str]) -> list[str]:
    """What `*` may be, so that the pattern is one of the modules; once for a pattern without."""
    before, star, after = pattern.partition("*")
    if not star:
        return [""]
    middles = [
        module[len(before) : len(module) - len(after)]
        for module in modules
        if module.startswith(before) and module.endswith(after)
    ]
    return [middle for middle in middles if middle.isdecimal()]


def double_attention() -> dict[str, str | tuple[str, ...]]:
    """The attention of FLUX's double blocks: pictures and text beside one another."""
    to_block = "transformer_blocks.*.attn"
    return {
        "double_blocks.*.img_attn.qkv": tuple(f"{to_block}.to_{part}" for part in "qkv"),
        "double_blocks.*.txt_attn.qkv": tuple(f"{to_block}.add_{part}_proj" for part in "qkv"),
        "double_blocks.*.img_attn.proj": f"{to_block}.to_out.0",
        "double_blocks.*.txt_attn.proj": f"{to_block}.to_add_out",
    }


def embedders(stem: str, **originals: str) -> dict[str, str]:
    """The two layers each of what FLUX embeds beside the pictures: time, guidance, a vector."""
    named = {**originals, "guidance": "guidance"}
    return {
        f"{original}_in.{layer}_layer": f"{stem}.{name}_embedder.linear_{number}"
        for original, name in named.items()
        for number, layer in ((1, "in"), (2, "out"))
    }
