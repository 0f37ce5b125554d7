"""The program: parses a command line, calls the command in `kvbench.cli.commands`, and returns the exit code.

Exit codes: 0 done; 1 a bug; 2 wrong usage or input; 3 a fault of the environment, such as a missing file or package; 4
rows missing or failed; 5 a regression; 6 the run is in use; 129, 130 and 143 interrupted. An error is printed on
stderr, each line as ``error: ...``; ``--debug`` anywhere adds the traceback. Nothing here or in a command's checks
imports torch.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvbench import __version__
from kvbench.cli.index import COMMANDS, flowing, load
from kvbench.console import faults, signals, streams, terminal
from kvbench.errors import Interrupted, KVBenchError, PluginError, SetupError, UserError, bare, quote

EPILOG = """Start here:
  kvbench run --suite first
  kvbench list methods
  kvbench run --method full,gkv --budget 48 --interval 32 --task walk
"""
LISTS = ("--method", "-m", "--budget", "-b", "--task", "-t")  # options that take several values with commas


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        """Return the command's parameters, with the default False for every flag that declares no default. typer's own
        default, None, would make typer import pydantic, which is slow."""
        params: list[Any] = super().get_params(ctx)
        for param in params:
            if param.type_descriptor.annotation is bool and param.default is None:
                param.default = False
        return params

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command; the error for an unknown command suggests similar names."""
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            from kvbench.registry import did_you_mean

            known = self.list_commands(ctx)
            raise UserError(
                f"no command {quote(args[0])}.{did_you_mean(args[0], known) or ' There are ' + ', '.join(known) + '.'}"
            )
        return super().resolve_command(ctx, args)


class _Commands(_Group):
    """All commands of kvbench. A command's module is imported only when the command is called.

    Help and shell completion need only the names of the commands and one line about each command.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        about = COMMANDS.get(cmd_name)
        return about and TyperCommand(name=cmd_name, help=about, rich_markup_mode="rich")

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(name, _Group), rest


app = typer.Typer(
    cls=_Commands,
    name="kvbench",
    help="Compare KV-cache eviction methods: quality, speed and memory at equal physical budgets.",
    epilog=flowing(EPILOG),
    invoke_without_command=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.", metavar="")] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show the traceback of an error; may stand anywhere in the command.", metavar=""),
    ] = False,
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
    with signals.handled():
        try:
            code = _run([a for a in given if a != "--debug"])
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # stdout was closed, as with `| head`: no reader is left
            streams.discard_output()
            return 0
        except BaseException as error:
            if isinstance(error, (SystemExit, GeneratorExit)):
                raise
            if debug:
                traceback.print_exc()
            return _end(_expected(error, given, debug))


def _run(arguments: list[str]) -> int:
    try:
        code = app(arguments, prog_name="kvbench", standalone_mode=False)
    except SystemExit as leaving:  # typer turns a closed pipe into this
        if isinstance(leaving.__context__, BrokenPipeError):
            raise leaving.__context__ from None
        raise
    return code if isinstance(code, int) else 0


def _end(error: KVBenchError) -> int:
    """Print an error after all earlier output, and return its exit code."""
    try:
        sys.stdout.flush()
    except (BrokenPipeError, streams.Unprintable):
        streams.discard_output()
    if isinstance(error, Interrupted):
        signals.say(error, terminal.fail)
    else:
        terminal.fail(error)
    return error.exit_code


def _expected(error: BaseException, given: Sequence[str], debug: bool) -> KVBenchError:
    """Return a KVBenchError unchanged, and turn any other exception into one. given: the words of the command line."""
    if isinstance(error, KVBenchError) and not isinstance(error, PluginError):
        return error
    if isinstance(error, typer.TyperException):
        return _usage(error, given)
    if isinstance(error, signals.Signalled):
        return error.interruption()
    if isinstance(error, (KeyboardInterrupt, typer.Abort)):
        return Interrupted(signals.AGAIN, 130)
    if (signalled := signals.came()) is not None:
        return signalled.interruption()
    kind = f"{type(error).__name__}: {faults.words(error)}" if str(error) else type(error).__name__
    if faults.out_of_memory(error):
        return SetupError(f"out of memory ({faults.first_line(error)}). Use smaller sizes, or a larger machine.")
    if faults.device_failed(error):
        return SetupError(
            f"the device failed ({faults.first_line(error)}). Repeat the command; if it fails again, use another "
            "device (--device)."
        )
    from kvbench.config import plugins

    if (fault := plugins.failure(error)) is not None and isinstance(error, OSError):
        return SetupError(f"{fault}. Remove the cause and repeat the command, or correct the file.")
    if fault is not None:
        return UserError(f"{fault}. Correct the file{'' if debug else '; --debug shows the traceback'}.")
    if isinstance(error, OSError):
        return _system(error)
    hint = "" if debug else " --debug shows where."
    return KVBenchError(f"internal error, please report it: {kind}.{hint}")


def _system(error: OSError) -> SetupError:
    """Return the error for a failed system call that no check foresees, such as a file name that is too long."""
    where = f" {quote(error.filename)}" if error.filename else ""
    return SetupError(f"the operating system refuses{where}: {(error.strerror or faults.words(error)).lower()}.")


def _usage(error: Any, given: Sequence[str]) -> UserError:
    """Return a UserError in kvbench's wording for an error that typer found in the command line. given: the words of
    the command line."""
    option = getattr(error, "option_name", None)
    if option and "such option" in str(error):
        from kvbench.registry import did_you_mean

        known = [name for p in error.ctx.command.params for name in (*p.opts, *p.secondary_opts)]
        return UserError(f"no option {quote(option)}.{did_you_mean(option, known)}")
    message = str(error.format_message()).strip()
    if "unexpected extra argument" in message and (meant := _with_commas(given)):
        return UserError(f"{message[:1].lower() + message[1:].rstrip('.')}. Did you mean {meant}?")
    return UserError((message[:1].lower() + message[1:]).rstrip(".") + ".")


def _with_commas(given: Sequence[str]) -> str:
    """Return the correct form of a list of methods, budgets or tasks that the user typed with blanks instead of commas:
    ``--budget 48,64`` for ``--budget 48 64``. "" if the user typed no such list."""
    for place, option in enumerate(given):
        values = list(itertools.takewhile(lambda word: not word.startswith("-"), given[place + 1 :]))
        if option in LISTS and len(values) > 1:
            return f"{option} {bare(','.join(values))}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
