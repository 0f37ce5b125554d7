"""Logits of a differentiable forward pass in blocks of positions, so that memory holds the logits of one block only.

`final_states` returns the hidden states that the model's language-model head reads. `logits_of` computes logits from
some of these states. It calls the model's own forward pass, but replaces the decoder by a function that returns these
states at once; only head, scaling and cap remain. So no architecture needs code of its own here.

Letters: b sequences, n positions, t positions of a block, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from kvbench.engine.attention.interface import Handler, route, text_model
from kvbench.errors import UserError, quote
from kvbench.train.forward import recompute, run_from

PREDICTIONS = 512  # most predictions whose logits, [PREDICTIONS, V], are in memory at once
Read = Callable[..., torch.Tensor]  # called with a block's first position, and each tensor's part [b, t, D]


def final_states(model: Any, handler: Handler | None, *, last: int = 0, **inputs: torch.Tensor) -> torch.Tensor:
    """Run a differentiable forward pass; return the hidden states [b, n, D] that the head reads.

    handler: computes every layer's attention; None: the caller has already replaced the model's attention, as it must
    if the backward pass recomputes layers. last: the number of last positions whose states are returned; 0: all.
    inputs: as in `kvbench.train.forward.forward`. Raises UserError when the model's forward pass calls no decoder.
    """
    found: list[Any] = []
    hooks = [d.register_forward_hook(lambda module, args, out: found.append(out)) for d in _decoders(model)]
    try:
        with route(model, handler) if handler else contextlib.nullcontext():
            run_from(model, 0, 1, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        name = quote(type(model).__name__)
        raise UserError(f"in {name}, no head reads the output of a decoder; kvbench cannot train with this model.")
    return found[-1].last_hidden_state[:, -last:]  # of the outer decoder


def logits_of(model: Any, states: torch.Tensor) -> torch.Tensor:
    """Return the model's logits [b, t, V] in float32 for hidden states [b, t, D] of `final_states`."""
    with _decoder_returns(model, states):
        tokens = torch.zeros(states.shape[:2], dtype=torch.int64, device=states.device)  # ignored
        return model(input_ids=tokens, attention_mask=None, use_cache=False, logits_to_keep=0).logits.float()


def by_blocks(read: Read, *states: torch.Tensor) -> torch.Tensor:
    """Apply `read` to blocks of positions of the hidden states [b, n, D]; return the joined results, [b, n, ...].

    read: called with a block's first position, and the block's part [b, t, D] of each tensor; returns [b, t, ...].
    A block has at most `PREDICTIONS` positions, counted over all sequences. If there are several blocks, the backward
    pass calls `read` again for each.
    """
    b, n, _ = states[0].shape
    rows = max(1, PREDICTIONS // b)
    again = n > rows and torch.is_grad_enabled()
    parts = []
    for first in range(0, n, rows):
        block = [tensor[:, first : first + rows] for tensor in states]
        parts.append(recompute(read, first, *block) if again else read(first, *block))
    return torch.cat(parts, dim=1)


def _decoders(model: Any) -> list[Any]:
    """Return the modules whose output may be the input of the model's head, the outer module last.

    It depends on the model which of them is called: a vision-language model calls the outer module; OPT also has an
    outer module, but calls the inner module directly.
    """
    found = [text_model(model), getattr(model, model.base_model_prefix, model)]
    return list(dict.fromkeys(module for module in found if module is not model))


class _Final(BaseModelOutput):
    """A decoder's output that has only the last hidden states; all other fields are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextlib.contextmanager
def _decoder_returns(model: Any, states: torch.Tensor) -> Iterator[None]:
    """Inside the `with` statement, make calls of the model's decoder return `states` at once."""
    decoders = _decoders(model)
    for decoder in decoders:
        decoder.forward = lambda *args, **kwargs: _Final(last_hidden_state=states)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for decoder in decoders:
            del decoder.forward
