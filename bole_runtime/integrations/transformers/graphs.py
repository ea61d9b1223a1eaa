"""Functions over tensors that stay where they are, recorded in CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Recorder:
    """Whether calls are recorded, for all of one decoder; once one cannot be, none is any more.

    Args:
        enabled: record, on a CUDA device.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        #: Memory of all graphs: they run one after the other, and nothing that one made is read after the next.
        self.pool: Any = None

    def refuse(self, error: Exception) -> None:
        """Record nothing any more, and say why."""
        self.enabled = False
        warnings.warn(
            f"the model cannot be recorded in a CUDA graph ({str(error).splitlines()[0]}); decoding goes on without",
            RuntimeWarning,
            stacklevel=2,
        )


class Recorded(Generic[T]):
    """A function without arguments over fixed tensors: the first call runs it, the second records it, others replay.

    The first call compiles and loads kernels, and makes what is made once.

    Args:
        function: reads nothing on the host that changes from call to call, and nothing of the device.
        recorder: of the decoder.
        undo: called when recording failed in the middle of the function, none of which has run then.
    """

    def __init__(self, function: Callable[[], T], recorder: Recorder, undo: Callable[[], None] | None = None) -> None:
        self._function, self._recorder, self._undo = function, recorder, undo
        self._ran = False
        self._graph: Any = None
        self._made: T | None = None

    def __call__(self) -> T:
        """Return what the function returns; of a graph, tensors that the next call writes anew."""
        if self._graph is None:
            if not self._recorder.enabled or not self._ran:
                self._ran = True
                return self._function()
            try:
                self._record()
            except RuntimeError as error:
                if self._undo is not None:
                    self._undo()
                self._recorder.refuse(error)
                return self._function()
        self._graph.replay()
        assert self._made is not None
        return self._made

    def _record(self) -> None:
        graph = torch.cuda.CUDAGraph()
        if self._recorder.pool is None:
            self._recorder.pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._recorder.pool):
            made = self._function()
        self._graph, self._made = graph, made
