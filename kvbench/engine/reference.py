"""The slow reference for the engine's logits: one dense forward pass in which masks hide the evicted entries.

While the engine runs, `KeptHistory` logs the entries that every eviction kept. Afterwards one dense forward pass reads
the whole sequence, with a mask per layer and head that is built from the log. Its logits must equal the engine's within
rounding. The reference shares no cache code with the engine, so it catches off-by-one errors, and errors of
position, RoPE, compaction and GQA grouping.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvbench.engine.attention.geometry import homes
from kvbench.engine.attention.interface import AttentionCall, route, run
from kvbench.engine.images import PromptImages, image_tokens
from kvbench.engine.model.load import LoadedModel
from kvbench.records import Images


class KeptHistory:
    """Records the kept positions of every eviction; pass it as `Engine(log=...)`, see `rules.KeptLog`."""

    def __init__(self) -> None:
        self.events: dict[int, list[tuple[int, int, list[torch.Tensor]]]] = defaultdict(list)

    def __call__(self, key: int, seen: int, layer: int, kept: list[torch.Tensor]) -> None:
        self.events[key].append((seen, layer, [head.cpu().clone() for head in kept]))

    def heads(self, keys: Sequence[int], layer: int, default: int) -> int:
        """Return how many heads the cache has in a layer; `default` if the layer was never evicted.

        These are KV heads, or query heads if the method keeps entries per query head. keys: the noise keys of the
        prompt and of the sample, under which this log has recorded their evictions.
        """
        return next((len(kept) for key in keys for _, at, kept in self.events[key] if at == layer), default)

    def visible(self, keys: Sequence[int], layer: int, heads: int, length: int) -> torch.Tensor:
        """Return the mask [heads, T, T], bool: which entries each query could see. T = `length` tokens.

        The mask is causal and hides the evicted entries; it ignores sliding windows.

        heads: number of heads that the cache has in the layer; keys: the noise keys of the prompt and of the sample.
        """
        grid = torch.arange(length)
        mask = (grid[None] <= grid[:, None]).expand(heads, length, length).clone()
        for key in keys:
            for seen, at, kept in self.events[key]:
                if at != layer or seen >= length:
                    continue
                alive = torch.zeros(heads, length, dtype=torch.bool)
                for head, positions in enumerate(kept):
                    alive[head, positions] = True
                alive[:, seen:] = True
                mask[:, seen:] &= alive[:, None]  # queries from position `seen` on came after this eviction
        return mask


@torch.inference_mode()
def dense_logits(
    loaded: LoadedModel,
    ids: Sequence[int],
    history: KeptHistory,
    keys: Sequence[int],
    images: Images | None = None,
) -> torch.Tensor:
    """Return the logits [T, V] of one dense forward pass over the T tokens `ids`, under the logged masks. V: size of
    the vocabulary; keys: as in `KeptHistory.visible`; images: the images of the prompt with which `ids` begins."""
    length, home = len(ids), homes(loaded.geometry)
    device = loaded.device

    def attend(call: AttentionCall) -> torch.Tensor:
        b, hq, t, _ = call.query.shape
        hk = call.key.shape[1]
        held = history.heads(keys, home[call.layer], hk)
        grid = torch.arange(length)
        visible = history.visible(keys, home[call.layer], held, length)  # causal where nothing was ever evicted
        if call.window is not None:
            visible = visible & (grid[:, None] - grid[None] < call.window)
        visible = visible.to(device)
        if call.indexer is not None:
            bias = torch.zeros(visible.shape, device=device).masked_fill_(~visible, float("-inf"))[None]
            hidden = call.indexer.hide(call.indexer.key, bias)
            assert hidden is not None
            visible = hidden[0] == 0
        visible = visible.repeat_interleave(hq // held, dim=0)
        k = call.key.repeat_interleave(hq // hk, dim=1)
        v = call.value.repeat_interleave(hq // hk, dim=1)
        logits = (call.query.double() @ k.double().transpose(-1, -2)) * call.scaling
        if call.softcap is not None:
            logits = call.softcap * torch.tanh(logits / call.softcap)
        logits = logits.masked_fill(~visible[None], float("-inf"))
        if call.sinks is not None:
            logits = torch.cat([logits, call.sinks.double().view(1, hq, 1, 1).expand(b, hq, t, 1)], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., :length]
        return (weights @ v.double()).to(call.query.dtype).transpose(1, 2)

    tokens = torch.tensor([list(ids)], device=device)
    inputs: dict[str, Any] = {"position_ids": torch.arange(length, device=device)[None]}
    with contextlib.ExitStack() as stack:
        stack.enter_context(route(loaded.model, attend))
        if images is not None:
            tokens = stack.enter_context(_drawn_as_text(loaded.model, tokens, images))
            inputs |= PromptImages.of(loaded.model, tokens[0].tolist(), images).inputs(loaded.model, 0, length)
        out = run(loaded.model, input_ids=tokens, **inputs)
    return out.logits[0]


@contextlib.contextmanager
def _drawn_as_text(model: Any, ids: torch.Tensor, images: Images) -> Iterator[torch.Tensor]:
    """Make the dense pass treat generated image tokens as text, as the engine does.

    Yields the input for the pass: a copy of `ids` [1, T] in which id 0 replaces each image token outside the prompt's
    images. With `ids` as input, the pass would put features of an image in place of such a token. Inside the `with`
    block, the embedding layer ignores its input and embeds `ids`.
    """
    shown = torch.zeros_like(ids, dtype=torch.bool)
    for first, last in images.spans:
        shown[:, first:last] = True
    embeddings = model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, args, out: module.forward(ids))
    try:
        yield ids.masked_fill(image_tokens(model, ids) & ~shown, 0)
    finally:
        hook.remove()
