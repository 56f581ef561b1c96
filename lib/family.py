"""The whole contract of a model family; a module of `lib.families` fulfils it, nothing inherits.

Training knows no family: latents are b c h w, noise levels float32, and `predict` hides packing,
frame axes, time direction and sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lib import shapes

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from lib.footprint import Costs
    from lib.hub import Base
    from lib.naming import Names
    from lib.noise import NoiseProcess

Record = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class Posterior:
    """The autoencoder's distribution over raw latents: float32, unnormalised."""

    mean: shapes.RawLatents
    std: shapes.RawLatents


@dataclass(frozen=True)
class Frame:
    """How a picture was cut, in pixels (height, width): what SDXL is told beside the caption."""

    original: tuple[int, int]  # upright, before the resize
    crop: tuple[int, int]  # top, left in the resized picture, after the flip
    size: tuple[int, int]  # the bucket


@dataclass(frozen=True)
class Conditioning(Mapping[str, "torch.Tensor"]):
    """All that the denoiser takes beside latents and level: named tensors, batch first."""

    tensors: Mapping[str, torch.Tensor]
    lengths: tuple[int, ...] = ()  # text tokens of each row, for a family whose text is padded

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def in_few_lengths(self) -> Conditioning:
        """For training: masked texts padded to one of few lengths."""
        from lib import texts

        return replace(self, tensors=texts.in_few_lengths(self.tensors))

    def to(self, device: Any) -> Conditioning:
        moved = {n: t.to(device, non_blocking=True) for n, t in self.tensors.items()}
        return Conditioning(moved, self.lengths)


@dataclass(frozen=True)
class Schedule:
    """Where a sampler steps through: descending, without the last 0."""

    sigmas: tuple[float, ...]
    levels: tuple[float, ...]  # what `predict` is given there; of a flow the sigmas themselves
    scale: float = 1.0  # the noise is multiplied by it before the first step


@dataclass(frozen=True)
class Facts:
    """What a family is, known without loading anything."""

    name: str
    pipelines: tuple[str, ...]
    classes: Mapping[str, str]  # component -> class in model_index.json; a|b where several do
    text_components: tuple[str, ...]
    autoencoder: str
    denoiser: str
    divisor: int  # bucket sides are multiples of it, in pixels
    encode_routine: str  # name/version; enters latent keys
    caption_rule: Mapping[str, Any]  # template, positions, mask, unconditional; enters caption keys
    max_text_tokens: int
    draws_mode: bool  # latents are the posterior's mode instead of a sample
    noise: type[NoiseProcess]
    costs: Costs  # of memory in training
    reference: str  # the dense base on the Hub
    diffusers: str  # the release that brought its pipeline
    latent_dtypes: tuple[str, ...] = ("fp32", "bf16")  # what the autoencoder encodes well in
    min_text_tokens: int = 1
    caption_settings: tuple[str, ...] = ()  # settings of the pipeline that enter caption keys
    # Layers under one parent that are fed the same tensor, in the order of their calls.
    shared_inputs: tuple[tuple[str, ...], ...] = ()
    # Precisions that `auto` may take: those seen to train as bf16 does (bench/results).
    auto_modes: tuple[str, ...] = ("bf16", "int8", "nf4")
    license: str = ""  # of the reference, by the Hub's names; "" where it has one of its own

    @property
    def fixed_texts(self) -> bool:
        """Whether all captions are of one length."""
        return self.caption_rule["positions"] == "all"

    @property
    def masked_texts(self) -> bool:
        """Whether captions are padded to one another, behind a mask."""
        return self.caption_rule["mask"] is not None


@runtime_checkable
class Family(Protocol):
    """Functions of one module in `lib.families`."""

    FACTS: Facts
    NAMES: Names  # of its denoiser's modules in other tools
    TINY: Mapping[str, Any]  # recipe of the tiny base: component -> configuration

    def build_tiny(self, folder: Path) -> None:
        """Save the tiny base, random weights in the real classes, as a pipeline folder."""
        ...

    def load_text_encoders(self, base: Base, *, dtype: torch.dtype, device: Any) -> Any: ...

    def encode_captions(
        self, encoders: Any, captions: Sequence[str], *, max_length: int
    ) -> list[dict[str, torch.Tensor]]:
        """One record a caption, in the form in which the pipeline feeds the denoiser.

        Left on the encoders' device, whose work is not waited for.
        """
        ...

    def encode_unconditional(
        self, encoders: Any, *, max_length: int
    ) -> dict[str, torch.Tensor]: ...

    def caption_shapes(
        self, configs: Mapping[str, Mapping[str, Any]], *, max_length: int
    ) -> dict[str, tuple[int, ...]]:
        """The longest record's shapes, for plans, from the components' configurations and the
        pipeline's own under `pipeline`.
        """
        ...

    def load_autoencoder(self, base: Base, *, dtype: torch.dtype, device: Any) -> Any: ...

    def encode_images(self, autoencoder: Any, pixels: shapes.Pixels) -> Posterior:
        """The posterior, left on the autoencoder's device."""
        ...

    def latent_shape(
        self, config: Mapping[str, Any], *, height: int, width: int
    ) -> tuple[int, int, int]:
        """Channels, height and width of the raw latents of a picture."""
        ...

    def latent_constants(self, base: Base) -> dict[str, Any]:
        """What `normalise` needs of the base's autoencoder, as plain numbers."""
        ...

    def normalise(
        self, raw_latents: shapes.RawLatents, constants: Mapping[str, Any]
    ) -> shapes.Latents: ...

    def denormalise(
        self, latents: shapes.Latents, constants: Mapping[str, Any]
    ) -> shapes.RawLatents:
        """The inverse of `normalise`."""
        ...

    def decode_latents(self, autoencoder: Any, raw_latents: shapes.RawLatents) -> shapes.Pixels: ...

    def distillation(self, base: Base) -> str | None:
        """The sign by which this base is one distilled to few steps, which training undoes."""
        ...

    def load_denoiser(self, base: Base, *, dtype: torch.dtype, device: Any) -> Any: ...

    def conditioning(self, records: Sequence[Record], frames: Sequence[Frame]) -> Conditioning:
        """A batch's conditioning from its samples' caption records and cuts."""
        ...

    def predict(
        self,
        denoiser: Any,
        noisy: shapes.Latents,
        level: shapes.Sigma,
        *,
        conditioning: Conditioning,
        guidance: float,
    ) -> shapes.Prediction:
        """The prediction that the family's noise process declares, in canonical layout."""
        ...

    def sampling_schedule(
        self, steps: int, *, latent_size: tuple[int, int], base: Base
    ) -> Schedule:
        """The schedule of the family's pipeline; `latent_size` is that of the raw latents."""
        ...

    def guides(self, scale: float, *, base: Base) -> bool:
        """Whether this scale asks for a second prediction, of the unconditional record."""
        ...

    def guide(
        self, conditional: shapes.Prediction, unconditional: shapes.Prediction, *, scale: float
    ) -> shapes.Prediction:
        """Both predictions as one, in float32."""
        ...


def process_of(family: Family, base: Base) -> NoiseProcess:
    """The family's noise process, as the base's scheduler configures it."""
    return family.FACTS.noise.of(base.component("scheduler").config)
