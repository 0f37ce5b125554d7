"""What exceptions from elsewhere say, and which failures of memory and of devices they stand for. Those are named by
class and message, so that torch is not needed to ask; the causes of an exception count as well, because methods'
failures are wrapped.
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
    """Whether memory of the device or of the process did not suffice."""
    return any(_no_memory(each) for each in _causes(error))


def device_failed(error: BaseException) -> bool:
    """Whether the device itself failed, as by an ECC error, and nothing more can be done with it by this process."""
    return not out_of_memory(error) and any(
        type(each).__name__ == "AcceleratorError" or (isinstance(each, RuntimeError) and _says(each, _DEVICE))
        for each in _causes(error)
    )


def of_machine(error: BaseException) -> bool:
    """Whether the machine failed, not the code that ran on it."""
    return out_of_memory(error) or device_failed(error)


def first_line(error: BaseException) -> str:
    """The innermost cause in one line."""
    *_, cause = _causes(error)
    return (words(cause).strip().splitlines() or [type(cause).__name__])[0]


def words(error: BaseException) -> str:
    """What an exception says that kvbench did not write, without keys and passwords."""
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
