"""`PressMethod`: a scorer press of kvpress as an eviction method.

At an eviction, a press is called once per sequence and layer, as kvpress calls it, with the entries in text order:

    press.compression_ratio = 1 - C / N        (budget C, N entries, Hk KV heads)
    score [1, Hk, N] = press.score(module, hidden states, keys, values, None, {"position_embeddings": (cos, sin)})

`module` is the model's own attention module. The cosines and sines belong to the true positions of the hidden states.
When the prompt is evicted, a press gets as many hidden states of prompt tokens as it can read, as in kvpress. While
decoding, it gets the hidden states of the newest tokens, which the engine stores. kvpress's own `DecodingPress` differs
while decoding: it forgets its hidden states at every eviction, and orders the entries in its cache by score, not as in
the text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

from kvbench.console import faults
from kvbench.errors import KVBenchError, UserError
from kvbench.eviction import noise
from kvbench.eviction.api import Allocation, Method, Needs, Once, Trigger
from kvbench.eviction.choose import from_label
from kvbench.eviction.declare import WHOLE
from kvbench.eviction.options import OptionError
from kvbench.eviction.view import LayerView, OwnAttention
from kvbench.integrations.kvpress.facts import ATTENTION, VERSION, Facts
from kvbench.integrations.kvpress.options import BUFFER, RATIO, takes_press
from kvbench.lazy import torch


@dataclass(frozen=True)
class PressMethod(Method):
    """Base of all methods ``kvpress:NAME``; `family.member` adds a field for every option of the press."""

    paper = f"kvpress {VERSION}"
    version = f"1 (kvpress {VERSION})"
    kind = "press"
    ragged = False

    press_class: ClassVar[type]
    facts: ClassVar[Facts]

    def __post_init__(self) -> None:
        super().__post_init__()
        sinks = (self.inner or self)._stays  # of the press that reads hidden states
        if self._facts.hidden == "many" and self._buffer <= sinks:
            raise OptionError(
                BUFFER,
                f"must be more than {sinks}: the press leaves out the first {sinks} of the tokens that it reads; "
                f"got {self._buffer}.",
            )
        self.scorer  # noqa: B018  # a press checks its own options

    @cached_property
    def inner(self) -> PressMethod | None:
        """The method for the inner press, if an option of this press names another press; else None."""
        names = [n for n in self.press_options if takes_press(self.press_class, n)]
        made = [from_label(f"kvpress:{getattr(self, name)}") for name in names]
        return made[0] if made else None  # type: ignore[return-value]

    @property
    def press_options(self) -> dict[str, Any]:
        own = {BUFFER, "protection"}
        return {name: value for name, value in self.options().items() if name not in own}

    @cached_property
    def scorer(self) -> Any:
        """kvpress's own object for this press. An error that kvpress raises for the options passes unchanged."""
        inner = None if self.inner is None else self.inner.scorer
        values = {n: inner if takes_press(self.press_class, n) else v for n, v in self.press_options.items()}
        return self.press_class(**values)

    @property
    def _facts(self) -> Facts:
        """The facts of the press that reads hidden states: the inner press or, without an inner press, this one."""
        return self.facts if self.inner is None else self.inner._facts

    @property
    def _buffer(self) -> int:
        return getattr(self, BUFFER, 0)

    @property
    def _stays(self) -> int:
        return sum(getattr(self, name) for name in self.facts.stays)

    def _width(self, many: int, every: int) -> int:
        """Return how many hidden states the press reads.

        many, every: the number to return for presses whose `Facts.hidden` is "many" or "every". If this press has an
        inner press, the facts of the inner press decide.
        """
        if self.inner is not None:
            return self.inner._width(many, every)
        window = getattr(self, "window_size", 0) + 1
        return {"none": 0, "last": 1, "window": window, "many": many, "every": every}[self.facts.hidden]

    def needs(self) -> Needs:
        prompt, weights = self._width(WHOLE, WHOLE), self.facts.weights
        return Needs(
            values=True,
            hidden=self._width(self._buffer, 0),
            prompt_hidden=prompt,
            attention=ATTENTION if prompt or weights else (),
            layer_weights=weights,
        )

    def trigger(self, interval: int) -> Trigger:
        return Once() if self._facts.hidden == "every" else super().trigger(interval)

    def min_budget(self) -> int:
        inner = 1 if self.inner is None else self.inner.min_budget()
        return max(super().min_budget(), self._stays + 1, inner)

    def notes(self) -> tuple[str, ...]:
        if not (self._facts.future and self.decode_bounded):
            return ()
        return (
            "this press predicts the attention of future tokens. kvpress derives their positions from the number of "
            f"hidden states that the press gets (while decoding at most {self._buffer}, option {BUFFER}), not from the "
            "true length.",
        )

    def score(self, view: LayerView) -> torch.Tensor:
        order = view.text_order()
        return torch.stack([self._scores(view, row, order[row]) for row in range(len(order))])

    def _scores(self, view: LayerView, row: int, order: torch.Tensor) -> torch.Tensor:
        """Return the scores [Hk, N] of one sequence. order: the indices of its entries in text order, [Hk, N].

        Raises UserError if the heads hold different numbers of entries, or if kvpress fails.
        """
        held = view.held()[row]
        if not bool((held == held[0]).all()):
            raise UserError(f"{type(self).__name__} needs equally many entries in all heads. Use another method.")
        assert view.values is not None
        inside = order[:, : int(held[0])]
        keys, values = (_taken(x[row], inside) for x in (view.keys, view.values))
        setattr(self.scorer, RATIO, ratio(inside.shape[1], view.budget))
        with torch.no_grad(), _seeded(view, row), _handle(view.attention) as module, _own_failures(type(self).__name__):
            hidden, rotary = _newest(view, row)
            scores = self.scorer.score(module, hidden, keys, values, None, {"position_embeddings": rotary})
        all_scores = keys.new_full(order.shape, float("-inf"), dtype=torch.float32)
        return all_scores.scatter_(-1, inside, scores[0].float())


