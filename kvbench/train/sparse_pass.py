"""Forward and backward passes of a model under eviction masks, for a micro-batch of sequences at a time.

Letters: b sequences, S tokens in the longest sequence, H heads of the cache, D hidden size, V vocabulary. The answers
of all sequences lie within the last n of the S positions. Losses are computed for t of these n positions at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from kvbench.engine.attention.interface import route
from kvbench.errors import UserError, quote
from kvbench.train.forward import recompute
from kvbench.train.logits import by_blocks, final_states, logits_of
from kvbench.train.sparse_masks import Lifetimes, SparseAttention

LARGE = 100_000_000  # `recompute=auto` recomputes activations of models with at least so many parameters
RECOMPUTE = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A prompt, its answer (generated or read under eviction), and the weight of the answer's tokens in the loss."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    keys: tuple[int, int]  # noise keys under which the log has the evictions of the prompt and those of the answer
    weight: float = 1.0  # weight of each answer token in the loss

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.answer


class Part:
    """A micro-batch of sequences as token ids, `ids` [b, S]. Shorter sequences are padded at the end, where no answer
    token sees the padding.

    targets: [b, n], the last n of the S tokens; n is large enough for the answer of every sequence. weights: [b, n],
    the weight of each target in the loss; 0 for tokens that belong to no answer.
    """

    def __init__(self, sequences: Sequence[Answered], device: torch.device) -> None:
        self.sequences = sequences
        first = min(len(s.prompt) for s in sequences)
        longest = max(len(s.ids) for s in sequences)
        self.ids = torch.zeros(len(sequences), longest, dtype=torch.int64, device=device)
        weights = torch.zeros(len(sequences), longest, device=device)
        for row, s in enumerate(sequences):
            self.ids[row, : len(s.ids)] = torch.tensor(s.ids, device=device)
            weights[row, len(s.prompt) : len(s.ids)] = s.weight
        self.targets, self.weights = self.ids[:, first:], weights[:, first:]

    def states(self, model: Any, until: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Return the hidden states [b, n, D] from which the model predicts `targets`, with evicted entries masked.
        until: by layer, from `Lifetimes.tables`: the first token that no longer sees each entry, [b, H, S - 1]."""
        return final_states(model, SparseAttention(until), last=self.targets.shape[1], input_ids=self.ids[:, :-1])

    def tables(self, lifetimes: Lifetimes) -> dict[int, torch.Tensor]:
        return lifetimes.tables([s.keys for s in self.sequences], self.ids.shape[1] - 1)


# Computes the loss [b, t] of each prediction from logits [b, t, V], the tokens [b, t] that they predict and, if there
# is a teacher, the teacher's logits [b, t, V].
Objective = Callable[..., torch.Tensor]
Teacher = Callable[[], AbstractContextManager[Any]]  # returns a context manager that yields the teacher model


def add_up(
    model: Any,
    sequences: Sequence[Answered],
    lifetimes: Lifetimes,
    objective: Objective,
    *,
    micro: int,
    again: bool,
    teacher: Teacher | None = None,
) -> torch.Tensor:
    """Compute the weighted sum of a loss over all answer tokens, and add its gradient to those of the parameters.

    The weight of a token is that of its answer. Returns the sum as a leaf: its own backward pass reaches no parameter.

    Args:
        lifetimes: the log of the evictions in these sequences.
        objective: the loss of each token.
        micro: sequences per micro-batch.
        again: recompute activations in the backward pass instead of keeping them.
        teacher: returns a context manager that yields the teacher model. `objective` then also gets the teacher's
            logits, which are computed with the full cache. None: the loss needs no teacher.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for start in range(0, len(sequences), micro):
        part = Part(sequences[start : start + micro], device)
        until = part.tables(lifetimes)
        # The backward pass may recompute layers, so it must run while the attention is replaced.
        with recomputed(model, again), route(model, SparseAttention(until)):
            states = [part.states(model, until), *_teacher_states(teacher, part)]
            losses = by_blocks(partial(_losses, model, teacher, objective, part.targets), *states)
            loss = (losses * part.weights).sum()
            loss.backward()
        total += loss.detach()
    return total.requires_grad_()


@torch.no_grad()
def _teacher_states(teacher: Teacher | None, part: Part) -> list[torch.Tensor]:
    if teacher is None:
        return []
    with teacher() as model:
        return [part.states(model, {})]


def _losses(
    model: Any, teacher: Teacher | None, objective: Objective, targets: torch.Tensor, first: int, *states: torch.Tensor
) -> torch.Tensor:
    """Return the losses [b, t] of t predictions, computed from the model's and the teacher's hidden states. targets:
    all tokens to predict; the t predictions are for those from index `first` on."""
    logits = [logits_of(model, states[0])]
    if teacher is not None:
        with torch.no_grad(), teacher() as original:
            logits.append(logits_of(original, states[1]))
    return objective(logits[0], targets[:, first : first + states[0].shape[1]], *logits[1:])


def recomputes(model: Any, choice: str) -> bool:
    """Return whether a training recomputes activations (gradient checkpointing). choice: its option `recompute`.

    "auto": yes if the model has at least LARGE parameters and its layers support it. Raises UserError for "on" if no
    layer supports it.
    """
    possible = bool(_recomputable(model))
    if choice == "on" and not possible:
        raise UserError(f"the layers of {quote(type(model).__name__)} cannot be recomputed; use --opt recompute=off.")
    return choice == "on" or (choice == "auto" and possible and sum(p.numel() for p in model.parameters()) >= LARGE)


def _recomputable(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextlib.contextmanager
def recomputed(model: Any, on: bool) -> Iterator[None]:
    """Inside the `with` statement, if `on` is True, use gradient checkpointing in all layers that support it."""
    layers = _recomputable(model) if on else []
    try:
        for layer in layers:
            layer._gradient_checkpointing_func = partial(_recompute_in_evaluation, layer)
            layer.gradient_checkpointing = layer.training = True  # transformers recomputes only in training mode
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = layer.training = False


def _recompute_in_evaluation(layer: Any, call: Callable[..., Any], *inputs: Any) -> Any:
    """Run `call`, a layer's forward pass, and again in the backward pass, both in evaluation mode: in training mode,
    layers such as OPT's apply dropout, each time with another mask."""

    def evaluate(*inputs: Any) -> Any:
        layer.training = False
        try:
            return call(*inputs)
        finally:
            layer.training = True

    return recompute(evaluate, *inputs)
