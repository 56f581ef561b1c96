"""An inspected adapter file as lines for a person; texts of strangers are shown, never obeyed."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lib.errors import without_credentials
from lib.foreign import Fault
from lib.inspecting import OURS, Inspected, Pair
from lib.likeness import Fit, Likely

SHOWN, LONGEST_TEXT = 4, 160
CHAIN = ("manifest_key", "captions_key", "latents_key", "denoiser_key", "train_key")
OF_OURS = (
    *("adapter", "family", "base", "revision", "rank", "alpha", "steps", "trigger", "resolution"),
    *CHAIN,
)
PRIVATE = (
    *(f"{OURS}{name}" for name in ("dataset", "instance_prompt")),
    *(f"ss_{name}" for name in ("dataset_dirs", "tag_frequency", "datasets", "output_name")),
    "ss_training_comment",
)
# Of the dozens that other trainers write: what was trained on what, how long, how fast.
OF_OTHERS = (
    *(f"ss_{name}" for name in ("base_model_version", "sd_model_name", "sd_model_hash")),
    *(f"ss_{name}" for name in ("network_module", "network_dim", "network_alpha")),
    *(f"ss_{name}" for name in ("steps", "max_train_steps", "epoch", "num_epochs")),
    *(f"ss_{name}" for name in ("num_train_images", "total_batch_size", "resolution", "seed")),
    *(f"ss_{name}" for name in ("learning_rate", "unet_lr", "lr_scheduler", "optimizer")),
    *(f"ss_{name}" for name in ("mixed_precision", "sd_scripts_commit_hash")),
    *(f"modelspec.{name}" for name in ("architecture", "prediction_type", "resolution", "date")),
)
PATHS = ("ss_sd_model_name",)  # of somebody's disk: their last part is enough


@dataclass(frozen=True)
class Findings:
    """A file, the family it seems to be for, and how it meets a base, if one was given."""

    found: Inspected
    likely: Likely
    family: str | None  # given by the user
    base: str = ""
    fit: Fit | None = None

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Of the file, of its family, of its meeting with the base."""
        other = ()
        if self.family and self.likely.families and self.family not in self.likely.families:
            other = (Fault(f"not for family={self.family}: for {_or(self.likely.families)}"),)
        return (*self.found.faults, *other, *(self.fit.faults if self.fit else ()))

    def lines(self, *, private: bool) -> Iterator[str]:
        """All there is to say; captions and names of folders only when asked for."""
        yield from _rows(self._summary())
        yield from _titled("changes", _table(self.found.pairs))
        yield from _titled("its header says", _told(self.found.file.metadata, private=private))
        yield from _titled("notes", map(_line, [*self.found.notes, *self._of_base()]))
        yield from _titled("wrong", map(_line, self.faults))
        count = len(self.faults)
        fits = f", and fits family.base={self.base}" if self.fit else ""
        wrong = "1 thing is wrong" if count == 1 else f"{count} things are wrong"
        yield wrong if count else f"sound{fits}"

    def _summary(self) -> Iterator[tuple[str, str]]:
        found, pairs = self.found, self.found.pairs
        yield "file", f"{found.file.path}, {found.file.size} bytes"
        guessed = _or(self.likely.families) or "unknown"
        yield "family", f"{guessed} (by {self.likely.by})" if self.likely.families else guessed
        yield "format", _or(found.spelt.formats) or "unknown"
        kinds = ", ".join(f"{count} {kind}" for kind, count in found.kinds.items())
        yield "modules", kinds or "none"
        if pairs:
            yield "rank", _counted(pair.rank for pair in pairs)
            alphas = [p.strength.alpha for p in pairs if p.strength.alpha is not None]
            yield "alpha", _counted(alphas) if alphas else "none"
            yield "scale", _counted(pair.strength.scale for pair in pairs)
        if found.dtypes:
            yield "dtype", ", ".join(sorted(found.dtypes))
        if self.fit:
            share = f"{self.fit.adapted} of its {self.fit.linear} linear modules"
            yield "base", f"{self.base}; the file adapts {share}"

    def _of_base(self) -> Iterator[Fault]:
        if self.fit and self.fit.left_alone:
            yield Fault("modules of the base like those adapted, left alone", self.fit.left_alone)


def _rows(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for title, text in rows:
        yield f"{title:<10}{printable(text)}"


def _titled(title: str, lines: Iterable[str]) -> Iterator[str]:
    """A heading and its lines, or nothing."""
    for place, line in enumerate(lines):
        if not place:
            yield title
        yield f"  {line}"


def _table(pairs: Sequence[Pair]) -> Iterator[str]:
    """How far each block's weights are moved: the mean Frobenius norm of its modules' changes."""
    if not pairs:
        return
    blocks: defaultdict[str, list[float]] = defaultdict(list)
    for pair in pairs:
        text = "text encoder " if pair.module.of_text else ""
        blocks[printable(text + pair.module.block)].append(pair.norm)
    width = max(map(len, [*blocks, "block"]))
    yield f"{'block':<{width}}  {'modules':>7}  {'mean |dW|':>10}  {'greatest':>10}"
    rows = [(name, blocks[name]) for name in sorted(blocks, key=_natural)]
    if len(rows) > 1:
        rows.append(("all", [norm for _, norms in rows for norm in norms]))
    for name, norms in rows:
        mean, most = math.fsum(norms) / len(norms), max(norms)
        yield f"{name:<{width}}  {len(norms):>7}  {mean:>10.4g}  {most:>10.4g}"


def _natural(name: str) -> list[tuple[int, str]]:
    """A key by which block 10 comes after block 9."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def _told(metadata: Mapping[str, str], *, private: bool) -> Iterator[str]:
    known = (*(f"{OURS}{name}" for name in OF_OURS), *OF_OTHERS, *(PRIVATE if private else ()))
    for name in known:
        if text := metadata.get(name):
            if name in PATHS:
                text = text.replace("\\", "/").rsplit("/", 1)[-1]
            yield f"{name.removeprefix(OURS)}: {printable(text)}"
    if not private and (hidden := [name for name in PRIVATE if name in metadata]):
        yield f"{', '.join(hidden)}: shown with export.prompts=true"


def _line(fault: Fault) -> str:
    names = [printable(name) for name in fault.names]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    count = f"{len(names)} " if len(names) > 1 else ""
    return printable(fault.what) + (f": {count}({', '.join(names[:SHOWN])}{more})" if names else "")


def _counted(values: Iterable[float]) -> str:
    """The values there are, the commonest first, each with how often where there are several."""
    counts = Counter(f"{value:g}" for value in values).most_common()
    if len(counts) == 1:
        return counts[0][0]
    more = f" and {len(counts) - SHOWN} more" if len(counts) > SHOWN else ""
    return ", ".join(f"{value} ({count})" for value, count in counts[:SHOWN]) + more


def _or(names: Sequence[str]) -> str:
    return " or ".join(names)


def printable(text: str) -> str:
    """A stranger's text on one line of a terminal: short, and nothing that moves a cursor."""
    text = without_credentials(text[: 4 * LONGEST_TEXT])
    clean = "".join(sign if sign.isprintable() else " " for sign in text)
    return clean if len(clean) <= LONGEST_TEXT else f"{clean[:LONGEST_TEXT]}..."