@dataclass(frozen=True)
class LayeredPressMethod(PressMethod):
    """A press whose `get_layer_budget` gives each layer a budget of its own. This function is called with the number of
    tokens seen so far, as if no entry had been evicted yet."""

    def quotas(self, allocation: Allocation) -> torch.Tensor:
        shares = torch.tensor([self._shares(allocation, int(seen)) for seen in allocation.seen])  # [b, layers]
        shares = shares.to(allocation.held.device)[:, list(allocation.ordinals), None]
        return shares.expand_as(allocation.held)

    def _shares(self, allocation: Allocation, tokens: int) -> list[int]:
        count, budget = allocation.layer_count, allocation.budget
        setattr(self.scorer, RATIO, ratio(tokens, budget))
        config = SimpleNamespace(num_hidden_layers=count)
        handles = [SimpleNamespace(layer_idx=index, config=config) for index in range(count)]
        shares = [self.scorer.get_layer_budget(handle, tokens) for handle in handles]
        shares[0] -= max(0, sum(shares) - count * budget)  # rounding
        return shares


def ratio(entries: int, budget: int) -> float:
    """Return the compression ratio, 1 - budget / entries, or 0 if the budget exceeds the entries.

    If rounding would make kvpress keep fewer than `budget` entries, the ratio is slightly smaller.
    """
    removed = max(0.0, 1 - budget / entries)
    while int(entries * (1 - removed)) < min(budget, entries):
        removed -= 2.0**-53
    return removed


def seed_of(noise_key: torch.Tensor | int, eviction: torch.Tensor | int, layer: int) -> int:
    """Return the seed of torch's generator while a press scores one layer at one eviction."""
    return int(noise.mix(noise_key, eviction, layer))


def _taken(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return the vectors of x [Hk, N, d] at the indices `order` [Hk, n], as [1, Hk, n, d]."""
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[-1]))[None]


def _newest(view: LayerView, row: int) -> tuple[Any, Any]:
    """Return the stored hidden states of a sequence's newest tokens, and RoPE's cosines and sines at the positions of
    these tokens. Returns (None, None) if the method reads no hidden states."""
    if view.hidden is None or view.attention is None:
        return None, None
    seen = int(view.seen[row])
    width = min(view.hidden.shape[1], seen)
    hidden = view.hidden[row : row + 1, view.hidden.shape[1] - width :]
    return hidden, view.attention.rotary(hidden, torch.arange(seen - width, seen, device=hidden.device)[None])


@contextlib.contextmanager
def _seeded(view: LayerView, row: int) -> Iterator[None]:
    """Inside this `with` block, torch draws numbers that depend only on the sample, the eviction and the layer.

    Afterwards torch's generator continues from its state before the block.
    """
    device = view.keys.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed_of(view.noise_key[row], view.eviction_index[row], view.layer))
        yield


@contextlib.contextmanager
def _handle(attention: OwnAttention | None) -> Iterator[Any]:
    """Yield the layer's attention module; None if `attention` is None. Inside the `with` block, the module has the
    attribute `rotary_emb`, which kvpress reads."""
    if attention is None:
        yield None
        return
    attention.module.__dict__["rotary_emb"] = attention.rotary  # not as a submodule
    try:
        yield attention.module
    finally:
        del attention.module.__dict__["rotary_emb"]


@contextlib.contextmanager
def _own_failures(name: str) -> Iterator[None]:
    """Turn an error of kvpress's code inside the `with` block into UserError. Errors of memory and devices pass
    unchanged. name: the press, for the message."""
    try:
        yield
    except Exception as error:
        if isinstance(error, KVBenchError) or faults.of_machine(error):
            raise
        reason = faults.first_line(error).rstrip(".")
        raise UserError(
            f"kvpress {VERSION} failed in {name} ({type(error).__name__}: {reason}). "
            "Use other options or another method."
        ) from error
