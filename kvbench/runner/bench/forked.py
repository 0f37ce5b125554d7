"""Runs a measurement on a CPU in a fork of this process, so that every measurement starts with the same state of the
allocator.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import TypeVar, cast

from kvbench.config import plugins
from kvbench.console import faults, signals
from kvbench.errors import KVBenchError, PluginError, SetupError

Result = TypeVar("Result")


def forked(work: Callable[[], Result]) -> Result:
    """Run `work` in a fork of this process, and return its result or raise its KVBenchError. Raises SetupError if
    memory runs out in the fork, and KVBenchError if the fork ends without a result."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        try:
            sender.send((work(), None))
        except KVBenchError as error:
            sender.send((None, error))
        except Exception as error:
            if faults.out_of_memory(error):
                cure = "Use fewer --sequences, or a smaller --shape."
                sender.send((None, SetupError(f"out of memory ({faults.first_line(error)}). {cure}")))
            elif (fault := plugins.failure(error)) is not None:
                sender.send((None, PluginError(fault)))
            else:
                raise

    process = context.Process(target=child)
    process.start()
    signals.at_end(process.kill)
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        process.join()
        cure = "If the system killed it because memory ran out, use fewer --sequences or a smaller --shape."
        raise KVBenchError(
            f"the process of a measurement ended without a result (exit code {process.exitcode}). {cure}"
        ) from None
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
        signals.not_at_end(process.kill)
    if error is not None:
        raise error
    return cast(Result, result)
