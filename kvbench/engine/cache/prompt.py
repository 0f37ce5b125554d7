"""A prompt's KV while it is read: layers that grow by blocks, are evicted, and are handed over packed.

A layer may be evicted as soon as it was attended to, so the peak can be one layer's full KV plus the budgets. Heads
may end with different numbers of entries; they are then padded to the longest, and `valid` says which rows exist.

Letters: b prompts of equal length (one, except in `EvictionCache`), Hk KV heads, n rows, D head dimension, t new
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.attention.interface import AttentionCall
from kvbench.errors import BudgetViolation, UserError
from kvbench.eviction import noise, select
from kvbench.eviction.api import Method, Probe
from kvbench.eviction.columns import expanded
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.rope import Rope
from kvbench.eviction.view import LayerView

# (noise key, tokens seen, layer, kept positions of each head)
KeptLog = Callable[[int, int, int, list[torch.Tensor]], None]


@dataclass(slots=True)
class PackedLayer:
    """One layer of one sequence, the rows of its heads one after the other."""

    lengths: list[int]  # of each head
    keys: torch.Tensor  # [sum of lengths, D]
    values: torch.Tensor
    positions: torch.Tensor  # [sum of lengths] int32
    columns: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]
    queries: torch.Tensor  # [Hq, w, D] the newest ones, oldest first

    def bytes(self) -> int:
        tensors = [self.keys, self.values, self.positions, self.queries, *self.columns.values(), *self.states.values()]
        return sum(t.numel() * t.element_size() for t in tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What decides about a sequence, wherever its entries lie."""

    method: Method
    budget: int | None  # entries; None: the method takes none
    interval: int  # generated tokens between evictions
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    rope: Rope | None = None


def allowed(method: Method, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
    """Entries that an eviction may leave. Raises BudgetViolation when a bounded method wants more than its budget."""
    entries = method.allowed(budget, prompt_len, seen, evictions)
    if budget is not None and method.decode_bounded and entries > budget:
        raise BudgetViolation(f"budget exceeded: {type(method).__name__} wants {entries} entries of {budget}.")
    return entries


def given(method: Method, rules: Rules, geometry: LayerGeometry, call: AttentionCall) -> dict[str, torch.Tensor]:
    """Columns [b, Hk, t] that new tokens of a layer bring with them. Raises UserError when the model hides them."""
    if not method.reads_tokens or not geometry.evicts:
        return {}
    if call.hidden is None:
        raise UserError(f"{type(method).__name__} reads hidden states, which layer {call.layer} does not hand over.")
    return method.on_tokens(
        NewTokens(layer=call.layer, hidden=call.hidden, keys=call.key, values=call.value, weights=rules.weights)
    )


def check_held(held: float, most: int) -> None:
    """Raises BudgetViolation when layers that were decided about one by one hold more than allowed together."""
    if held > most + 1e-6:
        raise BudgetViolation(f"budget exceeded: {held:.2f} entries per head kept, {most} allowed.")


class PromptLayer:
    """One layer of b prompts."""

    def __init__(
        self, geometry: LayerGeometry, b: int, rows: int, method: Method, queries: int, like: torch.Tensor
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
        self.rows = 0
        self.valid: torch.Tensor | None = None  # [b, Hk, rows]; None: every row exists

    def append(self, key: torch.Tensor, value: torch.Tensor, query: torch.Tensor, start: int) -> None:
        """Add t tokens from position `start`: key, value [b, Hk, t, D], query [b, Hq, t, D]."""
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
        self.rows = end

    def keep(self, mask: torch.Tensor) -> None:
        """Drop all rows but those of mask [b, Hk, rows]; memory follows."""
        counts = mask.sum(dim=-1)
        longest = int(counts.max())
        # A stable sort brings the kept to the front without changing their order.
        order = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)[..., :longest]
        self._take(order)
        exists = torch.arange(longest, device=mask.device) < counts[..., None]
        self.valid = None if bool(exists.all()) else exists

    def truncate(self, rows: int) -> None:
        """Forget the rows from `rows` on."""
        self.rows = rows
        if self.valid is not None:
            self.valid = self.valid[:, :, :rows]

    def forget_before(self, position: int) -> None:
        """Drop the tokens that a sliding window has left behind."""
        first = int((self.positions[0, 0, : self.rows] < position).sum())
        order = torch.arange(first, self.rows, device=self.keys.device).expand(*self.positions.shape[:2], -1)
        self._take(order)

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
        )

    def held(self) -> float:
        """Mean entries over heads (and prompts)."""
        return float(self.rows if self.valid is None else self.valid.float().sum(dim=-1).mean())

    def bytes(self) -> int:
        """Of K and V and all that is stored beside them."""
        tensors = [self.keys, self.values, self.queries, *self.columns.values(), *self.states.values()]
        return sum(t.numel() * t.element_size() for t in tensors) + 4 * self.positions.numel()

    def _take(self, order: torch.Tensor) -> None:
        """Make the rows [b, Hk, m] of every head the only ones."""

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


