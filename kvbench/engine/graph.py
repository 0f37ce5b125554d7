"""A decode step captured as a CUDA graph: the device repeats all its kernels on the same tensors after one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch


class StepGraph:
    """A captured step.

    Args:
        step: a function of tensors that stay where they are; it may not wait for the device. Making the graph runs it
            once, so that libraries prepare themselves outside the capture; the caller then restores its tensors.
    """

    def __init__(self, step: Callable[[], None]) -> None:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            step()
        torch.cuda.current_stream().wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            step()

    def replay(self) -> None:
        self._graph.replay()
