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

    def __init__(self, step: Callable[[], None], device: torch.device) -> None:
        stream, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        beside.wait_stream(stream)
        with torch.cuda.stream(beside):
            step()
        stream.wait_stream(beside)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=beside):
            step()

    def replay(self) -> None:
        self._graph.replay()
