"""Recognises when an exception of another library means that memory ran out or that a device failed.

An exception is recognised by the name of its class and by its message, so that torch need not be imported. The chain of
its causes (`__cause__`) is examined too, because the exception may have been wrapped.
"""

from __future__ import annotations

from collections.abc import Iterator

_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "defaultcpuallocator",
    "std::bad_alloc",
    "alloc_failed",  # CUBLAS_STATUS_, CUDNN_STATUS_
)
_DEVICE = ("cuda error", "cudaerror", "cuda driver error", "hip error", "device-side assert")


def out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that the device or the process ran out of memory."""
    return any(_no_memory(each) for each in _causes(error))


def device_failed(error: BaseException) -> bool:
    """Return whether an exception means that the device failed, so that this process cannot use it again."""
    return not out_of_memory(error) and any(
        type(each).__name__ == "AcceleratorError" or (isinstance(each, RuntimeError) and _says(each, _DEVICE))
        for each in _causes(error)
    )


def of_machine(error: BaseException) -> bool:
    """Return whether an exception means that the machine failed: it ran out of memory, or its device failed."""
    return out_of_memory(error) or device_failed(error)


def first_line(error: BaseException) -> str:
    """Find the innermost cause of an exception, and return the first line of this cause's message. If the message is
    empty, return the name of the cause's class."""
    *_, cause = _causes(error)
    return (words(cause).strip().splitlines() or [type(cause).__name__])[0]


def words(error: BaseException) -> str:
    """Return the message of another library's exception, with recognisable keys and passwords hidden."""
    from kvbench.console.redact import redact_keys

    return redact_keys(str(error))


def _no_memory(error: BaseException) -> bool:
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and _says(error, _NO_MEMORY))


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(word in text for word in words)


def _causes(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__
