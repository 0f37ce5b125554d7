"""Probes: tokens or embeddings that the model reads after a prompt. A method sees their queries in every evicted layer.

The entries of a probe's tokens are dropped before the model answers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import transformers

from kvbench.engine.adapter import adapted
from kvbench.engine.attention.positions import has_position_table
from kvbench.engine.cache.prompt import PromptCache
from kvbench.engine.cache.prompt_layer import PromptLayer
from kvbench.engine.cache.recurrent import copied
from kvbench.engine.model.load import LoadedModel, load_draft
from kvbench.engine.writers import BlockWriter
from kvbench.errors import SetupError, UserError, quote
from kvbench.eviction.api import Method, Probe
from kvbench.eviction.returned import observed
from kvbench.taskkit import prompts
from kvbench.taskkit.reader import ModelReader

# (writer, probe, first position) -> logits [V], length of the probe
Forward = Callable[[BlockWriter, Probe, int], tuple[torch.Tensor, int]]


class ProbeTooLong(UserError):
    """A prompt with a probe after it, or with a draft model's tokens, has more tokens than a model has positions."""

    def __init__(self, prompt: int, more: int, context: int, draft: str | None = None) -> None:
        what = "a probe" if draft is None else f"draft model {quote(draft)}"
        self.note = f"{prompt} prompt tokens + {more} tokens of {what} in a context of {context}"
        super().__init__(
            f"there are no positions for {self.note}, which the method needs. Use shorter prompts, or a method "
            "without probes."
        )


def refuse_inputs_per_layer(config: Any) -> None:
    """Raise UserError for a model that reads a separate embedding of each token in every layer, as Gemma 4: learned
    tokens have no such embeddings. config: of transformers."""
    text = config.get_text_config()
    if getattr(text, "hidden_size_per_layer_input", 0):
        raise UserError(
            f"learned tokens (lookaheadkv) do not suit model type {quote(text.model_type)}: every layer reads its own "
            "embeddings of tokens, which learned tokens lack. Use another method or model."
        )


def check_probes(method: Method, config: Any) -> None:
    """Raise UserError if the method is `lookaheadkv`, whose tokens are learned, and the model does not support them.
    Learned tokens of other methods are refused when the model would read them. config: of transformers."""
    acting = method.during("prefill")
    if acting.needs().probes and (weights := acting.weights()) is not None and weights.kind == "lookaheadkv":
        refuse_inputs_per_layer(config)


@dataclass(slots=True)
class Drafts:
    """Draft models, each loaded once. target: the model for which they draft tokens."""

    target: LoadedModel
    _loaded: dict[str, Any] = field(default_factory=dict)

    def continue_(self, name: str, ids: Sequence[int], count: int) -> tuple[int, ...]:
        """Return up to `count` greedy tokens that a draft model generates after `ids`. The tokens end before the first
        id that the target lacks. Raises SetupError when the tokenizers of the draft model and the target differ, and
        ProbeTooLong when the draft model lacks positions."""
        if name not in self._loaded:
            draft = load_draft(self.target, name)
            if _vocabulary(draft) != _vocabulary(self.target):
                raise SetupError(
                    f"draft model {quote(name)} and the run's model have different tokenizers. "
                    "Choose a draft model with the same tokenizer."
                )
            # The draft is greedy, so the model's own settings of generation, such as penalties, do not apply.
            own = draft.model.generation_config
            ends = {"eos_token_id": own.eos_token_id, "pad_token_id": own.pad_token_id}
            draft.model.generation_config = transformers.GenerationConfig(**ends)
            self._loaded[name] = draft
        model, context = self._loaded[name].model, self._loaded[name].context
        read = count - 1  # the last token is not read
        if len(ids) + read > context and has_position_table(model):
            raise ProbeTooLong(len(ids), read, context, name)
        tokens = torch.tensor([list(ids)], device=model.device)
        mask = torch.ones_like(tokens)
        out = model.generate(tokens, attention_mask=mask, max_new_tokens=count, do_sample=False, num_beams=1)
        known = self.target.model.get_input_embeddings().weight.shape[0]
        return tuple(itertools.takewhile(lambda token: token < known, out[0, len(ids) :].tolist()))


def _vocabulary(loaded: Any) -> Any:
    """Return a model's vocabulary, to be compared with that of another model.

    For a model without a tokenizer, return its number of embeddings. This number is only a last resort: models that
    share a tokenizer may pad their embedding tables differently.
    """
    if hasattr(loaded.tokenizer, "get_vocab"):
        return loaded.tokenizer.get_vocab()
    return loaded.model.get_input_embeddings().weight.shape[0]