class PromptCache:
    """All layers of b equally long prompts.

    Args:
        rules: method and budget that `evict` applies.
        queries: how many of the newest queries every layer keeps.
        size: tokens to make room for.
        noise_keys: of the prompts.
    """

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        rules: Rules,
        *,
        prompt_len: int,
        queries: int,
        size: int,
        noise_keys: Sequence[int],
        device: torch.device,
        log: KeptLog | None = None,
    ) -> None:
        self.geometry, self.rules, self.queries, self.size, self.log = geometry, rules, queries, size, log
        self.acting = rules.method.during("prefill")
        self.evicting = [g for g in geometry if g.evicts]
        self.ordinal = {g.index: i for i, g in enumerate(self.evicting)}
        self.layers: dict[int, PromptLayer] = {}
        self.prompt_len, self.seen, self.evictions = prompt_len, 0, 0
        self.noise_keys = [noise.signed64(key) for key in noise_keys]
        self.device = device
        self.peak_bytes = 0
        self.prompt_rows: dict[int, int] = {}  # rows of each layer that no probe added; empty before the first probe
        self.extra = 0  # tokens of kept probes
        self._by_index = {g.index: g for g in geometry}

    def layer(self, index: int, like: torch.Tensor) -> PromptLayer:
        """A layer, made when it is first needed; `like` gives its number type."""
        if index not in self.layers:
            b = len(self.noise_keys)
            self.layers[index] = PromptLayer(self._by_index[index], b, self.size, self.rules.method, self.queries, like)
            self.measure()
        return self.layers[index]

    def measure(self) -> None:
        self.peak_bytes = max(self.peak_bytes, sum(layer.bytes() for layer in self.layers.values()))

    def allowed(self) -> int:
        return allowed(self.acting, self.rules.budget, self.prompt_len, self.seen, self.evictions)

    def view(
        self,
        layer: PromptLayer,
        queries: torch.Tensor,
        query_positions: torch.Tensor,
        rows: int,
        probe: Probe | None = None,
        own: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> LayerView:
        """What the method sees of a layer's first `rows` rows. own: keys and positions of a probe's own rows."""
        g, b = layer.geometry, len(self.noise_keys)
        positions = layer.positions[:, :, :rows]
        valid = layer.valid
        if valid is None:
            valid = torch.ones(1, dtype=torch.bool, device=self.device).expand(positions.shape)

        def same(value: int) -> torch.Tensor:
            return torch.full((b,), value, device=self.device)

        return LayerView(
            layer=g.index,
            ordinal=self.ordinal[g.index],
            layer_count=len(self.evicting),
            keys=layer.keys[:, :, :rows],
            values=layer.values[:, :, :rows] if self.rules.method.needs().values else None,
            positions=positions,
            valid=valid[:, :, :rows],
            whole=layer.valid is None,
            queries=queries,
            query_positions=query_positions.expand(b, -1),
            columns={name: column[:, :, :rows] for name, column in layer.columns.items()},
            states=layer.states,
            weights=self.rules.weights,
            seen=same(self.seen),
            prompt_len=same(self.prompt_len),
            eviction_index=same(self.evictions),
            noise_key=torch.tensor(self.noise_keys, device=self.device),
            budget=self.allowed() if probe is None else self.rules.budget or 0,
            interval=self.rules.interval,
            scaling=g.scaling,
            softcap=g.softcap,
            probe=probe,
            probe_keys=own[0] if own else None,
            probe_positions=own[1].expand(b, -1) if own else None,
            rope=self.rules.rope,
        )

    def observe(self, layer: PromptLayer, view: LayerView) -> None:
        """Let the method see queries, and store what it makes of them."""
        for name, value in self.rules.method.observe(view).items():
            if name in layer.columns:
                layer.columns[name][:, :, : value.shape[-1]] = value
            else:
                layer.states[name] = value

    def hand_over(self, layer: PromptLayer, queries: torch.Tensor, positions: torch.Tensor, rows: int) -> None:
        """Let the method see a block of the prompt's own queries, the last of which sees `rows` rows."""
        before, self.seen = self.seen, int(positions[-1]) + 1
        self.observe(layer, self.view(layer, queries, positions, rows))
        self.seen = before

    def full(self) -> bool:
        """Whether more is held than may stay."""
        held = [self.layers[g.index].held() for g in self.evicting if g.index in self.layers]
        trigger = self.acting.trigger(1)
        return bool(held) and trigger.full(sum(held) / len(held), self.allowed())

    def evict(self, indices: Sequence[int]) -> None:
        """Let the method decide about these layers, and drop what it does not keep."""
        layers = [self.layers[i] for i in indices]
        for layer, verdict in zip(layers, self._decide(self.acting, layers)):
            for name, value in verdict.columns.items():
                if name in layer.columns:
                    layer.columns[name][:, :, : layer.rows] = value
                else:
                    layer.states[name] = value
            if self.log is not None:
                for i, key in enumerate(self.noise_keys):
                    heads = zip(layer.positions[i, :, : layer.rows], verdict.keep[i])
                    self.log(key, self.seen, layer.geometry.index, [p[k] for p, k in heads])
            layer.keep(verdict.keep)

    def reduce(self) -> bool:
        """Evict all layers if more is held than may stay, and say whether. The caller counts the decision."""
        if not (self.acting.evicts and self.full()):
            return False
        indices, most = [g.index for g in self.evicting], self.allowed()
        for group in [[i] for i in indices] if self.acting.layerwise else [indices]:
            self.evict(group)
        check_held(self.held(), most)
        return True

    def answer(self, noise_keys: Sequence[int]) -> None:
        """From here on the sequences are answers: the method at work while decoding decides, by other noise."""
        method = self.rules.method.during("decode")
        self.rules, self.acting = replace(self.rules, method=method), method
        self.noise_keys = [noise.signed64(key) for key in noise_keys]

    def evicted_by(self, method: Method) -> PromptCache:
        """A copy that another method evicted to the same budget, for probes."""
        rules = replace(self.rules, method=method, weights={})
        other = PromptCache(
            self.geometry,
            rules,
            prompt_len=self.prompt_len,
            queries=self.queries,
            size=0,
            noise_keys=self.noise_keys,
            device=self.device,
        )
        other.seen = self.seen
        other.layers = {i: layer.copy() for i, layer in self.layers.items()}
        if other.full():
            layers = [other.layers[g.index] for g in other.evicting]
            for layer, verdict in zip(layers, other._decide(method, layers)):
                layer.keep(verdict.keep)
        self.peak_bytes = max(
            self.peak_bytes, sum(layer.bytes() for cache in (self, other) for layer in cache.layers.values())
        )
        return other

    def forget_windows(self) -> None:
        """Rows that a sliding-window layer will not read again."""
        for g in self.geometry:
            if g.window is not None:
                self.layers[g.index].forget_before(self.seen - g.window + 1)

    def held(self) -> float:
        """Mean entries over evicting layers and heads."""
        return sum(self.layers[g.index].held() for g in self.evicting) / max(1, len(self.evicting))

    def _decide(self, method: Method, layers: Sequence[PromptLayer]) -> list[select.Decision]:
        width = method.needs().width
        at = torch.arange(self.seen - width, self.seen, device=self.device)
        views = []
        for layer in layers:
            queries = layer.queries[:, :, layer.queries.shape[2] - width :]
            views.append(self.view(layer, queries, at, layer.rows))
        return select.decide(method, views)
