"""A decode step captured as a CUDA graph: the device repeats all its kernels on the same tensors after one launch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from kvbench.console import faults


class CaptureError(RuntimeError):
    """A decode step runs, but cannot be captured in a CUDA graph or compiled as one program."""


class StepGraph:
    """A decode step captured in a CUDA graph.

    Args:
        step: a function of tensors that are never reallocated; it may not wait for the device. Before the capture it
            runs twice: once so that libraries prepare themselves, and once to check that it does not wait.
        restore: resets the step's tensors after the first of these two runs. After the second run, and after a failure,
            the caller must reset them.

    Raises CaptureError when the step waits for the device or does anything else that a capture forbids; the current
    stream is then as before. All other failures of the step are raised as they are.
    """

    def __init__(self, step: Callable[[], None], device: torch.device, restore: Callable[[], object]) -> None:
        stream, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        _run_beside(stream, beside, step)
        restore()
        with _failures_of_capture(), _waits_refused():
            _run_beside(stream, beside, step)
        self._graph = torch.cuda.CUDAGraph()
        try:
            with _failures_of_capture():
                self._capture(step, beside)
        finally:
            torch.cuda.set_stream(stream)  # torch does not restore the stream when the end of a capture fails

    def _capture(self, step: Callable[[], None], stream: torch.cuda.Stream) -> None:
        failure: Exception | None = None
        try:
            with torch.cuda.graph(self._graph, stream=stream):
                try:
                    step()
                except Exception as error:  # raised below: torch's own error at the end of a broken capture hides it
                    failure = error
        except RuntimeError:
            if failure is None:
                raise
        if failure is not None:
            raise failure

    def replay(self) -> None:
        self._graph.replay()


def _run_beside(stream: torch.cuda.Stream, beside: torch.cuda.Stream, step: Callable[[], None]) -> None:
    """Run the step on the stream `beside`, after all earlier work on `stream` and before all later work on it."""
    beside.wait_stream(stream)
    try:
        with torch.cuda.stream(beside):
            step()
    finally:
        stream.wait_stream(beside)


@contextlib.contextmanager
def _failures_of_capture() -> Iterator[None]:
    """Raise CaptureError for a RuntimeError in the `with` block.

    The step ran without an error before, so the error comes from the capture or a forbidden wait. A failure of the
    device or of memory is raised unchanged, unless its message mentions a capture.
    """
    try:
        yield
    except RuntimeError as error:
        if faults.of_machine(error) and "captur" not in str(error).lower():
            raise
        raise CaptureError(faults.first_line(error)) from error


@contextlib.contextmanager
def _waits_refused() -> Iterator[None]:
    """Inside the `with` block, an operation that waits for the device raises RuntimeError if torch detects the wait."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
