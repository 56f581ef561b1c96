"""Several processes on one run: who we are, and what we tell one another (design 10).

`torchrun` starts them and names them in the environment. They share a run's gradients through a
process group, which exists only while that run trains; all before it they share through the store.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lib.errors import DarkroomError, Problem

PATIENCE = timedelta(hours=1)  # another's death is seen by torchrun; a long validation is no death
POLL_SECONDS = 0.0005


class MateLost(DarkroomError):
    """Another process of the run has ended; the run can be resumed."""

    exit_code = 75


@dataclass(frozen=True)
class Team:
    """This process's place among those of a run; one process is a team of its own."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this one writes and shows what all of them make."""
        return self.rank == 0

    def told(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Plain values that the first process makes, for every process; its refusal is for all."""
        if self.size == 1:
            return make()
        refusal: DarkroomError | None = None
        message: dict[str, Any] = {}
        if self.leads:
            try:
                message = {"made": make()}
            except DarkroomError as error:
                refusal, message = error, {"refused": error.exit_code}
        heard = json.loads(self._broadcast(json.dumps(message)))
        if refusal is not None:
            raise refusal
        if "refused" in heard:
            raise Followed(heard["refused"])
        return heard["made"]

    def summed(self, tensors: Sequence[Any]) -> list[Any]:
        """The sums over all processes, in one message; a GPU may still be at them (`settle`)."""
        import torch
        import torch.distributed as dist

        if self.size == 1:
            return list(tensors)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        work: Any = dist.all_reduce(flat, async_op=True)
        if flat.is_cuda:
            work.wait()  # the GPU does; we go on and hand it what comes after
        else:
            self._wait(work)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def settle(self, device: Any) -> None:
        """Wait for a GPU as `_wait` does: reading from it would, too, but hear no signal."""
        import torch

        if self.size == 1 or device.type != "cuda":
            return
        done = torch.cuda.Event()
        done.record()
        while not done.query():
            time.sleep(POLL_SECONDS)

    def meet(self) -> None:
        """Go on when every process is here."""
        import torch

        self.summed([torch.zeros(1)])

    def _broadcast(self, text: str) -> str:
        import torch
        import torch.distributed as dist

        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        length = torch.tensor([len(data)])
        self._wait(dist.broadcast(length, src=0, async_op=True))
        if not self.leads:
            data = torch.zeros(int(length), dtype=torch.uint8)
        self._wait(dist.broadcast(data, src=0, async_op=True))
        return bytes(data.tolist()).decode()

    def _wait(self, work: Any) -> None:
        """Wait so that a signal is heard meanwhile; a library's own wait would not hear it."""
        while not work.is_completed():
            time.sleep(POLL_SECONDS)
        try:
            work.wait()
        except RuntimeError as error:
            why, remedy = "ended in the middle of a step", "the same command resumes"
            raise MateLost(Problem("another process of this run", why, remedy=remedy)) from error


class Followed(DarkroomError):
    """The first process was refused and says why; this one ends with the same code, silently."""

    of_all = True

    def __init__(self, exit_code: int):
        super().__init__(Problem("this process", "follows the first, which was refused"))
        self.exit_code = exit_code


ALONE = Team()


def this_process() -> Team:
    """The place that the environment gives this process."""
    return Team(int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1))


def local_rank() -> int:
    """The place among the processes of this host, thus the GPU to use."""
    return int(os.environ.get("LOCAL_RANK") or 0)


@contextmanager
def gathered(team: Team) -> Iterator[None]:
    """A process group for the block: NCCL between GPUs, gloo for what is on the CPU."""
    if team.size == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    # Multicast over NVLink needs rights that containers often lack, and hangs without a word.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if on_gpu:
        torch.cuda.set_device(local_rank())
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=PATIENCE)
    failed = True
    try:
        yield
        failed = False
    finally:
        if failed and on_gpu:
            # To destroy it would be to wait for a sum in which a process that is gone has no part.
            everyone: Any = dist.group.WORLD
            everyone._get_backend(torch.device("cuda")).abort()
        else:
            dist.destroy_process_group()
