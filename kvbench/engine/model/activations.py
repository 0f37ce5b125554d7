"""Finds, without weights, the most bytes of activations outside attention that a forward pass holds at once.

Layers that keep a state may hold far more numbers per token than attention. For example, transformers' code for Mamba-2
computes products of all pairs of tokens in a chunk, for every head and every number of the state. The bytes depend only
on the model's code and shapes. So the pass runs on the meta device, where tensors have a size and no memory. Every
tensor that an operation creates is counted until the model drops the tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvbench.engine.attention.interface import route, run
from kvbench.engine.cache.recurrent import RecurrentStates, StateShape
from kvbench.engine.model import meta_results
from kvbench.engine.model.continuation import no_attention


def pass_bytes(model: Any, states: Sequence[StateShape], tokens: int, dtype: torch.dtype) -> int:
    """Return the most bytes of activations that a model holds at once while one sequence reads `tokens` more tokens.

    model: on the meta device, in bfloat16; each bfloat16 number is counted with the size of `dtype`, the run's dtype.
    states: the shapes of its recurrent layers' states. Attention is left out, because `footprint` counts it.
    """
    meta = torch.device("meta")
    before = RecurrentStates.allocate(states, 1, meta)
    ids = torch.zeros(1, tokens, dtype=torch.long, device=meta)
    with torch.inference_mode(), route(model, no_attention), LiveBytes({torch.bfloat16: dtype.itemsize}) as live:
        run(model, before, input_ids=ids, position_ids=ids, logits_to_keep=1)
    return live.peak


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations inside its `with` block create.

    now: the bytes of the tensors that exist at present; peak: the largest value of `now` so far. sizes: maps a dtype to
    the bytes to count per number, in place of the dtype's own size.
    """

    def __init__(self, sizes: Mapping[torch.dtype, int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.now = self.peak = 0
        self._known = weakref.WeakSet[torch.UntypedStorage]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = meta_results.call(func, args, kwargs or {})
        leaves = (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        if new := [leaf for leaf in leaves if leaf.untyped_storage() not in self._known]:
            given = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            inputs = {id(leaf.untyped_storage()) for leaf in given}
            for leaf in new:
                storage = leaf.untyped_storage()
                if id(storage) not in inputs and storage not in self._known:  # else a view, or a result in place
                    self._known.add(storage)
                    self._count(leaf)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        storage, dtype = tensor.untyped_storage(), tensor.dtype
        size = storage.nbytes() // dtype.itemsize * self.sizes.get(dtype, dtype.itemsize)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size)

    def _drop(self, size: int) -> None:
        self.now -= size
