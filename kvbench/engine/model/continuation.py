"""Checks without weights that recurrent layers continue their states: a pass must read the state of every layer.

A layer that begins a new state in each pass only overwrites the former state and never reads it. The operations of a
pass depend only on the model's code and shapes, so the pass runs on the meta device. Once the weights are loaded,
`positions.check_states` also compares the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvbench.engine.attention.geometry import layer_type, own_failures
from kvbench.engine.attention.interface import AttentionCall, route, run
from kvbench.engine.cache.recurrent import RecurrentStates, StateShape
from kvbench.errors import UserError, quote

TOKENS = 4


def check_continues(model: Any, states: Sequence[StateShape]) -> None:
    """Raise UserError if a layer does not read its former state in a pass over further tokens. model: on the meta
    device."""
    if not states:
        return
    meta = torch.device("meta")
    before = RecurrentStates.allocate(states, 1, meta)
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=meta)
    reads = Reads()
    with torch.inference_mode(), route(model, no_attention), own_failures(model, UserError), reads:
        run(model, before, input_ids=ids, position_ids=ids, logits_to_keep=1)
    assert before is not None
    for layer, _, _, state in before.each():
        if id(state.untyped_storage()) not in reads.storages:
            raise UserError(
                f"model type {quote(model.config.model_type)} is not supported: layers of type "
                f"{layer_type(model, layer)} do not continue their state when a text is read in several "
                "passes. Choose another model."
            )


def no_attention(call: AttentionCall) -> torch.Tensor:
    """Return an uninitialised tensor in place of the attention output, for passes that examine the rest of a model."""
    b, heads, t, _ = call.query.shape
    return call.value.new_empty(b, t, heads, call.value.shape[-1])


class Reads(TorchDispatchMode):
    """Records the storages of the tensors that operations inside its `with` block get as arguments.

    The target of a `copy_` is left out, because `copy_` only writes to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}  # by id; held, so that no id is used again

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(zip((a.name for a in func._schema.arguments), args)) | dict(kwargs or {})
        overwritten = func._schema.arguments[0].name if func._schema.name == "aten::copy_" else None
        for leaf in tree_leaves([value for name, value in given.items() if name != overwritten]):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.storages[id(storage)] = storage
        return func(*args, **(kwargs or {}))
