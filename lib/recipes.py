"""The recipe of every key: what each artifact is made of, and nothing else (design 3)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lib.images import RECIPE, Geometry, resize_filter
from lib.keys import Key, make_key

CAPTIONS_VERSION = 1
FEW_BITS_VERSION = 2  # of captions by encoders stored in few bits; 1 was by bitsandbytes alone
TRAIN_VERSION = 1
EXPORT_VERSION = 2
SAMPLE_VERSION = 1


def manifest_key(
    samples: Sequence[Mapping[str, Any]], *, split: Mapping[str, Any] | None = None
) -> Key:
    """The data set: each sample with its name, image key, upright size, captions, repeats and
    background; decode recipe, split.
    """
    return make_key("manifest", samples=samples, decode=RECIPE, split=split)


def captions_key(texts: Sequence[str]) -> Key:
    """The unique texts, sorted."""
    return make_key("captions", texts=texts)


def images_key(images: Sequence[Mapping[str, Any]], *, settings: Mapping[str, Any]) -> Key:
    """The pictures, what they are laid over, and how they are cut: bucket settings and the like."""
    return make_key("images", images=images, decode=RECIPE, resize=resize_filter, settings=settings)


def component_identity(
    *, class_name: str, config: Mapping[str, Any], weights: Sequence[str]
) -> Key:
    """A model or tokenizer by what it is: never by a repository's name or a file's time."""
    public = {name: value for name, value in config.items() if not name.startswith("_")}
    return make_key("component", class_name=class_name, config=public, weights=sorted(weights))


def caption_key(
    text: str | None,
    *,
    encoders: Mapping[str, str],
    rule: Mapping[str, Any],
    settings: Mapping[str, Any],
    max_length: int,
    dtype: str,
) -> Key:
    """One text's record; `None` is the family's unconditional record, whose kind is in `rule`."""
    what = {"unconditional": rule["unconditional"]} if text is None else {"text": text}
    return make_key(
        "caption",
        **what,
        encoders=encoders,
        rule={name: value for name, value in rule.items() if name != "unconditional"},
        settings=settings,
        max_length=max_length,
        dtype=dtype,
        version=CAPTIONS_VERSION,
    )


def latent_key(
    image_key: str, geometry: Geometry, *, autoencoder: str, dtype: str, routine: str
) -> Key:
    """One picture's posterior in one geometry; families that encode alike share the routine."""
    return make_key(
        "latent",
        image=image_key,
        decode=RECIPE,
        resize=resize_filter,
        geometry=asdict(geometry),
        autoencoder=autoencoder,
        dtype=dtype,
        routine=routine,
    )


def cache_key(stage: str, roles: Mapping[str, Sequence[str]]) -> Key:
    """A cache stage's manifest: its entry keys by role."""
    return make_key(stage, roles={role: sorted(set(keys)) for role, keys in roles.items()})


def train_key(**inputs: Any) -> Key:
    """One training run; see `lib.pipeline.train` for its fields."""
    return make_key("train", version=TRAIN_VERSION, **inputs)


def export_key(
    *, train: str, adapters: Sequence[str], format: str, dtype: str, prompts: bool
) -> Key:
    """A run's exported files: the adapter, and its average where there is one."""
    return make_key(
        "export",
        version=EXPORT_VERSION,
        train=train,
        adapters=adapters,
        format=format,
        dtype=dtype,
        prompts=prompts,
    )


def sample_key(**inputs: Any) -> Key:
    """One grid of samples; see `lib.pipeline.sample` for its fields."""
    return make_key("sample", version=SAMPLE_VERSION, **inputs)
