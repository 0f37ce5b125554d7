"""One layer of a prompt's KV cache. It grows by blocks of tokens and loses entries at evictions; at the end it is
packed, which removes padding.

After an eviction heads may hold different numbers of entries; shorter heads are then padded to the longest, and `valid`
marks the places that hold an entry. The host has a copy of `valid`, so it knows how many entries a head holds without
waiting for the device.

Letters: b prompts of equal length (one, except in `EvictionCache` and in a replay), Hk KV heads, n entries per head
with padding, D head dimension, t new tokens. `rows`: a number of entries per head, counted from the first in storage
order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.rules import Rows, no_hidden_states
from kvbench.engine.upload import upload
from kvbench.eviction.api import Method
from kvbench.eviction.columns import expanded


@dataclass(slots=True)
class PackedLayer:
    """One layer of one sequence without padding: the entries of its heads, one head after the other."""

    lengths: list[int]  # entries of each head
    keys: torch.Tensor  # [sum of lengths, D]
    values: torch.Tensor
    positions: torch.Tensor  # [sum of lengths] int32
    columns: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    queries: torch.Tensor  # [Hq, w, D] the newest w queries, oldest first
    hidden: torch.Tensor  # [1, v, hidden size] the newest v hidden states, oldest first

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the positions of each head's entries."""
        return self.positions.split(self.lengths)


