"""``python -m kvbench`` and the installed command: signals are handled before anything heavy is imported."""

from __future__ import annotations

import sys

from kvbench import signals


def main() -> int:
    signals.install()
    try:
        from kvbench.cli import main as run
    except signals.Signalled as signalled:
        print(signalled.told(), file=sys.stderr)
        return 128 + signalled.number
    return run()


if __name__ == "__main__":
    sys.exit(main())
