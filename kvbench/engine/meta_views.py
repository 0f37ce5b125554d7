"""Views of the sizes that a method gets in an eviction, made of meta tensors.

Letters: b sequences, t tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.cache.stack import placeholder, shows_keys
from kvbench.engine.meta import META
from kvbench.engine.model.own_attention import own_attention
from kvbench.engine.model.random_weights import shapes_of
from kvbench.engine.rules import Batch, Rows, Rules
from kvbench.eviction.api import Method, Needs, Probe
from kvbench.eviction.columns import expanded
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.rope import Rope
from kvbench.eviction.view import LayerView


@dataclass(frozen=True, slots=True)
class Shown:
    """The sizes of the views that a method gets in one call.

    Attributes:
        b: length of axis 0 of each view, which runs over sequences or, in a stacked view, over pairs of a layer and a
            sequence.
        entries: places per head; queries, hidden: numbers of newest queries and hidden states per sequence.
        views: how many views the method gets in the call; stacked: whether they are `StackView`s.
        together: in a stacked view, the number of layers about which the method decides together; 0: the method
            decides about each element of axis 0 by itself.
        probe: length in tokens of the probe to which the queries belong; 0: the queries belong to no probe.
        copied: whether a view copies the entries out of the cache.
        sums: whether the method sees sums of attention in place of queries (`LayerView.sums`).
        marks: the numbers of newest queries for which the method sees sums of attention (`LayerView.newest_sums`).
    """

    b: int
    entries: int
    queries: int
    hidden: int = 0
    views: int = 1
    stacked: bool = False
    together: int = 0
    probe: int = 0
    copied: bool = False
    sums: bool = False
    marks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaViews:
    """Makes the views of one method on one model.

    Attributes:
        method: the cell's method. A combined method "a+b" is given as a whole, because entries have the columns of
            both parts.
        geometry: the evicted layers of the cache, the largest first.
        model: function that returns the model without weights, on the meta device, in any dtype.
        dtype: the dtype of keys, values, queries and hidden states; interval: generated tokens between two ticks.
        budget: entries per head that an eviction leaves. kernels: see `Rules`.
    """

    method: Method
    geometry: tuple[LayerGeometry, ...]
    model: Callable[[], Any]
    dtype: torch.dtype
    interval: int
    budget: int
    kernels: bool = False

    def rules(self, acting: Method) -> Rules:
        """Return the rules (`Rules`) by which a method evicts, with weights, RoPE and attention on the meta device.

        acting: the cell's method, a part of a combined method, or a method that evicts a copy of the cache for probes.
        """
        layers, needs = self._layers(), acting.needs()
        attention = {}
        if needs.attention:
            attention = own_attention(copy.deepcopy(self.model()).to(self.dtype), layers, needs.attention)
        return Rules(
            method=acting,
            budget=self.budget,
            interval=self.interval,
            weights=self.weights(acting),
            rope=Rope(torch.empty(layers[0].head_dim // 2, device=META)) if needs.rope else None,
            attention=attention,
            kernels=self.kernels,
        )

    def weights(self, acting: Method) -> dict[str, torch.Tensor]:
        """Return meta tensors shaped like a method's weights, by name; {} if it has none or the shapes are unknown."""
        declared = acting.weights()
        try:
            shapes = {} if declared is None else shapes_of(declared, self.model())
        except Exception:  # raised by the code of a plug-in, which computes the shapes
            return {}
        return {name: torch.empty(tuple(shape), device=META) for name, shape in shapes.items()}

    def views(self, rules: Rules, shown: Shown) -> list[LayerView]:
        layers = self._layers()
        ordinals = {g.index: i for i, g in enumerate(layers)}
        return [
            self._view(rules, g, ordinals, shown, tuple(layer.index for layer in layers[place:][: shown.together]))
            for place, g in enumerate(layers[: shown.views])
        ]

    def tokens(self, t: int) -> NewTokens:
        """Return t new tokens of one sequence, as `Method.on_tokens` gets them."""
        g, needs = self._layers()[0], self.method.needs()
        matrix = self.floats(g.query_heads, g.read_dim, g.hidden)
        return NewTokens(
            layer=g.index,
            hidden=self.floats(1, t, g.hidden),
            keys=self.floats(1, g.kv_heads, t, g.head_dim),
            values=self.floats(1, g.kv_heads, t, g.read_dim),
            weights=self.weights(self.method),
            layer_weights=dict.fromkeys(needs.layer_weights, matrix),
            marks=torch.empty(1, t, dtype=torch.bool, device=META) if needs.marks else None,
        )

    def _layers(self) -> list[LayerGeometry]:
        return [replace(g, device=None) for g in self.geometry]

    def _view(
        self, rules: Rules, g: LayerGeometry, ordinals: dict[int, int], shown: Shown, together: tuple[int, ...]
    ) -> LayerView:
        b = shown.b
        batch = Batch(
            seen=_numbers(b),
            longest=shown.entries,
            prompt_len=_numbers(b),
            evictions=_numbers(b),
            noise_key=_numbers(b),
            allowed=self.budget,
            layers=_numbers(b) if shown.stacked else None,
            together=together,
        )
        return rules.view(
            g,
            ordinals,
            self._rows(g, shown, rules.method.needs()),
            batch,
            queries=self.floats(b, g.query_heads, shown.queries, g.head_dim),
            query_positions=_numbers(b, shown.queries),
            hidden=self.floats(b, shown.hidden, g.hidden) if shown.hidden else None,
            states={s.name: torch.empty(b, *g.state_shape(s), device=META) for s in self.method.states()},
            sums=_sums(g, shown) if shown.sums else None,
            newest_sums={number: _sums(g, shown) for number in shown.marks},
            **(self._probe(g, b, shown.probe) if shown.probe else {}),
        )

    def _rows(self, g: LayerGeometry, shown: Shown, needs: Needs) -> Rows:
        size = shown.b, g.kv_heads, shown.entries
        names = [column.name for column in expanded(self.method.columns(), g.group)]
        valid = None if self.method.uniform else torch.ones(size, dtype=torch.bool, device=META)
        columns = {name: torch.empty(size, device=META) for name in names}
        reads = shows_keys(needs, shown.queries) or not shown.copied, needs.values or not shown.copied
        entries = [
            self.floats(*size, dim) if read else placeholder(self.floats(1, dim), *size)
            for dim, read in zip((g.head_dim, g.value_dim), reads)
        ]
        return Rows(entries[0], entries[1], _numbers(*size), columns, valid)

    def _probe(self, g: LayerGeometry, b: int, length: int) -> dict[str, Any]:
        keys = self.floats(b, g.kv_heads, length, g.head_dim)
        return {"probe": Probe(tokens=(0,) * length), "probe_keys": keys, "probe_positions": _numbers(b, length)}

    def floats(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self.dtype, device=META)


def _sums(g: LayerGeometry, shown: Shown) -> torch.Tensor:
    return torch.empty(shown.b, g.kv_heads, g.group, shown.entries, device=META)


def _numbers(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int64, device=META)