class PromptLayer:
    """One layer of the KV caches of b prompts.

    queries: how many of the newest queries the layer stores; hidden: how many of the newest hidden states it stores,
    until `forget_hidden` lowers this number. A layer with a sliding window stores neither queries nor hidden states.
    """

    def __init__(
        self, geometry: LayerGeometry, b: int, rows: int, method: Method, queries: int, hidden: int, like: torch.Tensor
    ) -> None:
        g = self.geometry = geometry
        device = like.device
        # Places from `rows` on have arbitrary values.
        self.keys = torch.empty(b, g.kv_heads, rows, g.head_dim, device=device, dtype=like.dtype)
        self.values = torch.empty(b, g.kv_heads, rows, g.value_dim, device=device, dtype=like.dtype)
        self.positions = torch.empty(b, g.kv_heads, rows, device=device, dtype=torch.int64)
        self.specs = expanded(method.columns(), g.group) if g.evicts else ()
        self.columns = {c.name: torch.empty(self.positions.shape, device=device) for c in self.specs}
        self.states = {
            s.name: torch.zeros(b, *g.state_shape(s), device=device) for s in (method.states() if g.evicts else ())
        }
        width = queries if g.evicts else 0
        self.queries = torch.zeros(b, g.query_heads, width, g.head_dim, device=device, dtype=like.dtype)
        self.hidden = torch.zeros(b, 1, 0, g.hidden, device=device, dtype=like.dtype)
        self._hidden_width = hidden if g.evicts else 0
        self.rows = 0
        self.valid: torch.Tensor | None = None  # [b, Hk, rows]; None: every place holds an entry
        self._exists: np.ndarray | None = None  # the host's copy of `valid`

    def append(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        query: torch.Tensor,
        start: int,
        hidden: torch.Tensor | None = None,
    ) -> None:
        """Add t tokens from position `start`: key, value [b, Hk, t, D], query [b, Hq, t, D], hidden [b, t, size].

        hidden: None if the model does not pass its hidden states. Raises UserError if `hidden` is None although the
        layer stores hidden states.
        """
        t = key.shape[2]
        end = self.rows + t
        if end > self.keys.shape[2]:
            self._grow(end)
        self.keys[:, :, self.rows : end] = key
        self.values[:, :, self.rows : end] = value
        self.positions[:, :, self.rows : end] = torch.arange(start, start + t, device=key.device)
        for spec in self.specs:
            self.columns[spec.name][:, :, self.rows : end] = spec.init
        if self._exists is not None:
            self._mark(np.pad(self._exists, ((0, 0), (0, 0), (0, t)), constant_values=True))
        if width := self.queries.shape[2]:
            self.queries = torch.cat([self.queries, query[:, :, -width:]], dim=2)[:, :, -width:]
        if width := self._hidden_width:
            if hidden is None:
                raise no_hidden_states(self.geometry.index)
            self.hidden = torch.cat([self.hidden, hidden[:, None, -width:]], dim=2)[:, :, -width:]
        self.rows = end

    def keep(self, mask: torch.Tensor, counts: np.ndarray) -> None:
        """Keep the entries that `mask` [b, Hk, rows] marks; drop all others and free their memory. counts: [b, Hk], how
        many entries each head keeps."""
        longest = int(counts.max())
        # A stable sort moves the kept entries to the front without changing their order.
        order = (~mask).view(torch.uint8).argsort(dim=-1, stable=True)[..., :longest]
        by_vector = order[..., None].expand
        self._replace(lambda x: x.gather(2, order if x.dim() == 3 else by_vector(-1, -1, -1, x.shape[-1])))
        self.rows = longest
        exists = np.arange(longest) < counts[..., None]
        self._mark(None if exists.all() else exists)

    def shown(self, rows: int) -> Rows:
        """Return the first `rows` entries of every head."""
        columns = {name: column[:, :, :rows] for name, column in self.columns.items()}
        valid = None if self.valid is None else self.valid[:, :, :rows]
        return Rows(self.keys[:, :, :rows], self.values[:, :, :rows], self.positions[:, :, :rows], columns, valid)

    def write(self, values: dict[str, torch.Tensor]) -> None:
        """Store new values by name: columns [b, Hk, n] for the first n entries of every head, and states."""
        for name, value in values.items():
            if name in self.columns:
                self.columns[name][:, :, : value.shape[-1]] = value
            else:
                self.states[name] = value

    def forget_hidden(self, width: int) -> None:
        """Keep no more than the newest `width` hidden states, now and when tokens are added."""
        self._hidden_width = min(self._hidden_width, width)
        if (others := self.hidden.shape[2] - width) > 0:
            self.hidden = self.hidden[:, :, others:].clone()

    def truncate(self, rows: int) -> None:
        """Keep the first `rows` entries of every head and drop the others."""
        self.rows = rows
        if self._exists is not None:
            self._mark(self._exists[:, :, :rows])

    def shrink(self) -> None:
        """Free the places behind the last entry."""
        self._replace(lambda x: x[:, :, : self.rows].clone())

    def forget_before(self, position: int, end: int) -> None:
        """Drop the entries before `position`, which the sliding window no longer covers. The layer must hold the
        entries of the newest tokens without a gap. end: the position after the newest token."""
        last = self.rows
        first = min(max(0, position - (end - last)), last)
        if first or last < self.keys.shape[2]:
            self._replace(lambda x: x[:, :, first:last].clone())
            self.rows = last - first

    def copy(self) -> PromptLayer:
        other = object.__new__(PromptLayer)
        other.__dict__ = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in self.__dict__.items()}
        other.columns = {n: c.clone() for n, c in self.columns.items()}
        return other

    def pack(self, row: int) -> PackedLayer:
        """Return the entries of prompt `row` without padding. They may share the memory of this layer."""
        lengths, index = [self.rows] * self.geometry.kv_heads, None
        if self._exists is not None:
            lengths = self._exists[row].sum(axis=-1).tolist()
            head, place = np.nonzero(self._exists[row])
            index = upload(head * self.keys.shape[2] + place, self.keys.device)

        def live(x: torch.Tensor) -> torch.Tensor:
            if index is None:
                return x[row, :, : self.rows].flatten(0, 1)
            return x[row].flatten(0, 1).index_select(0, index)

        return PackedLayer(
            lengths=lengths,
            keys=live(self.keys),
            values=live(self.values),
            positions=live(self.positions).int(),
            columns={name: live(column) for name, column in self.columns.items()},
            states={name: state[row] for name, state in self.states.items()},
            queries=self.queries[row],
            hidden=self.hidden[row],
        )

    def held(self) -> float:
        """Return the number of entries that a head holds, a mean over heads and prompts."""
        return self.total() / self.heads()

    def total(self) -> int:
        """Return the number of entries of all heads and prompts."""
        return self.rows * self.heads() if self._exists is None else int(self._exists.sum())

    def heads(self) -> int:
        """Return the number of heads of all prompts."""
        return self.keys.shape[0] * self.keys.shape[1]

    def finite(self) -> bool:
        """Return whether the keys, values, queries and hidden states are finite. The host waits for the device."""
        stored = (self.keys[:, :, : self.rows], self.values[:, :, : self.rows], self.queries, self.hidden)
        return all(bool(x.isfinite().all()) for x in stored)

    def bytes(self) -> int:
        """Return the bytes of K, V, positions (4 each), columns, states, and stored queries and hidden states."""
        tensors = [self.keys, self.values, self.queries, self.hidden, *self.columns.values(), *self.states.values()]
        return sum(t.nbytes for t in tensors) + 4 * self.positions.numel()

    def _mark(self, exists: np.ndarray | None) -> None:
        self._exists = exists
        self.valid = None if exists is None else upload(exists, self.keys.device)

    def _grow(self, rows: int) -> None:
        def longer(x: torch.Tensor) -> torch.Tensor:
            grown = x.new_empty(*x.shape[:2], rows, *x.shape[3:])
            grown[:, :, : self.rows] = x[:, :, : self.rows]
            return grown

        self._replace(longer)

    def _replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace keys, values, positions and columns by what `change` returns for each."""
        self.keys, self.values, self.positions = change(self.keys), change(self.values), change(self.positions)
        self.columns = {name: change(column) for name, column in self.columns.items()}
