"""Device work recorded once and replayed: a CUDA graph for each shape of its input.

At batch 1 a GPU waits for Python to launch its kernels; a replay launches all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

MOST = 64  # graphs kept; work of more shapes runs as it is

Work = Callable[[Sequence[torch.Tensor]], None]


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]


@dataclass
class Replays:
    """Runs device work, from its second time on by replaying what the second time recorded.

    The first time is real work too: libraries make their workspaces and compilers their kernels.
    `refused` is told why a recording failed; from then on all work runs as it is.
    """

    device: torch.device
    enabled: bool = False
    refused: Callable[[str], None] = lambda _why: None
    _graphs: dict[Hashable, _Graph | None] = field(default_factory=dict)
    _pool: Any = None
    _own: Any = None

    @contextmanager
    def stream(self) -> Iterator[None]:
        """The stream that all of it runs on, after what was asked for before."""
        if self.device.type != "cuda":
            yield
            return
        if self._own is None:
            self._own = torch.cuda.Stream(self.device)
        outer = torch.cuda.current_stream(self.device)
        self._own.wait_stream(outer)
        with torch.cuda.stream(self._own):
            yield
        outer.wait_stream(self._own)

    def run(self, key: Hashable, work: Work, inputs: Sequence[torch.Tensor] = ()) -> None:
        """Do the work on these inputs; what it returns it leaves in tensors that stay."""
        if not self.enabled or (key not in self._graphs and len(self._graphs) >= MOST):
            work(inputs)
        elif key not in self._graphs:
            self._graphs[key] = None
            work(inputs)
        else:
            found = self._graphs[key] or self._recorded(key, work, inputs)
            if found is None:
                work(inputs)
                return
            if inputs:
                torch._foreach_copy_(found.inputs, list(inputs))
            found.graph.replay()

    def _recorded(self, key: Hashable, work: Work, inputs: Sequence[torch.Tensor]) -> _Graph | None:
        """The work as a graph; nothing of it has run yet."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # what the first time used is the graph's to take
        graph, held = torch.cuda.CUDAGraph(), [tensor.clone() for tensor in inputs]
        try:
            # Other threads draw previews and copy batches meanwhile: their calls are their own.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._own, capture_error_mode="thread_local"
            ):
                work(held)
        except RuntimeError as error:
            self.enabled = False
            self._graphs.clear()
            self.refused(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            return None
        self._pool = graph.pool()
        self._graphs[key] = _Graph(graph, held)
        return self._graphs[key]
