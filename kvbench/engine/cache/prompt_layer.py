"""One layer of a prompt's KV cache. It grows by blocks of tokens and loses entries at evictions; at the end it is
packed, which removes padding.

After an eviction heads may hold different numbers of entries; shorter heads are then padded to the longest, and `valid`
marks the places that hold an entry.

Letters: b prompts of equal length (one, except in `EvictionCache` and in a replay), Hk KV heads, n entries per head
with padding, D head dimension, t new tokens. `rows`: a number of entries per head, counted from the first in storage
order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.rules import Rows, no_hidden_states
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
    hidden: torch.Tensor  # [1, w, hidden size] the newest w hidden states, oldest first; this w may differ

    def held(self) -> tuple[torch.Tensor, ...]:
        """Return the positions of each head's entries."""
        return self.positions.split(self.lengths)

    def bytes(self) -> int:
        beside = (self.queries, self.hidden, *self.columns.values(), *self.states.values())
        return sum(t.nbytes for t in (self.keys, self.values, self.positions, *beside))


class PromptLayer:
    """One layer of the KV caches of b prompts.

    queries: how many of the newest queries the layer stores; hidden: how many of the newest hidden states it stores,
    until `forget_hidden` lowers this number.
    """

    def __init__(
        self, geometry: LayerGeometry, b: int, rows: int, method: Method, queries: int, hidden: int, like: torch.Tensor
    ) -> None:
        g = self.geometry = geometry
        device = like.device
        self.keys = torch.zeros(b, g.kv_heads, rows, g.head_dim, device=device, dtype=like.dtype)
        self.values = torch.zeros(b, g.kv_heads, rows, g.value_dim, device=device, dtype=like.dtype)
        self.positions = torch.zeros(b, g.kv_heads, rows, device=device, dtype=torch.int64)
        self.specs = expanded(method.columns(), g.group) if g.evicts else ()
        self.columns = {c.name: torch.full(self.positions.shape, c.init, device=device) for c in self.specs}
        self.states = {
            s.name: torch.zeros(b, *g.state_shape(s), device=device) for s in (method.states() if g.evicts else ())
        }
        width = queries if g.evicts else 0
        self.queries = torch.zeros(b, g.query_heads, width, g.head_dim, device=device, dtype=like.dtype)
        self.hidden = torch.zeros(b, 1, 0, g.hidden, device=device, dtype=like.dtype)
        self._hidden_width = hidden if g.evicts else 0
        self.rows = 0
        self.valid: torch.Tensor | None = None  # [b, Hk, rows]; None: every place holds an entry

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
        if self.valid is not None:
            self.valid = torch.cat([self.valid, torch.ones_like(self.valid[:, :, :1]).expand(-1, -1, t)], dim=2)
        if width := self.queries.shape[2]:
            self.queries = torch.cat([self.queries, query[:, :, -width:]], dim=2)[:, :, -width:]
        if width := self._hidden_width:
            if hidden is None:
                raise no_hidden_states(self.geometry.index)
            self.hidden = torch.cat([self.hidden, hidden[:, None, -width:]], dim=2)[:, :, -width:]
        self.rows = end

    def keep(self, mask: torch.Tensor) -> None:
        """Keep the entries that `mask` [b, Hk, rows] marks; drop all others and free their memory."""
        counts = mask.sum(dim=-1)
        longest = int(counts.max())
        # A stable sort moves the kept entries to the front without changing their order.
        self._take((~mask).to(torch.uint8).argsort(dim=-1, stable=True)[..., :longest])
        exists = torch.arange(longest, device=mask.device) < counts[..., None]
        self.valid = None if bool(exists.all()) else exists

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

    def newest_hidden(self, count: int) -> torch.Tensor | None:
        """Return the hidden states [b, w, hidden size] of the newest w tokens.

        w is `count`, or less if the layer stores fewer hidden states. The result is None if `count` is 0.
        """
        return self.hidden[:, 0, -count:] if count else None

    def forget_hidden(self, width: int) -> None:
        """Keep no more than the newest `width` hidden states, now and when tokens are added."""
        self._hidden_width = min(self._hidden_width, width)
        if (others := self.hidden.shape[2] - width) > 0:
            self.hidden = self.hidden[:, :, others:].clone()

    def truncate(self, rows: int) -> None:
        """Keep the first `rows` entries of every head and drop the others."""
        self.rows = rows
        if self.valid is not None:
            self.valid = self.valid[:, :, :rows]

    def forget_before(self, position: int) -> None:
        """Drop the entries before `position`, which the sliding window no longer covers."""
        first = int((self.positions[0, 0, : self.rows] < position).sum())
        self._take(torch.arange(first, self.rows, device=self.keys.device).expand(*self.positions.shape[:2], -1))

    def copy(self) -> PromptLayer:
        other = object.__new__(PromptLayer)
        other.__dict__ = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in self.__dict__.items()}
        other.columns = {n: c.clone() for n, c in self.columns.items()}
        return other

    def pack(self, row: int) -> PackedLayer:
        keep = torch.ones_like(self.positions[row, :, : self.rows], dtype=torch.bool)
        if self.valid is not None:
            keep = self.valid[row]

        def live(x: torch.Tensor) -> torch.Tensor:
            return x[row, :, : self.rows][keep]

        return PackedLayer(
            lengths=keep.sum(dim=-1).tolist(),
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
        return float(self.rows if self.valid is None else self.valid.float().sum(dim=-1).mean())

    def bytes(self) -> int:
        """Return the bytes of K, V, positions (4 each), columns, states, and stored queries and hidden states."""
        tensors = [self.keys, self.values, self.queries, self.hidden, *self.columns.values(), *self.states.values()]
        return sum(t.nbytes for t in tensors) + 4 * self.positions.numel()

    def _take(self, order: torch.Tensor) -> None:
        """Keep only the entries with the indices `order` [b, Hk, m] in every head, in that order."""

        def taken(x: torch.Tensor) -> torch.Tensor:
            index = order if x.dim() == 3 else order[..., None].expand(-1, -1, -1, x.shape[-1])
            return x.gather(2, index)

        self.keys, self.values, self.positions = taken(self.keys), taken(self.values), taken(self.positions)
        self.columns = {name: taken(column) for name, column in self.columns.items()}
        self.rows, self.valid = order.shape[-1], None

    def _grow(self, rows: int) -> None:
        def longer(x: torch.Tensor, fill: float = 0) -> torch.Tensor:
            shape = (*x.shape[:2], rows - x.shape[2], *x.shape[3:])
            return torch.cat([x, x.new_full(shape, fill)], dim=2)

        self.keys, self.values, self.positions = longer(self.keys), longer(self.values), longer(self.positions)
        self.columns = {spec.name: longer(self.columns[spec.name], spec.init) for spec in self.specs}
