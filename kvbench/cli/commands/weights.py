"""``kvbench weights import``: converts the trained networks of methods (gates, scorers and surrogates) that the papers'
authors published."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from kvbench.cli.index import flowing
from kvbench.cli.options import LastLine, Text, group, plain
from kvbench.console import terminal
from kvbench.errors import SetupError, UserError, quote
from kvbench.eviction.terms.gates import Gate
from kvbench.registry import methods
from kvbench.sources.models import describe
from kvbench.store import check_out

EPILOG = """Examples:
  kvbench weights import TrimKV-Qwen3-4B-Math --method trimkv --model Qwen3-4B --out gates
  kvbench weights import trimkv_weights.pth --method retention --model Qwen3-4B --out gates
  kvbench weights import checkpoint --method foresightkv --model Qwen3-4B --out scorer --json
  kvbench weights import KVzap-mlp-Qwen3-8B --method kvzap --model Qwen3-8B --out surrogate
"""
# For each method: its option that names the file of weights.
METHODS = {"trimkv": "gates", "retention": "gates", "foresightkv": "scorer", "kvzap": "surrogate"}

app = group("Trained weights of methods: import published checkpoints.")


@app.command("import", epilog=flowing(EPILOG))
def import_(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="File with weights, .safetensors or .pth, or their folder.")
    ],
    method: Annotated[str, plain("--method", f"Method that the weights are for: {', '.join(METHODS)}.", "METHOD")],
    model: Annotated[str, plain("--model", "Folder of the model that the weights are for.", "MODEL")],
    out: Annotated[str, plain("--out", "Folder for the weights and their card.", "DIR")],
    gate: Annotated[Text, plain("--gate", "Kind of gate, rg or rg2, if SOURCE does not state it.", "GATE")] = None,
    json: LastLine = False,
) -> None:
    """Convert gates, scorers or surrogates from their authors' checkpoints, and check that they fit a model.

    No code in SOURCE is run: SOURCE is safetensors, or a pickle from which only tensors are read. Writes
    DIR/METHOD.safetensors and its card, a .json of the same name.
    """
    kind = methods.canonical(method)
    if kind not in METHODS:
        raise UserError(f"--method {quote(method)}: kvbench imports weights only for {', '.join(METHODS)}.")
    if gate is not None and gate not in get_args(Gate):
        raise UserError(f"--gate {quote(gate)}: choose {', '.join(get_args(Gate))}.")
    info = describe(model)
    if not info.config:
        raise SetupError(f"model {quote(model)} is not in the local cache, so its sizes are unknown; give its folder.")
    folder = check_out(out)

    from kvbench.train.import_weights import import_weights

    weights = import_weights(
        Path(source).expanduser(), kind, info.config, info.name, folder, gate=cast(Gate | None, gate)
    )
    options = {METHODS[kind]: out, **weights.options}
    _print(kind, model, weights.path, weights.card, options)
    if json:
        terminal.data(weights.card | {"path": str(weights.path), "options": options})


def _print(kind: str, model: str, path: Path, card: dict[str, Any], options: dict[str, str]) -> None:
    shown = {name: value for name, value in card["made"].items() if name not in ("how", "files")}
    about = ", ".join(f"{name} {value}" for name, value in shown.items())
    sizes = f"{card['model']['num_hidden_layers']} layers x {card['model']['num_key_value_heads']} heads"
    print(terminal.clean(f"wrote {path} and {path.with_suffix('.json').name}: {sizes}, {about}"))
    flags = " ".join(f"--method-opt {kind}.{name}={value}" for name, value in options.items())
    print(terminal.clean(f"use them with: kvbench run --method {kind} {flags} --model {model} ..."))
