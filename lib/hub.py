"""A base and its components: where they lie and what they are (design 3 and 7).

A base is a Hub id with a revision, a local diffusers folder, or `tiny`. Identities come from
weights and configurations; once learnt they are remembered, so that a warm run needs no file.
Whether a base fits a family is asked in `lib.fitting`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import files, hub_download
from lib.errors import InputRefused, Problem
from lib.family import Family
from lib.files import user_path
from lib.keys import Key, digest
from lib.memory import Memory
from lib.quiet import without_library_bars
from lib.recipes import component_identity
from lib.schema import TINY, FamilyConfig

INDEX = "model_index.json"


@dataclass(frozen=True)
class Component:
    """One model or tokenizer of a base; `weights` maps file names to their SHA-256."""

    class_name: str
    config: Mapping[str, Any]
    weights: Mapping[str, str]

    @property
    def identity(self) -> Key:
        return component_identity(
            class_name=self.class_name, config=self.config, weights=list(self.weights.values())
        )


class Base:
    """A resolved base. `root` is its folder; for the Hub, the snapshot of the pinned commit."""

    built = True

    def __init__(self, reference: str, *, root: Path, name: str, memory: Memory):
        self.reference = reference
        self.root = root
        self.name = name
        self.memory = memory

    @property
    def remote(self) -> tuple[str, str] | None:
        """(Hub id, commit), or None for a local folder."""
        kind, _, rest = self.name.partition(":")
        repo, _, commit = rest.partition("@")
        return (repo, commit) if kind == "hub" else None

    def index(self) -> Mapping[str, Any]:
        """model_index.json: the pipeline's class and each component's."""
        return json.loads((self.root / INDEX).read_text(encoding="utf-8"))

    @property
    def settings(self) -> Mapping[str, Any]:
        """The pipeline's own configuration: what its index holds beside the components."""
        return {
            name: value
            for name, value in self.index().items()
            if not name.startswith("_") and not _names_a_class(value)
        }

    def component(self, name: str) -> Component:
        """A component by its files; what is absent, by what was last recorded of it."""
        remembered = self.memory.last(f"{self.name}/{name}")
        if self.remote and remembered:
            return Component(**remembered)  # a commit never changes
        if self.remote:
            found = hub_download.listing(*self.remote, component=name)
            configs, weights = found.folder / name, dict(found.digests)
        else:
            configs, weights = self.root / name, {}
        config_path = _config_path(configs)
        if config_path is None:
            if remembered:
                return Component(**remembered)
            raise _missing(self, name, "config.json")
        component = Component(
            class_name=class_name(self.index(), name),
            config=json.loads(config_path.read_text(encoding="utf-8")),
            weights=weights or self._local_weights(name, remembered),
        )
        self._remember(name, config_path, component)
        return component

    def outline(self, name: str) -> Component:
        """A component's class and configuration; no weight is read, fetched or remembered."""
        if self.remote:
            path = hub_download.configuration(*self.remote, component=name)
        else:
            path = _config_path(self.root / name)
        if path is None:
            raise _missing(self, name, "config.json")
        config = json.loads(path.read_text(encoding="utf-8"))
        return Component(class_name(self.index(), name), config=config, weights={})

    def identity(self, name: str) -> str:
        return self.component(name).identity.digest

    def folder(self, name: str) -> Path:
        """The component's folder with all its files; what is absent comes from the Hub."""
        folder = self.root / name
        if self.remote and self._absent(name):
            folder = hub_download.component(*self.remote, component=name) / name
        if absent := self._absent(name):
            raise _missing(self, name, absent[0])
        return folder

    def numbers(self, name: str, *wanted: str) -> dict[str, list[float]]:
        """Small tensors of a component, flat; read once, then remembered for these weights."""
        known = f"{self.name}/{name}/{self.identity(name)}"
        found = dict(self.memory.last(known) or {})
        if not set(wanted) <= found.keys():
            for path in sorted(self.folder(name).glob("*.safetensors")):
                found |= _read_numbers(path, wanted)
                self.memory.remember(known, path, found)
        return {tensor: found[tensor] for tensor in wanted}

    def tensor_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Shapes of a component's tensors by its files' headers; nothing where a file is absent."""
        if self._absent(name):
            return {}
        files = self.component(name).weights
        return {k: s for file in files for k, s in _shapes(self.root / name / file).items()}

    def weight_bytes(self, name: str) -> int:
        """What a component's files take on the disk."""
        return sum((self.root / name / f).stat().st_size for f in self.component(name).weights)

    def _absent(self, name: str) -> list[str]:
        weights = self.component(name).weights
        return [file for file in weights if not (self.root / name / file).is_file()]

    def _local_weights(self, name: str, remembered: Mapping[str, Any] | None) -> dict[str, str]:
        listed = hub_download.weight_files(self.root / name) or sorted(
            (remembered or {}).get("weights", ())
        )
        if not listed and not _is_configuration_only(name):
            raise _missing(self, name, "*.safetensors")
        paths = {file: self.root / name / file for file in listed}
        return {file: self._digest(name, path) for file, path in paths.items()}

    def _digest(self, component: str, path: Path) -> str:
        try:
            return self.memory.digest_of(path, name=f"file:{path.resolve()}")
        except FileNotFoundError as error:
            raise _missing(self, component, path.name) from error

    def _remember(self, name: str, path: Path, component: Component) -> None:
        value = {
            "class_name": component.class_name,
            "config": component.config,
            "weights": component.weights,
        }
        if self.memory.last(f"{self.name}/{name}") != value:
            self.memory.remember(f"{self.name}/{name}", path, value)


