"""A decode step captured as a CUDA graph: the device repeats all its kernels on the same tensors after one launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


class StepGraph:
    """A captured step.

    Args:
        step: a function of tensors that stay where they are; it may not wait for the device. Making the graph runs it
            once, so that libraries prepare themselves outside the capture, and once to see that it does not wait.
        restore: puts the step's tensors back between these two; after them, and after a failure, the caller does.

    Raises what the step raises, a RuntimeError when it waits for the device; the current stream is then as before.
    """

    def __init__(self, step: Callable[[], None], device: torch.device, restore: Callable[[], None]) -> None:
        stream, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        _run_beside(stream, beside, step)
        restore()
        with _waits_refused():
            _run_beside(stream, beside, step)
        self._graph = torch.cuda.CUDAGraph()
        failure: Exception | None = None
        try:
            with torch.cuda.graph(self._graph, stream=beside):
                try:
                    step()
                except Exception as error:  # the end of a capture that the step broke fails too, with another message
                    failure = error
        except RuntimeError:
            if failure is None:
                raise
        finally:
            torch.cuda.set_stream(stream)  # torch does not when the end of a capture fails
        if failure is not None:
            raise failure

    def replay(self) -> None:
        self._graph.replay()


def _run_beside(stream: torch.cuda.Stream, beside: torch.cuda.Stream, step: Callable[[], None]) -> None:
    """Run the step on the stream `beside`, between the work of `stream` so far and its next work."""
    beside.wait_stream(stream)
    try:
        with torch.cuda.stream(beside):
            step()
    finally:
        stream.wait_stream(beside)


@contextlib.contextmanager
def _waits_refused() -> Iterator[None]:
    """Inside the block, an operation that waits for the device raises RuntimeError, as far as torch notices it."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
