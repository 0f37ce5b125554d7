"""``kvbench lm-eval``: lm-eval's command line with kvbench's model and tasks.

lm-eval 0.4.13 finds no models outside its package, so its own command lacks ``--model kvbench``. The arguments after
``kvbench lm-eval`` go to lm-eval. kvbench adds the folder of its tasks to ``--include_path``. The default of
``--model`` is ``kvbench``. With this model, the default of ``--device`` is ``auto``, and a device in ``--model_args``
replaces ``--device``.
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated, Any

import typer

from kvbench.cli.options import Texts, plain
from kvbench.console import faults, signals
from kvbench.console.faults import words
from kvbench.console.progress import step
from kvbench.errors import KVBenchError, SetupError, UserError, quote
from kvbench.integrations.model_args import OWN, SETTINGS

EPILOG = f"""Examples:
  kvbench lm-eval --model_args model=tiny,method=gkv,budget=64,interval=32 --tasks kvbench_chain --limit 32
  kvbench lm-eval --model_args model=ORG/NAME,method=snapkv,budget=25% --tasks hellaswag,gsm8k --output_path out
  kvbench lm-eval --model_args model=ORG/NAME,thinking=true --apply_chat_template --tasks kvbench_aime24
  kvbench lm-eval ls tasks
  kvbench lm-eval run --help
model_args: {", ".join((*OWN, "METHOD.OPTION", *SETTINGS))}.
"""
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}


def lm_eval(
    arguments: Annotated[
        Texts, typer.Argument(metavar="...", help="Arguments of lm-eval's own command.", show_default=False)
    ] = None,
    path: Annotated[
        bool, plain("--path", "Print the folder of kvbench's tasks, for lm-eval's --include_path.")
    ] = False,
) -> None:
    """Run lm-eval's command. Its default model is kvbench's engine, under an eviction method."""
    if path:
        from kvbench.integrations import TASKS

        print(TASKS)
        return
    if not arguments:
        raise UserError("lm-eval needs arguments; 'kvbench lm-eval --help' has examples.")
    typed, sys.argv = sys.argv, ["lm-eval", *arguments]
    try:
        with signals.phase(lambda: "interrupted: lm-eval keeps nothing of an unfinished run without --use_cache."):
            _run()
    except (KVBenchError, ImportError):
        raise
    except Exception as error:
        if faults.of_machine(error) or _innermost(error).startswith("kvbench"):
            raise
        raise _foreign(error) from error
    finally:
        sys.argv = typed


def _run() -> None:
    from lm_eval.__main__ import HarnessCLI, setup_logging

    from kvbench.integrations import TASKS

    setup_logging()
    parser = HarnessCLI()
    options: Any = parser.parse_args()
    from_file = _from_file(options)
    if hasattr(options, "include_path"):
        own = options.include_path or from_file.get("include_path")
        options.include_path = [str(TASKS), *([own] if isinstance(own, str) else own or [])]
    if options.command == "run":
        options.model = options.model or from_file.get("model", "kvbench")
        if options.model == "kvbench":
            _prepare(options, from_file)
    parser.execute(options)


def _prepare(options: Any, from_file: dict[str, Any]) -> None:
    """Register kvbench's model with lm-eval, set lm-eval's options for the model's device and arguments, and check the
    arguments before lm-eval reads the 14,000 files of its own tasks. from_file: the settings in lm-eval's configuration
    file."""
    from lm_eval.utils import simple_parse_args_string

    step("loading lm-eval, the model and lm-eval's 14,000 task files; this takes half a minute or more")
    import kvbench.integrations.lm_eval  # noqa: F401
    from kvbench.integrations.model_args import read

    arguments = options.model_args or from_file.get("model_args") or {}
    arguments = dict(simple_parse_args_string(arguments) if isinstance(arguments, str) else arguments)
    # lm-eval's default is cuda:0 on every machine. A device in model_args replaces it: lm-eval refuses two devices.
    options.device = arguments.pop("device", None) or options.device or from_file.get("device", "auto")
    options.model_args = arguments
    read(arguments, device=options.device, batch_size=getattr(options, "batch_size", None))


def _from_file(options: Any) -> dict[str, Any]:
    """Return the settings in the file that lm-eval's option ``--config`` names. Empty if the option is not given."""
    from lm_eval.config.evaluate_config import EvaluatorConfig

    config = getattr(options, "config", None)
    return EvaluatorConfig.load_yaml_config(config) if config else {}


def _innermost(error: BaseException) -> str:
    """Return the name of the module whose code raised an error."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")) if frames else ""


def _foreign(error: Exception) -> KVBenchError:
    """Turn an error of lm-eval, or of a library that it uses, into an error of one line. ``--debug`` still shows the
    traceback."""
    from kvbench.sources.hub import why

    if why(error) == "unreachable":
        return SetupError(
            "lm-eval needs data that are not on this machine, and the hub is unreachable. Run the command once with "
            "network access; with HF_HUB_OFFLINE=1, lm-eval then uses only cached data."
        )
    first = (words(error).strip().splitlines() or [""])[0]
    return UserError(f"lm-eval: {type(error).__name__}: {quote(first)}.")