@dataclass
class ReadPrompt:
    """A prompt that was read, as a method's `probes` receives it (implements `api.Prompt`)."""

    ids: tuple[int, ...]
    budget: int
    next_token: int
    drafts: Drafts
    header: tuple[int, ...] | None = None  # see `Request.reply_header`

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    @cached_property
    def reply_header(self) -> tuple[int, ...]:
        if self.header is not None:
            return self.header
        chat = prompts.template_text(self._tokenizer) is not None
        reader = ModelReader(tokenizer=self._tokenizer, model_type="", context=0, chat=chat)
        return reader.reply_header(thinking=None)

    def draft(self, model: str, count: int) -> tuple[int, ...]:
        return self.drafts.continue_(model, self.ids, count)

    @property
    def _tokenizer(self) -> Any:
        if (tokenizer := self.drafts.target.tokenizer) is None:
            raise UserError("the method reads extra text and needs the model's tokenizer; pass it as `tokenizer`.")
        return tokenizer


@contextlib.contextmanager
def reading(model: Any, probe: Probe, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the model's inputs for a probe, and the probe's length in tokens or embeddings. If the probe is learned,
    the model applies the adapter in `weights` inside the `with` block."""
    if not probe.learned:
        yield {"input_ids": torch.tensor([list(probe.tokens)], device=model.device)}, len(probe.tokens)
        return
    rows = weights[probe.learned].to(model.get_input_embeddings().weight)
    with adapted(model, weights):
        yield {"inputs_embeds": rows[None]}, len(rows)


def run_probes(cache: PromptCache, prompt: ReadPrompt, forward: Forward, block: int) -> None:
    """Let the model read every probe that the method yields.

    The method may change the columns and states of `cache`. In the end the cache holds no entry of a probe. forward:
    the function that reads a probe (see `Forward`); block: most queries per attention call, see `BlockWriter`. Raises
    ProbeTooLong if the model has no positions for a probe.
    """
    copies: dict[Method, PromptCache] = {}
    steps = cache.acting.probes(prompt)
    rows, states = {index: layer.rows for index, layer in cache.layers.items()}, cache.recurrent
    try:
        probe = next(steps)
        while True:
            if probe.learned:
                refuse_inputs_per_layer(prompt.drafts.target.model.config)
            evictor = probe.against
            assert evictor is None or isinstance(evictor, Method)
            if evictor is not None and evictor not in copies:
                copies[evictor] = cache.evicted_by(evictor)
            target = cache if evictor is None else copies[evictor]
            _check_positions(probe, cache, target, prompt.drafts.target)
            probe = steps.send(_run(probe, cache, target, forward, block))
    except StopIteration:
        cache.recurrent = states
        for index, layer in cache.layers.items():
            layer.truncate(rows[index])
            if not layer.geometry.evicts:
                layer.shrink()


def _check_positions(probe: Probe, cache: PromptCache, target: PromptCache, loaded: LoadedModel) -> None:
    """Raise ProbeTooLong if the probe, which is read against `target`, ends behind the model's last position. Only a
    model with a table of positions has a last position."""
    probed = target.extra + len(cache.rules.weights[probe.learned] if probe.learned else probe.tokens)
    if cache.seen + probed > loaded.context and has_position_table(loaded.model):
        raise ProbeTooLong(cache.seen, probed, loaded.context)


def _run(probe: Probe, cache: PromptCache, target: PromptCache, forward: Forward, block: int) -> int:
    """Read a probe against `target` (`cache` or an evicted copy of it); return the greedy token after the probe."""
    before = {index: layer.rows for index, layer in target.layers.items()}
    states = target.recurrent
    target.recurrent = copied(states)
    target.prompt_rows = target.prompt_rows or before
    start = cache.seen + target.extra

    def observe(layer: PromptLayer, queries: torch.Tensor, positions: torch.Tensor, _end: int, rows: int) -> None:
        index = layer.geometry.index
        first = target.prompt_rows[index]
        own = torch.arange(cache.seen, cache.seen + rows - first, device=queries.device)
        full = cache.layers[index]
        seen = (cache.prompt_rows or {}).get(index, full.rows)
        view = cache.view(full, queries, positions, seen, probe, (layer.keys[:, :, first:rows], own))
        full.write(observed(cache.rules.method, view))

    newest = {index: (layer.queries, layer.hidden) for index, layer in target.layers.items()}
    logits, rows = forward(BlockWriter(target, block, observe), probe, start)
    for index, layer in target.layers.items():
        layer.queries, layer.hidden = newest[index]  # the layer goes on storing the prompt's, not the probe's
    if probe.keep:
        target.extra += rows
    else:
        target.recurrent = states
        for index, layer in target.layers.items():
            layer.truncate(before[index])
    return int(logits.argmax())
