"""What a command did, told at its end: found, made, where it lies, what was decided."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from lib.events import Event

PLACES = ("folder", "file")


@dataclass
class Summary:
    """A sink that keeps how each stage ended and the decisions taken."""

    status: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, str] = field(default_factory=dict)
    held_out: dict[str, str] = field(default_factory=dict)
    losses: list[tuple[int, float]] = field(default_factory=list)
    warnings: int = 0

    def __call__(self, event: Event) -> None:
        if event.kind == "phase" and event.data["status"] != "start":
            self.status[event.stage] = event.data["status"]
            for name in PLACES:
                if name in event.data:
                    self.places[event.stage] = event.data[name]
            held_out = {n: v for n, v in event.data.items() if n.startswith("held_out_loss")}
            self.held_out |= held_out
        elif event.kind == "decision":
            self.decisions[event.data["name"]] = str(event.data["value"])
        elif event.kind == "metric" and "loss" in event.data:
            self.losses.append((event.data["step"], event.data["loss"]))
        elif event.kind == "warning":
            self.warnings += 1

    def lines(self) -> Iterator[str]:
        """The summary, a line a topic."""
        for status, title in (("hit", "found"), ("done", "made")):
            stages = [stage for stage, found in self.status.items() if found == status]
            if stages:
                yield f"{title:<10}{', '.join(stages)}"
        for stage, place in self.places.items():
            yield f"{stage:<10}{place}"
            if stage == "train":
                yield f"{'loss':<10}{place}/loss.png"
        for name, change in self.held_out.items():
            yield f"{name:<18}{change}"
        if self.decisions:
            taken = "; ".join(f"{name} {value}" for name, value in self.decisions.items())
            yield f"{'decided':<10}{taken}"
        if self.warnings:
            yield f"{'warnings':<10}{self.warnings}, see above and events.jsonl"
