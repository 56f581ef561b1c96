"""Commands of one or two processes for `bench.two_gpus`: started, watched, killed, recorded."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.02
MARK = "TWO_GPUS_COMMAND"  # in the environment of all that a command starts


@dataclass
class Command:
    """One command as it went; lines carry the seconds since it began, codes are as in Popen."""

    name: str
    processes: int
    code: int | None = None
    seconds: float = 0.0
    late: bool = False  # ended by us, since it took too long
    killed_at: float | None = None
    lines: list[tuple[float, str]] = field(default_factory=list)

    @property
    def after_kill(self) -> float:
        """Seconds from the kill to the command's end."""
        return self.seconds - (self.killed_at or self.seconds)

    def at(self, *words: str) -> float | None:
        """When the first line that holds all the words came."""
        return next((when for when, line in self.lines if all(w in line for w in words)), None)

    def tail(self, count: int) -> list[str]:
        return [line for _, line in self.lines[-count:]]


def run(
    name: str,
    module: str,
    overrides: Sequence[str] = (),
    *,
    processes: int,
    logs: Path,
    seconds: float,
    kill_when: Callable[[], bool] | None = None,
    rank: int | None = None,
    environment: dict[str, str] | None = None,
) -> Command:
    """Run a module as a user does; it is killed once `kill_when` says so, or when it is late.

    `rank` is the process to kill then; None: all of them.
    """
    launch = [sys.executable, "-m"]
    if processes > 1:
        shape = ("--nproc-per-node", str(processes), "--master-port", str(_free_port()))
        launch += ["torch.distributed.run", *shape, "-m"]
    command = [*launch, module, *overrides]
    print(f"\n{name}: {' '.join(command[1:])}", flush=True)
    mark = uuid.uuid4().hex
    own = {MARK: mark, **({"CUDA_VISIBLE_DEVICES": "0"} if processes == 1 else {})}
    child = subprocess.Popen(
        command,
        cwd=CHECKOUT,
        env={**os.environ, **own, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    found = Command(name, processes)
    began = time.monotonic()
    reader = threading.Thread(target=_read, args=(child, found, began), daemon=True)
    reader.start()
    while child.poll() is None:
        passed = time.monotonic() - began
        if passed > seconds:
            found.late = True
            kill_all(mark)
        elif kill_when and found.killed_at is None and kill_when():
            found.killed_at = passed
            if rank is None:
                kill_all(mark)
            else:
                os.kill(_worker(mark, rank), signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    found.code, found.seconds = child.returncode, time.monotonic() - began
    kill_all(mark)  # whoever outlived the launcher
    reader.join(5.0)
    _record(found, logs)
    return found


def _record(found: Command, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{when:8.2f} {line}\n" for when, line in found.lines)
    (logs / f"{found.name}.log").write_text(text, encoding="utf-8")
    (logs / f"{found.name}.json").write_text(json.dumps(asdict(found)), encoding="utf-8")
    ending = "too late" if found.late else f"code {found.code}"
    print(f"{found.name}: {ending} after {found.seconds:.1f} s", flush=True)
    as_asked = found.code == 0 or (found.killed_at is not None and not found.late)
    for line in found.tail(3 if as_asked else 60):
        print(f"  | {line}", flush=True)


def recorded(logs: Path) -> dict[str, Command]:
    """All commands of this scratch folder, those of earlier starts too."""
    found = {}
    for path in logs.glob("*.json"):
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["lines"] = [(when, line) for when, line in fields["lines"]]
        found[path.stem] = Command(**fields)
    return found


def _read(child: subprocess.Popen[str], found: Command, began: float) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        found.lines.append((round(time.monotonic() - began, 2), line.rstrip()))


def kill_all(mark: str) -> None:
    """A command and all that it started; torchrun puts workers into sessions of their own."""
    for pid, _ in _marked(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _worker(mark: str, rank: int) -> int:
    """The worker that has this rank."""
    for pid, environment in _marked(mark):
        if f"RANK={rank}".encode() in environment:
            return pid
    raise LookupError(f"no worker has rank {rank}")


def _marked(mark: str) -> Iterator[tuple[int, list[bytes]]]:
    """Processes by the mark in their environment, and that environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            environment = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if f"{MARK}={mark}".encode() in environment:
            yield int(path.parent.name), environment


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
