"""Runs ``python -m kvbench`` and the installed command: handles signals before any slow import."""

from __future__ import annotations

import sys

from kvbench.console import signals, streams


def main() -> int:
    """Run the command line in `sys.argv`, and return its exit code."""
    streams.repair()  # first, because a file opened earlier would get the descriptor of a closed stream
    signals.install()
    try:
        from kvbench.cli.app import main as run

        code = run()
        signals.settle()
    except (signals.Signalled, Exception) as failure:
        signalled = failure if isinstance(failure, signals.Signalled) else signals.came()
        if signalled is None:
            raise
        error = signalled.interruption()
        signals.say(error, lambda told: print(told, file=sys.stderr, flush=True))
        return error.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main())
