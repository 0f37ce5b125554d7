"""The command line: parses, calls, prints. Each command is a file in `kvbench.commands`.

Exit codes: 0 done; 1 a bug; 2 wrong usage or input; 3 the surroundings; 4 rows missing or failed; 5 a regression; 6 the
run is in use; 130 and 143 interrupted. Errors are one line, ``error: ...``, on stderr; ``--debug`` anywhere adds the
traceback. Nothing here or in a command's checks imports torch.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvbench import __version__, terminal
from kvbench.commands.index import COMMANDS, load
from kvbench.errors import Interrupted, KVBenchError, SetupError, UserError
from kvbench.errors import show as quoted

EPILOG = """Start here:
  kvbench run --suite demo
  kvbench list methods
  kvbench run --method full,gkv --budget 48 --interval 32 --task walk
"""
LISTS = ("--method", "-m", "--budget", "-b", "--task", "-t")  # options that take several values with commas


class _Group(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """An unknown command gets our own message with near names."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            from kvbench.registry import did_you_mean

            known = self.list_commands(ctx)
            raise UserError(
                f"no command {quoted(args[0])}.{did_you_mean(args[0], known) or ' There are ' + ', '.join(known) + '.'}"
            )
        return super().resolve_command(ctx, args)


class _Commands(_Group):
    """All commands. Help and shell completion get names and one line each; a module is imported to run its command."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        return entry and TyperCommand(name=cmd_name, help=entry.about, rich_markup_mode="rich")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(name, _Group), rest


app = typer.Typer(
    cls=_Commands,
    name="kvbench",
    help="Compare KV-cache eviction methods: quality, speed and memory at equal physical budgets.",
    epilog=EPILOG,
    invoke_without_command=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", metavar="")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Tracebacks; may stand anywhere.", metavar="")] = False,
) -> None:
    if version:
        print(f"kvbench {__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    terminal.prepare()
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        code = app([a for a in given if a != "--debug"], prog_name="kvbench", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as leaving:  # typer turns a closed pipe into this
        if isinstance(leaving.__context__, BrokenPipeError):
            return _reader_gone()
        raise
    except (KVBenchError, typer.TyperException) as error:
        if debug:
            traceback.print_exc()
        expected = error if isinstance(error, KVBenchError) else _usage(error, given)
        terminal.fail(expected)
        return expected.exit_code
    except (KeyboardInterrupt, typer.Abort):
        terminal.fail(Interrupted("interrupted: nothing was running yet.", 130))
        return 130
    except OSError as error:
        if debug:
            traceback.print_exc()
        terminal.fail(_system(error))
        return SetupError.exit_code
    except Exception as error:
        if debug:
            traceback.print_exc()
        kind = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        hint = "" if debug else " --debug shows where."
        terminal.fail(KVBenchError(f"internal error, please report it: {kind}.{hint}"))
        return 1


def _reader_gone() -> int:
    """stdout was closed, as with `| head`: nobody is left to tell, and what is still buffered must not raise again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def _system(error: OSError) -> SetupError:
    """What the system refused, which no check foresaw: a name that is too long, a disk that fails."""
    where = f" {quoted(error.filename)}" if error.filename else ""
    return SetupError(f"the system refuses{where}: {(error.strerror or str(error)).lower()}.")


def _usage(error: Any, given: Sequence[str] = ()) -> UserError:
    """A parser's error in our words."""
    option = getattr(error, "option_name", None)
    if option and "such option" in str(error):
        from kvbench.registry import did_you_mean

        known = [name for p in error.ctx.command.params for name in (*p.opts, *p.secondary_opts)]
        return UserError(f"no option {quoted(option)}.{did_you_mean(option, known)}")
    message = str(error.format_message()).strip()
    if "unexpected extra argument" in message and (meant := _with_commas(given)):
        return UserError(f"{message[:1].lower() + message[1:].rstrip('.')}. Did you mean {meant}?")
    return UserError((message[:1].lower() + message[1:]).rstrip(".") + ".")


def _with_commas(given: Sequence[str]) -> str:
    """``--budget 48,64`` where ``--budget 48 64`` was typed."""
    for place, option in enumerate(given):
        values = list(itertools.takewhile(lambda word: not word.startswith("-"), given[place + 1 :]))
        if option in LISTS and len(values) > 1:
            return f"{option} {quoted(','.join(values))[1:-1]}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
