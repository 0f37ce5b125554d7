"""The states of recurrent layers: linear attention, short convolutions, state-space layers.

A model reads and writes these states in its cache object, `past_key_values`. `RecurrentStates` is that object. It holds
the states in transformers' own cache layers, a row per sequence. It returns keys and values unchanged, because the
engine stores them. No method evicts a state; its size does not depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """The shape of one state of one layer. kind: "conv" or "recurrent"; place: the state's index among the layer's
    states of this kind.

    shape: the state's shape without the batch dimension. device: the layer's own device in a model that is divided
    among several devices, else None.
    """

    layer: int
    kind: str
    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | None = None

    @property
    def bytes(self) -> int:
        """The bytes of one sequence's state."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class RecurrentStates(Cache):
    """The states of all layers of a model, as its forward pass reads and replaces them.

    layers: number of the model's layers; per_layer: most states of one kind ("conv" or "recurrent") in a layer. The
    first forward pass creates the states, unless `allocate` did.
    """

    is_compileable = False

    def __init__(self, layers: int, per_layer: int = 1) -> None:
        self._of_layers = [LinearAttentionLayer(number_of_states=per_layer) for _ in range(layers)]
        super().__init__(layers=list(self._of_layers))

    @classmethod
    def like(cls, shapes: Sequence[StateShape]) -> RecurrentStates | None:
        """Return an empty object, in which the first pass puts states of these shapes; None without shapes."""
        return cls(1 + max(s.layer for s in shapes), 1 + max(s.place for s in shapes)) if shapes else None

    @classmethod
    def allocate(cls, shapes: Sequence[StateShape], rows: int, device: torch.device) -> RecurrentStates | None:
        """Return zero states of `rows` sequences, for a forward pass to continue; None if the model has no states."""
        if (states := cls.like(shapes)) is not None:
            for s in shapes:
                zeros = torch.zeros(rows, *s.shape, dtype=s.dtype, device=s.device or device)
                states._put(s.layer, s.kind, s.place, zeros)
        return states

    def shapes(self, divided: bool = False) -> tuple[StateShape, ...]:
        """Return the shapes of all states that exist. divided: whether the model's layers are on several devices."""
        return tuple(
            StateShape(
                layer=layer,
                kind=kind,
                place=place,
                shape=tuple(state.shape[1:]),
                dtype=state.dtype,
                device=state.device if divided else None,
            )
            for layer, kind, place, state in self.each()
        )

    def install(self, source: RecurrentStates, row: int, rows: torch.Tensor) -> None:
        """Copy the states of one sequence, row `row` of `source`, to each of the rows `rows` of this object."""
        for (*_, mine), (*_, theirs) in zip(self.each(), source.each(), strict=True):
            mine[rows.to(mine.device)] = theirs[row].to(mine.dtype)

    def copy(self, rows: Sequence[int] | None = None) -> RecurrentStates:
        """Return an independent copy of these rows (None: of all rows), for forward passes to change."""
        other = RecurrentStates(len(self._of_layers), self._of_layers[0].number_of_states)
        for at, kind, place, state in self.each():
            other._put(at, kind, place, state if rows is None else state[list(rows)])
        return other

    def bytes(self) -> int:
        """Return the bytes of all states of all sequences."""
        return sum(state.nbytes for *_, state in self.each())

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether a layer has states for a forward pass to continue. layer_idx: None for the last layer.
        state_idx: None for all states of the layer."""
        layers = self._of_layers[-1:] if layer_idx is None else self._of_layers[layer_idx : layer_idx + 1]
        written = [layer.has_previous_state for layer in layers]
        return any(all(places.values()) if state_idx is None else places[state_idx] for places in written)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the new keys and values unchanged: the engine stores them."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # the engine passes positions

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def _put(self, at: int, kind: str, place: int, state: torch.Tensor) -> None:
        """Create a state of layer `at` as a copy of `state`, for a forward pass to continue."""
        layer = self._of_layers[at]
        if kind == "conv":
            layer.lazy_initialization(conv_states=state, state_idx=place)
        else:
            layer.lazy_initialization(recurrent_states=state, state_idx=place)
        getattr(layer, f"{kind}_states")[place].copy_(state)
        layer.has_previous_state[place] = True

    def each(self) -> Iterator[tuple[int, str, int, torch.Tensor]]:
        """Yield (layer, kind, place, state) of every state."""
        for at, layer in enumerate(self._of_layers):
            for kind, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                yield from ((at, kind, place, state) for place, state in states.items() if state is not None)


def copied(states: RecurrentStates | None) -> RecurrentStates | None:
    """Return a copy of the states; None for None."""
    return None if states is None else states.copy()
