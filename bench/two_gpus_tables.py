"""The tables of `bench.two_gpus`, from what its commands left: events, entries, logs."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from bench.two_gpus_commands import Command, recorded

LOSS_STEPS = 20
WARM = 3  # steps that are not timed


def run_folder(scratch: Path, name: str) -> Path:
    return scratch / "outputs" / name


def events(folder: Path) -> list[dict]:
    path = folder / "events.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = text.splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_of(folder: Path) -> dict[int, dict]:
    """The metrics after each step; of a step that was run twice, as it ran last."""
    return {e["step"]: e for e in events(folder) if e["kind"] == "metric" and "loss" in e}


def last_step(folder: Path) -> int:
    return max(steps_of(folder), default=0)


def tables(scratch: Path, stores: Path) -> Iterator[str]:
    """Everything that is there to be told."""
    commands = recorded(scratch / "logs")
    for part in (_sums(commands), _caches(commands, stores), _losses(scratch)):
        yield from part
    yield from _speeds(scratch)
    yield from _kills(commands, scratch)
    yield from _commands(commands)


def _sums(commands: dict[str, Command]) -> Iterator[str]:
    if "sum" not in commands:
        return
    lines = [line for _, line in commands["sum"].lines]
    ways = sorted({line.rpartition(" via ")[2] for line in lines if " via " in line})
    found = next((line for line in lines if "SUM {" in line), "nothing")
    yield f"sum over two processes: {found.partition('SUM ')[2]}; NCCL via {', '.join(ways) or '-'}"


def _times(store: Path, kind: str) -> list[float]:
    """When each entry of a store was written, in order."""
    return sorted(path.stat().st_mtime for path in store.glob(f"{kind}/??/*.safetensors"))


def _rates(times: list[float]) -> tuple[float, float]:
    """Entries a second between the first and the last, and in the quickest half of them.

    Processes begin and end seconds apart; in that half all of them are at work.
    """
    half = len(times) // 2
    quickest = min(after - before for before, after in zip(times, times[half:], strict=False))
    whole = times[-1] - times[0]
    return (len(times) - 1) / whole if whole else 0.0, half / quickest if quickest else 0.0


def _caches(commands: dict[str, Command], stores: Path) -> Iterator[str]:
    """By when the entries were written, and by the stage's own lines."""
    yield "\n| cache | cards | entries | entries/s, first to last | quickest half | stage, s |"
    yield "|---|---|---|---|---|---|"
    for kind, stage in (("captions", "encode_captions"), ("latents", "build_latent_cache")):
        rates = []
        for cards, name in ((1, "one"), (2, "two")):
            times = _times(stores / name, kind)
            if len(times) < 2 or f"{kind}-{name}" not in commands:
                continue
            command = commands[f"{kind}-{name}"]
            began, ended = command.at(f"{stage}: start"), command.at(f"{stage}: made")
            stage_seconds = f"{ended - began:.1f}" if began and ended else "-"
            rates.append(_rates(times))
            whole, quickest = rates[-1]
            shown = f"{len(times)} | {whole:.1f} | {quickest:.1f} | {stage_seconds}"
            yield f"| {kind} | {cards} | {shown} |"
        if len(rates) == 2:
            ratios = [two / one if one else 0.0 for one, two in zip(*rates, strict=True)]
            yield f"| {kind} | ratio | | {ratios[0]:.2f} | {ratios[1]:.2f} | |"


def _losses(scratch: Path) -> Iterator[str]:
    """The largest relative differences of losses, step by step."""
    one = steps_of(run_folder(scratch, "one-4"))
    yield "\n| beside one card, batch 4 | steps | largest relative difference of losses | mean |"
    yield "|---|---|---|---|"
    for name in ("two-4", "killed"):
        other = steps_of(run_folder(scratch, name))
        for count in (LOSS_STEPS, len(one)):
            both = [step for step in range(1, count + 1) if step in one and step in other]
            apart = [abs(other[s]["loss"] / one[s]["loss"] - 1) for s in both]
            if apart:
                worst, mean = max(apart), statistics.mean(apart)
                yield f"| {name} | {len(both)} | {worst:.1e} | {mean:.1e} |"
    for name in ("one-4", "two-4", "killed"):
        found = steps_of(run_folder(scratch, name))
        yield f"{name}: " + " ".join(f"{found[step]['loss']:.5f}" for step in sorted(found))


def _speed(folder: Path) -> tuple[float, float]:
    """The rate of the last step's event, and the median milliseconds of a warm step."""
    found = steps_of(folder)
    last = found[max(found)]
    times = [found[step]["time"] for step in sorted(found)]
    gaps = [after - before for before, after in zip(times[WARM:-1], times[WARM + 1 :], strict=True)]
    return last.get("samples_per_second", 0.0), 1000 * statistics.median(gaps)


def _speeds(scratch: Path) -> Iterator[str]:
    yield "\n| pictures a card | cards | batch | samples/s | ms a step, median | samples/s by it |"
    yield "|---|---|---|---|---|---|"
    for each, one, two in ((1, "one-1", "two-2"), (4, "one-4", "two-8"), (2, None, "two-4")):
        rates = []
        for cards, name in ((1, one), (2, two)):
            if name is None or len(steps_of(run_folder(scratch, name))) < WARM + 3:
                continue
            rate, milliseconds = _speed(run_folder(scratch, name))
            rates.append((rate, 1000 * each * cards / milliseconds))
            shown = f"{rate:.2f} | {milliseconds:.0f} | {rates[-1][1]:.2f}"
            yield f"| {each} | {cards} | {each * cards} | {shown} |"
        if len(rates) == 2:
            ratios = [two / one if one else 0.0 for one, two in zip(*rates, strict=True)]
            yield f"| {each} | ratio | | {ratios[0]:.3f} | | {ratios[1]:.3f} |"


def _kills(commands: dict[str, Command], scratch: Path) -> Iterator[str]:
    folder = run_folder(scratch, "killed")
    resumes = [e for e in events(folder) if e["kind"] == "decision" and e["name"] == "resume"]
    warnings = [e["text"] for e in events(folder) if e["kind"] == "warning"]
    if "killed-two" not in commands:
        return
    lost = commands["killed-two"]
    yield f"\nrank 1 killed: the command ended {lost.after_kill:.1f} s later, code {lost.code}"
    yield f"resumed from steps {[e['value'] for e in resumes]}; last step {last_step(folder)}"
    yield f"warnings: {warnings or 'none'}"
    yield "what it said then:"
    killed_at = lost.killed_at or 0.0
    yield from (
        f"    {when - killed_at:6.2f} {line}" for when, line in lost.lines if when > killed_at
    )


def _commands(commands: dict[str, Command]) -> Iterator[str]:
    yield "\n| command | processes | code | s |"
    yield "|---|---|---|---|"
    for name, command in commands.items():
        code = "too late" if command.late else command.code
        yield f"| {name} | {command.processes} | {code} | {command.seconds:.1f} |"
