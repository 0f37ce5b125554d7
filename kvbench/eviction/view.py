"""One layer as a method sees it at an eviction: the entries of several sequences, and helpers that follow text order.

Entries lie in storage order, which may differ from text order after the first eviction. Use `positions`, or the helpers
below: `pool` smooths along the text, `recent` and `older` separate the newest tokens from the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from kvbench.eviction import noise
from kvbench.eviction.terms.window_attention import Domain, Order, Reduce, reduced_group, window_attention
from kvbench.lazy import torch

if TYPE_CHECKING:
    from kvbench.eviction.api import Probe
    from kvbench.eviction.rope import Rope


VECTORS = frozenset({"keys", "values", "queries", "hidden", "probe_keys", "weights"})  # read only by `score`


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """The attention module of a layer, and the rotary embedding of its model. Methods must change neither.

    rotary: called with any tensor and positions [b, t], returns RoPE's cosines and sines, [b, t, d] each, in the dtype
    of that tensor.
    """

    module: Any  # a transformers module
    rotary: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True, kw_only=True)
class LayerView:
    """A layer's entries and queries, read-only.

    Letters: b sequences, Hk KV heads, Hq query heads, N entries, w queries, d head dimension.
    """

    layer: int
    keys: torch.Tensor  # [b, Hk, N, d] post-RoPE
    values: torch.Tensor | None  # [b, Hk, N, dv]; None unless the method needs them
    positions: torch.Tensor  # [b, Hk, N] int64, absolute
    valid: torch.Tensor  # [b, Hk, N] bool, False: a place without an entry, whose score is ignored
    whole: bool = False  # True: all entries are valid, so helpers skip the mask
    queries: torch.Tensor  # [b, Hq, w, d] post-RoPE, oldest first
    query_positions: torch.Tensor  # [b, w] int64
    # [b, Hk, g, N] float32, the attention that the g query heads of each group paid to every entry, summed over all
    # queries since the last tick. Set while `observe` sees generated tokens whose attention was summed by decode steps
    # (`Needs.sums`); `queries` are then empty.
    sums: torch.Tensor | None = None
    # For each number n in `Needs.newest`, [b, Hk, g, N] float32: the attention as in `sums`, summed over the newest n
    # queries. Empty unless decode steps summed it; `newest_attention` then computes it from `queries`.
    newest_sums: Mapping[int, torch.Tensor] = field(default_factory=dict)
    # [b, w, D] inputs of the layer's attention of the newest w tokens, oldest first, see `Needs.hidden`. If a
    # sequence has fewer tokens, they are the last ones. None unless the method needs them.
    hidden: torch.Tensor | None = None
    attention: OwnAttention | None = None  # None unless the method needs it
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each [b, Hk, N] float32
    states: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each [b, ...] float32
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of the whole model, see `Method.weights`
    # Set while `observe` sees a probe; `queries` are then those of the probe's tokens.
    probe: Probe | None = None
    probe_keys: torch.Tensor | None = None  # [b, Hk, m, d] keys of the probe's tokens, which `keys` lacks
    probe_positions: torch.Tensor | None = None  # [b, m]
    rope: Rope | None = None
    seen: torch.Tensor  # [b] tokens seen so far, T
    longest: int  # the largest of `seen`, known without waiting for the device
    prompt_len: torch.Tensor  # [b]
    eviction_index: torch.Tensor  # [b] earlier evictions of each sequence
    noise_key: torch.Tensor  # [b] int64, one per sample
    budget: int
    interval: int  # generated tokens between evictions
    kernels: bool = False  # whether helpers may run Triton kernels, which need a GPU
    ordinal: int = 0  # position of the layer among those that evict
    layer_count: int = 1  # layers that evict
    # Entries per head before this eviction, a mean over heads, of every layer that evicts, by ordinal; () if all layers
    # hold equally many.
    held_by_layer: tuple[int, ...] = ()
    scaling: float  # the model's softmax scale, usually 1 / sqrt(d)
    softcap: float | None = None

    @property
    def layer_index(self) -> int | torch.Tensor:
        """The layer's index in weights that are stacked over the model's layers; in a `StackView` a tensor [b]."""
        return self.layer

    def per_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as [b, L, ...]: b sequences, and the L layers whose entries are chosen together.

        A `LayerView` shows one layer, so L is 1. In a `StackView` axis 0 of x runs over pairs of a layer and a
        sequence. It is split if the layers choose their entries together. Otherwise b counts the pairs, and L is 1.
        """
        return x[:, None]

    def per_row(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `per_sequence`: return x [b, L, ...] with layers and sequences joined into axis 0."""
        return x[:, 0]

    @property
    def decided(self) -> tuple[tuple[int, int], ...]:
        """One pair (layer, ordinal) for each layer on axis 1 of the tensor that `per_sequence` returns.

        layer: the layer's index in the model; ordinal: its place among the layers that evict, from 0. The value is ()
        for a `StackView` whose layers choose their entries separately.
        """
        return ((self.layer, self.ordinal),)

    @property
    def mask(self) -> torch.Tensor | None:
        """`valid`, or None if `whole` says that all entries are valid."""
        return None if self.whole else self.valid

    def attend(
        self,
        *,
        domain: Domain = "all",
        order: Order = "softmax_then_group",
        reduce_g: Reduce | None = "mean",
        reduce_q: Reduce | None = "mean",
        among: torch.Tensor | None = None,
        newest: Sequence[int] = (),
    ) -> torch.Tensor:
        """Return the attention of `queries` to the entries, by default [b, Hk, N]: a mean over query heads and queries.

        domain, order, reduce_g, reduce_q and newest: see `window_attention`. among: [b, Hk, N] bool; the softmax runs
        over these entries only. While a probe is read, the softmax also runs over the probe's own keys, as far as they
        lie in `domain`.

        Raises ValueError if the view has `sums` in place of queries, and the arguments ask for anything but attention
        to all entries, summed over all queries.
        """
        if self.sums is not None:
            if newest or among is not None or (domain, order, reduce_q) != ("all", "softmax_then_group", "sum"):
                raise ValueError(
                    'with Needs(sums=True), `observe` may call `attend` only with reduce_q="sum" and without domain, '
                    "order, among and newest"
                )
            return reduced_group(self.sums, reduce_g)
        visible = self.mask
        if among is not None:
            visible = among if visible is None else visible & among
        return window_attention(
            self.queries,
            self.keys,
            self.query_positions,
            self.positions,
            visible,
            own_keys=self.probe_keys,
            own_positions=self.probe_positions,
            scaling=self.scaling,
            softcap=self.softcap,
            domain=domain,
            order=order,
            reduce_g=reduce_g,
            reduce_q=reduce_q,
            newest=newest,
            kernels=self.kernels,
        )

    def newest_attention(self, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return, for each number n in `counts`, the attention of every query head, summed over the newest n queries.

        Each tensor is [b, Hk, g, N]. Requires Needs(newest=counts).
        """
        if self.newest_sums:
            return [self.newest_sums[n] for n in counts]
        newest = self.last_queries(max(counts))
        return list(newest.attend(reduce_g=None, reduce_q="sum", newest=counts).unbind(dim=-2))

    def rotate(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """Return x [b, H, w, d] with each vector moved forward by `by` positions ([b, w] or [w]), or back where `by` is
        negative.

        Requires Needs(rope=True). A query that is moved back by its own position is the query before RoPE.
        """
        assert self.rope is not None, "the method must declare Needs(rope=True)"
        return self.rope.rotate(x, by)

    def at(self, device: torch.device) -> LayerView:
        """Return a copy of the view on a device, without moving the tensors that only `score` reads (`VECTORS`).

        Such copies are used to choose entries in several layers together if these layers are on different devices.
        """

        def moved(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: x.to(device) for name, x in value.items()}
            return value.to(device) if isinstance(value, torch.Tensor) else value

        shown = {f.name: moved(getattr(self, f.name)) for f in fields(self) if f.init and f.name not in VECTORS}
        return replace(self, **shown)

    def held(self) -> torch.Tensor:
        """Return the number of entries that each head holds, [b, Hk] int64."""
        b, heads, n = self.positions.shape
        return self.seen.new_full((b, heads), n) if self.whole else self.valid.sum(dim=-1)

    def last_queries(self, count: int) -> LayerView:
        """Return a copy of this view that shows only the newest `count` queries, and no `sums`."""
        skip = max(0, self.queries.shape[2] - count)
        queries, positions = self.queries[:, :, skip:], self.query_positions[:, skip:]
        return replace(self, queries=queries, query_positions=positions, sums=None)

    def recent(self, count: int) -> torch.Tensor:
        """Return the mask of entries, valid or not, among the newest `count` tokens, [b, Hk, N] bool."""
        return self.positions >= (self.seen - count)[:, None, None]

    def older(self, count: int) -> torch.Tensor:
        """Return the mask of valid entries older than the newest `count` tokens, [b, Hk, N] bool."""
        older = self.positions < (self.seen - count)[:, None, None]
        return older if self.whole else self.valid & older

    def noise(self) -> torch.Tensor:
        """Return uniform noise, [b, Hk, N] float32: a hash of sample, eviction, layer, head and position alone."""
        heads = torch.arange(self.positions.shape[1], device=self.positions.device)[None, :, None]
        layer = self.layer_index
        if not isinstance(layer, int):
            layer = layer[:, None, None]
        key = noise.mix(self.noise_key[:, None, None], self.eviction_index[:, None, None], layer, heads, self.positions)
        return noise.uniform(key).float()

    def text_order(self) -> torch.Tensor:
        """Return the indices of the entries in text order, invalid ones last, [b, Hk, N] int64."""
        key = self.positions.int()
        if not self.whole:
            key = key.masked_fill(~self.valid, torch.iinfo(torch.int32).max)
        if key.device.type == "cpu":  # numpy sorts short rows more than twice as fast as torch
            return torch.from_numpy(key.numpy().argsort(axis=-1))
        return key.argsort(dim=-1)

    def pool(
        self,
        scores: torch.Tensor,
        kind: Literal["max", "avg"],
        kernel: int,
        among: torch.Tensor,
        order: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Smooth scores [b, Hk, N] along the text over the entries marked in `among` (stride 1, same length);
        entries not in `among` become -inf.

        Neighbours are adjacent in `order` (indices as from `text_order`); None: in text order. In `order`, no other
        entry may stand between two marked ones. Max pooling ignores entries that are not marked. Average pooling counts
        them as 0 and divides by `kernel` at the ends too (zero padding), as the methods' released code does.
        """
        if order is None:
            order = self.text_order()
        inside = among.gather(-1, order)
        pad = float("-inf") if kind == "max" else 0.0
        row = torch.where(inside, scores.gather(-1, order), pad)
        smooth = torch.nn.functional.max_pool1d if kind == "max" else torch.nn.functional.avg_pool1d
        pooled = torch.empty_like(scores).scatter_(-1, order, smooth(row, kernel, stride=1, padding=kernel // 2))
        return torch.where(among, pooled, float("-inf"))


@dataclass(slots=True, kw_only=True)
class StackView(LayerView):
    """Several layers in one view, for methods that are `stacked`: axis 0 runs over pairs of a layer and a sequence.

    Reading `layer` or `ordinal` raises AttributeError, because no single layer is shown.
    """

    layers: torch.Tensor  # [b] int64, the layer of each element of axis 0
    # Index and ordinal of the layers whose entries are chosen together; axis 0 then has the same sequences for each of
    # them. () if every element of axis 0 chooses its entries separately.
    together: tuple[tuple[int, int], ...] = ()
    layer: int = field(init=False)
    ordinal: int = field(init=False)

    @property
    def layer_index(self) -> torch.Tensor:
        return self.layers

    @property
    def decided(self) -> tuple[tuple[int, int], ...]:
        return self.together

    def per_sequence(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, (max(1, len(self.together)), -1)).transpose(0, 1)

    def per_row(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).flatten(0, 1)


def make_view(
    keys: torch.Tensor,
    queries: torch.Tensor | None = None,
    *,
    budget: int,
    positions: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    columns: Mapping[str, torch.Tensor] | None = None,
    seen: int | None = None,
    prompt_len: int = 0,
    **more: Any,
) -> LayerView:
    """Return a view of keys [b, Hk, N, d] and the newest queries [b, Hq, w, d], to try out or test a method.

    Without `positions` the entries lie in text order and nothing was evicted. more: other fields of the view. Unless
    `more` has `values`, the keys serve as values.
    """
    b, _, n, d = keys.shape
    if positions is None:
        positions = torch.arange(n, device=keys.device).expand(keys.shape[:3])
    if queries is None:
        queries = keys.new_zeros(b, keys.shape[1], 0, d)
    count = torch.full((b,), int(positions.max()) + 1 if seen is None else seen, device=keys.device)
    width = queries.shape[2]
    fields: dict[str, Any] = {
        "layer": 0,
        "keys": keys,
        "values": keys,
        "positions": positions,
        "valid": torch.ones_like(positions, dtype=torch.bool) if valid is None else valid,
        "queries": queries,
        "query_positions": count[:, None] + torch.arange(-width, 0, device=keys.device),
        "columns": columns or {},
        "seen": count,
        "longest": int(count.max()),
        "prompt_len": torch.full_like(count, prompt_len),
        "eviction_index": torch.zeros_like(count),
        "noise_key": torch.arange(b, device=keys.device),
        "budget": budget,
        "interval": 128,
        "scaling": d**-0.5,
    }
    return LayerView(**(fields | more))
