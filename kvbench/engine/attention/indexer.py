"""Sparse attention with an indexer (DSA): a query attends only to the entries that score highest for it.

Beside attention, such a layer computes one small key per token, its index key, and a score of every index key for every
query; the query attends to the `topk` entries of the highest scores (DeepSeek-V3.2, arXiv 2512.02556, section 2.1). The
scores are computed by the model's own module, so the engine stores the index keys beside the entries, and evicts them
with the entries: the indexer chooses among the entries that the cache still holds. If these are at most `topk`, it
chooses all of them and is not asked.

Layers that use the choice of an earlier layer (`indexer_types` "shared") score their own entries with that layer's
queries: after an eviction, two layers hold entries of different tokens. So they store the index keys, too.

Letters: b sequences, t new tokens, n entries, X the dimension of an index key.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

CHILD = "indexer"  # transformers' name of the module in an attention layer
SCORES_BYTES = 1 << 26  # most bytes of the scores of several queries, before they are summed over the indexer's heads
COPIES = 3  # tensors of this size that transformers' code has at a time: products, scaled products, positive parts
MASKS = 24  # bytes per query and entry of masks, sums over heads and sorted scores


@dataclass(frozen=True, slots=True)
class IndexerCall:
    """One call of a layer's indexer in a forward pass.

    key: [b, 1, t, X], the index keys of the new tokens. inputs: the arguments of the call by name; tensors in them
    have the dimensions [b or 1, t, ...].
    """

    module: Any
    key: torch.Tensor
    inputs: dict[str, Any]

    @property
    def topk(self) -> int:
        """The most entries to which a query attends."""
        return int(self.module.index_topk)

    @property
    def heads(self) -> int:
        return int(self.module.n_heads)

    def part(self, rows: slice | Sequence[int] = slice(None), tokens: slice = slice(None)) -> IndexerCall:
        """Return the part of the call that belongs to these sequences and these new tokens."""

        def cut(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(cut(each) for each in value)
            if not isinstance(value, torch.Tensor):
                return value
            return (value if len(value) == 1 else value[rows])[:, tokens]

        inputs = {name: cut(value) for name, value in self.inputs.items()}
        return replace(self, key=self.key[rows][:, :, tokens], inputs=inputs)

    def hide(self, keys: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return the additive mask of a block of queries, in which the entries that the indexer does not choose are
        hidden, too.

        keys: [b, 1, n, X], the index keys of the entries. bias: [b or 1, 1, t, n], 0 where a query sees an entry, else
        -inf; None: every query sees every entry.
        """
        b, _, n, _ = keys.shape
        t = self.key.shape[2]
        if n <= self.topk:
            return bias
        if bias is None:
            bias = keys.new_zeros(1, 1, t, n)
        # With several sequences, torch copies the keys for every query to multiply them.
        wide = self.heads if b == 1 else max(self.heads, keys.shape[3])
        block = max(1, SCORES_BYTES // (4 * b * wide * n))
        parts = []
        for first in range(0, t, block):
            tokens = slice(first, first + block)
            mask = bias[:, :, tokens]
            chosen = self.part(tokens=tokens)._choose(keys[:, 0], mask[:, 0].expand(b, -1, n))
            hidden = torch.ones(b, mask.shape[2], n, dtype=torch.bool, device=keys.device).scatter_(-1, chosen, False)
            parts.append(mask.masked_fill(hidden[:, None], float("-inf")))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _choose(self, keys: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the indices [b, t, topk] of the chosen entries. keys: [b, n, X]; mask: [b, t, n], additive. In a model
        that is divided among devices, the indexer may be on the device of an earlier layer."""
        here = self.key.device
        arguments = self.inputs | {"attention_mask": mask.to(here), "past_key_values": _Stored(keys.to(here))}
        chosen: torch.Tensor = type(self.module).forward(self.module, **arguments)
        return chosen.long().to(keys.device)


class _Stored:
    """A cache for the indexer, which returns these index keys [b, n, X] whatever the indexer adds."""

    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        return self.keys


class _Empty:
    """A cache for the indexer, which has no entries. `added`: the index keys [b, t, X] that the indexer adds."""

    added: torch.Tensor

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        self.added = keys
        return keys[:, :0]


class IndexerHooks:
    """Hooks that hear a model's indexers and make their passes cheap; torch compiles none of them.

    An indexer runs before attention has stored the new entries. So the hooks let it score no entries, and its pass
    costs no more than its linear layers; `IndexerCall` asks it again.

    heard: gets each call, and None at the end of a forward pass of the model.
    """

    def __init__(self, heard: Callable[[IndexerCall | None], None]) -> None:
        self._heard = heard
        self._inputs: dict[int, dict[str, Any]] = {}  # of indexers in their forward pass, by id()
        self._hooks = [torch.compiler.disable(hook) for hook in (self._mask, self._before, self._after, self._end)]

    def register(self, model: Any) -> list[Any]:
        """Add the hooks to a model; return handles that remove them. A model without indexers gets none."""
        layers = [m for m in model.modules() if hasattr(getattr(m, CHILD, None), "index_topk")]
        mask, before, after, end = self._hooks
        handles = [layer.register_forward_pre_hook(mask, with_kwargs=True) for layer in layers]
        handles += [getattr(layer, CHILD).register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
        handles += [getattr(layer, CHILD).register_forward_hook(after) for layer in layers]
        return [*handles, model.register_forward_hook(end)] if layers else []

    def _mask(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Give an attention layer a mask without elements, because its code slices the mask."""
        return args, kwargs | {"attention_mask": torch.empty(1, 1, 1, 0)}

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kind: Any = type(module)
        inputs = _signature(kind).bind(module, *args, **kwargs).arguments
        del inputs["self"]
        b, t = inputs["hidden_states"].shape[:2]
        cache = inputs.get("past_key_values")
        empty = cache if isinstance(cache, _Empty) else _Empty()  # of an outer `route` block
        nothing = {"attention_mask": inputs["hidden_states"].new_zeros(b, t, 0), "past_key_values": empty}
        self._inputs[id(module)] = inputs | nothing
        return (), self._inputs[id(module)]

    def _after(self, module: Any, *_: Any) -> None:
        inputs = self._inputs.pop(id(module))
        inputs.pop("attention_mask")
        self._heard(IndexerCall(module, inputs.pop("past_key_values").added[:, None], inputs))

    def _end(self, *_: Any) -> None:
        self._heard(None)


@functools.cache
def _signature(kind: Any) -> inspect.Signature:
    return inspect.signature(kind.forward)


def scores_bytes(heads: int, size: int, t: int, n: int) -> int:
    """Return the most bytes that an indexer takes to choose among n entries for t queries of one sequence. heads: the
    indexer's heads. size: X, the dimension of an index key; the indexer converts index keys to float32."""
    query = 4 * heads * n
    return COPIES * min(t * query, max(query, SCORES_BYTES)) + 4 * size * n + MASKS * t * n