class UnbuiltTiny(Base):
    """The tiny base before it is built: configurations from its recipe, no identity yet."""

    built = False

    def __init__(self, family: Family, *, root: Path, memory: Memory):
        super().__init__(TINY, root=root, name=f"file:{root.resolve()}", memory=memory)
        self._family = family

    @property
    def settings(self) -> Mapping[str, Any]:
        return self._family.TINY.get("pipeline", {})

    def component(self, name: str) -> Component:
        config = self._family.TINY.get(name, {})
        return Component(self._family.FACTS.classes[name].split("|")[0], config=config, weights={})

    def outline(self, name: str) -> Component:
        return self.component(name)

    def build(self) -> Base:
        """Save it once, under its recipe's digest; another process may be first."""
        if not self.root.exists():
            files.make_folder(self.root.parent)
            with files.staged_folder(self.root) as folder, without_library_bars():
                self._family.build_tiny(folder)
        return Base(TINY, root=self.root, name=self.name, memory=self.memory)


def open_base(config: FamilyConfig, *, family: Family, store: Path, memory: Memory) -> Base:
    """Resolve `family.base`; from the Hub this fetches its index, and nothing else."""
    if config.base == TINY:
        root = store / "bases" / f"{family.FACTS.name}-{digest(family.TINY)}"
        unbuilt = UnbuiltTiny(family, root=root, memory=memory)
        return unbuilt.build() if root.exists() else unbuilt
    folder = user_path(config.base)
    if folder.is_dir():
        return Base(config.base, root=folder, name=f"file:{folder.resolve()}", memory=memory)
    if _looks_like_path(config.base):
        raise InputRefused(
            Problem(
                f"family.base={config.base}",
                "is one file, not a pipeline" if folder.is_file() else "no such folder",
                "a Hub id, a folder made by save_pretrained, or tiny",
            )
        )
    snapshot = hub_download.index(config.base, revision=config.revision)
    name = f"hub:{config.base}@{snapshot.name}"
    return Base(config.base, root=snapshot, name=name, memory=memory)


def on_hub(base: str) -> bool:
    """Whether `family.base` can only be a Hub id."""
    return base != TINY and not user_path(base).is_dir() and not _looks_like_path(base)


def _config_path(folder: Path) -> Path | None:
    names = ("config.json", "tokenizer_config.json", "scheduler_config.json")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _read_numbers(path: Path, wanted: Sequence[str]) -> dict[str, list[float]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        there = set(file.keys()) & set(wanted)
        return {name: file.get_tensor(name).double().flatten().tolist() for name in there}


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # it is no mapping


def _names_a_class(value: Any) -> bool:
    """An index's entry of a component: the library and the class."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[1], str | None)


def _is_configuration_only(name: str) -> bool:
    return name == "scheduler"


def class_name(index: Mapping[str, Any], component: str) -> str:
    """The class that a pipeline's index names for a component."""
    entry = index.get(component) or [None, None]
    return str(entry[1])


def _looks_like_path(base: str) -> bool:
    return base.startswith((".", "/", "~")) or base.count("/") != 1


def _missing(base: Base, component: str, file: str) -> InputRefused:
    return InputRefused(
        Problem(
            f"family.base={base.reference}",
            f"{component}/{file} is missing",
            remedy="restore the file, or save the pipeline again",
        )
    )
