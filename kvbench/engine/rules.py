"""`Rules`: a method with its budget, weights and RoPE. It builds the views of layers that the method reads.

Letters: b sequences, Hk KV heads, n places for an entry per head, D head dimension, t new tokens, V token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.attention.interface import AttentionCall
from kvbench.errors import BudgetViolation, UserError
from kvbench.eviction.api import Method
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.returned import of_new_tokens
from kvbench.eviction.rope import Rope
from kvbench.eviction.view import LayerView, OwnAttention, StackView

# Called at every eviction, once per layer, with (noise key, tokens seen, layer, kept positions of each head).
KeptLog = Callable[[int, int, int, list[torch.Tensor]], None]


@dataclass(slots=True)
class Rows:
    """The entries of b sequences in one layer, in n places per head.

    valid: [b, Hk, n] bool, which places hold an entry; None: all.
    """

    keys: torch.Tensor  # [b, Hk, n, D]
    values: torch.Tensor
    positions: torch.Tensor  # [b, Hk, n] int64
    columns: Mapping[str, torch.Tensor]
    valid: torch.Tensor | None


@dataclass(slots=True, kw_only=True)
class Batch:
    """Sequences that a method decides about together, with the facts that the method may read. Tensors are [b].

    Attributes:
        seen: tokens read; longest: the largest of `seen`.
        evictions: evictions so far.
        allowed: entries per head that each sequence may keep.
        layers: the layer of each element of axis 0, if one view may show several layers; else None.
        together: if the method decides about all layers of the model together while decoding, the layers of this batch,
            each once; axis 0 then has the same sequences for each of these layers. Else empty.
    """

    seen: torch.Tensor
    longest: int
    prompt_len: torch.Tensor
    evictions: torch.Tensor
    noise_key: torch.Tensor
    allowed: int
    layers: torch.Tensor | None = None
    together: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A method with its budget, its weights and the model's RoPE.

    Attributes:
        budget: entries per layer and head of the cache; None: the method takes no budget, or each sequence has its own.
        interval: generated tokens between two ticks.
        kernels: whether the method's code may run Triton kernels, which need a GPU.
    """

    method: Method
    budget: int | None
    interval: int
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    rope: Rope | None = None
    layer_weights: Mapping[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)  # by layer, see `NewTokens`
    elsewhere: Mapping[torch.device, dict[str, torch.Tensor]] = field(default_factory=dict)  # copies of `weights`
    marks: torch.Tensor | None = None  # [V] bool, by token id, see `Needs.marks`
    attention: Mapping[int, OwnAttention] = field(default_factory=dict)  # by layer, see `Needs.attention`
    kernels: bool = False

    def decoding(self) -> Rules:
        """Return the rules for evictions while decoding: in a combined method "a+b", those of b."""
        return replace(self, method=self.method.during("decode"))

    def weights_on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the method's weights on a device that holds layers of the model."""
        return self.elsewhere.get(device, self.weights)

    def columns_of_new_tokens(self, geometry: LayerGeometry, call: AttentionCall) -> dict[str, torch.Tensor]:
        """Return the columns [b, Hk, t] that the method computes from a layer's new tokens (`Method.on_tokens`).

        The result is {} if the method computes no columns, or if the layer is never evicted. Raises UserError when the
        method computes columns of the layer, but the model does not pass its hidden states to attention.
        """
        method = self.method
        if not method.reads_tokens or not geometry.evicts:
            return {}
        if call.hidden is None:
            raise no_hidden_states(call.layer)
        return of_new_tokens(
            method,
            NewTokens(
                layer=call.layer,
                hidden=call.hidden,
                keys=call.key,
                values=geometry.read_values(call.key, call.value),
                weights=self.weights_on(call.key.device),
                layer_weights=self.layer_weights.get(call.layer, {}),
                marks=self._marks_of(call),
            ),
            geometry.group,
        )

    def _marks_of(self, call: AttentionCall) -> torch.Tensor | None:
        """Return which new tokens consist only of the characters `Needs.marks` and of white space, [b, t] bool. False
        for embeddings, which have no token id. None if the method looks for no characters."""
        if self.marks is None:
            return None
        # zeros are made on the device of `marks`: a copy from the host cannot be captured in a CUDA graph
        if call.tokens is None:
            return self.marks.new_zeros(call.query.shape[::2]).to(call.query.device)
        return self.marks[call.tokens].to(call.query.device)

    def view(
        self,
        geometry: LayerGeometry,
        ordinals: Mapping[int, int],
        rows: Rows,
        batch: Batch,
        *,
        queries: torch.Tensor,
        query_positions: torch.Tensor,
        hidden: torch.Tensor | None,
        states: Mapping[str, torch.Tensor],
        **more: Any,
    ) -> LayerView:
        """Build the view that the method reads: of one layer or, if `batch.layers` is given, of one or several layers.

        geometry: the geometry of the layer; several layers of a view are alike, so the geometry of any of them will do.
        ordinals: maps the index of each evicted layer to its number among the evicted layers. more: further fields of
        the view, such as sums of attention that decode steps made, or the fields of the probe that the model reads.
        """
        valid = rows.valid
        if valid is None:  # expanding one element takes no memory
            valid = torch.ones(1, dtype=torch.bool, device=rows.positions.device).expand(rows.positions.shape)
        shown: dict[str, Any] = dict(
            layer_count=len(ordinals),
            keys=rows.keys,
            values=geometry.read_values(rows.keys, rows.values) if self.method.needs().values else None,
            positions=rows.positions,
            valid=valid,
            whole=rows.valid is None,
            queries=queries,
            query_positions=query_positions,
            hidden=hidden,
            attention=self.attention.get(geometry.index),
            columns=rows.columns,
            states=states,
            weights=self.weights_on(rows.keys.device),
            seen=batch.seen,
            longest=batch.longest,
            prompt_len=batch.prompt_len,
            eviction_index=batch.evictions,
            noise_key=batch.noise_key,
            budget=batch.allowed,
            interval=self.interval,
            kernels=self.kernels,
            scaling=geometry.scaling,
            softcap=geometry.softcap,
            rope=self.rope,
            **more,
        )
        if batch.layers is not None:
            together = tuple((layer, ordinals[layer]) for layer in batch.together)
            return StackView(layers=batch.layers, together=together, **shown)
        return LayerView(layer=geometry.index, ordinal=ordinals[geometry.index], **shown)


def no_hidden_states(layer: int) -> UserError:
    """Return the error for a method that reads hidden states which the model does not pass to attention in `layer`."""
    return UserError(
        f"the method reads hidden states, which kvbench cannot get from layer {layer} of this model. "
        "Use another method."
    )


def allowed(method: Method, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
    """Return how many entries per head a method may keep in an eviction (`Method.allowed`).

    Raises BudgetViolation if the method allows more entries than its budget, although it declares that its budget
    bounds the cache while decoding (`decode_bounded`).
    """
    entries = method.allowed(budget, prompt_len, seen, evictions)
    if budget is not None and method.decode_bounded and entries > budget:
        raise BudgetViolation(
            f"budget exceeded: {type(method).__name__} asks for {entries} entries per head; the budget is {budget}."
        )
    return entries


def check_held(held: float, most: int) -> None:
    """Raise BudgetViolation when the layers hold more entries per head, on average, than `most`."""
    if held > most + 1e-6:
        raise BudgetViolation(f"budget exceeded: the method kept {held:.2f} entries per head but may keep {most}.")
