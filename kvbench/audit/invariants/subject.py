"""Models to audit on: the built-in model and three random ones (GQA, MHA, MQA), or a model that the user names."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from kvbench import tiny
from kvbench.audit.outcome import NotApplicable
from kvbench.engine.model.load import LoadedModel, load, prepare
from kvbench.engine.model.weights import TABLES, Base, find, model_fields, save_weights
from kvbench.errors import KVBenchError
from kvbench.eviction.api import Method, Weights
from kvbench.eviction.combined import Combined
from kvbench.eviction.learned import LearnedWeights
from kvbench.sources.models import TINY, describe

# Name -> (configuration class, layers, query heads, KV heads, head dimension).
RANDOM: dict[str, tuple[str, int, int, int, int]] = {
    "gqa": ("Qwen3Config", 3, 4, 2, 16),
    "mha": ("LlamaConfig", 2, 2, 2, 16),
    "mqa": ("Qwen3Config", 2, 4, 1, 8),
}
SCALE = 2.0  # factor of random weights: without it attention is almost uniform, which would hide mistakes


@dataclass
class Subject:
    """A model on which methods are audited, with the weights, tables of heads and draft model that methods need.

    source: the model's folder or hub name; None for a model in memory only.
    """

    name: str
    loaded: LoadedModel
    source: str | None
    scratch: Path
    full: dict[Any, Any] = field(default_factory=dict)  # generations of the full cache, see `Exam.full`

    def serve(self, method: Method) -> tuple[Method, LoadedModel]:
        """Return the method, with a draft model and a file of weights or tables where it needs them, and the model.

        Missing weights and tables are drawn at random: no invariant depends on their quality. Raises NotApplicable for
        an oracle, and for weights of unknown shapes.
        """
        if method.oracle:
            raise NotApplicable("the method is an oracle; only 'kvbench replay' runs it")
        method = _filled(method, "draft", None, lambda: self.source or self._saved)
        weights, loaded = method.weights(), self.loaded
        if weights is None or weights.path != "auto":
            return method, loaded
        try:
            path = find(weights, loaded.folder)
        except KVBenchError:
            path = self._drawn(weights)
            loaded = dataclasses.replace(loaded, folder=path.parent)
        option = weights.option if isinstance(weights, LearnedWeights) else "table"
        return _filled(method, option, "auto", lambda: str(path)), loaded

    def _drawn(self, weights: Weights) -> Path:
        """Return the path of a file with random weights, written on first use."""
        config = self.loaded.model.config
        tensors = draw(weights, config)
        folder = self.scratch / "-".join(["drawn", *(str(size) for t in tensors.values() for size in t.shape)])
        folder.mkdir(exist_ok=True)
        path = folder / f"{weights.kind}.safetensors"
        if not path.exists():
            save_weights(path, weights.kind, tensors, Base(name=self.name, config=config), made={"how": "random"})
        return path

    @cached_property
    def _saved(self) -> str:
        """Save the model, which serves as its own draft model, and return its folder."""
        folder = self.scratch / "model"
        self.loaded.model.save_pretrained(folder)
        self.loaded.tokenizer.save_pretrained(folder)
        return str(folder)


def draw(weights: Weights, config: Any) -> dict[str, torch.Tensor]:
    """Return random weights of the kind that a method declares, in a model's shapes.

    Raises NotApplicable for other kinds.
    """
    ours, generator = model_fields(config), torch.Generator().manual_seed(0)
    if isinstance(weights, LearnedWeights):
        shapes = weights.shapes(ours)
        return {n: torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5 for n, shape in shapes.items()}
    if weights.kind not in TABLES:
        raise NotApplicable(f"there are no weights {weights.kind!r} for this model, and none can be drawn at random")
    sizes = {name: [ours[f] for f in fields] for name, fields in TABLES[weights.kind].items()}
    return {name: torch.rand(size, generator=generator) ** 4 for name, size in sizes.items()}


def _filled(method: Method, name: str, empty: Any, value: Callable[[], str]) -> Method:
    """Return the method with option `name` set to `value()` if it was `empty`; in a combined method, in each part."""
    if isinstance(method, Combined):
        first, second = (_filled(part, name, empty, value) for part in (method.first, method.second))
        return dataclasses.replace(method, first=first, second=second)
    if any(f.name == name and getattr(method, name) == empty for f in dataclasses.fields(method)):
        return dataclasses.replace(method, **{name: value()})
    return method


@contextmanager
def subjects(model: str | None) -> Iterator[list[Subject]]:
    """Yield the models to audit on: `model` alone, or the built-in model and the random ones.

    Raises SetupError or UserError if `model` cannot be loaded.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small matrices: threads cost more than they save
    try:
        with tempfile.TemporaryDirectory(prefix="kvbench-audit-") as folder:
            scratch = Path(folder)
            random = [] if model else [random_subject(name, scratch) for name in RANDOM]
            yield [named_subject(model or TINY, scratch), *random]
    finally:
        torch.set_num_threads(before)


def named_subject(name: str, scratch: Path) -> Subject:
    """Load a model by folder or hub name, in float32 on the CPU."""
    info = describe(name)
    loaded = load(str(info.folder or name), device="cpu", dtype="float32")
    return Subject(name, endless(loaded), name, _below(scratch, "named"))


def random_subject(name: str, scratch: Path) -> Subject:
    """Make the random model RANDOM[name], with the tokenizer of the built-in model."""
    kind, layers, heads, kv_heads, dim = RANDOM[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.path())
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 512, "max_position_embeddings": 4096}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = getattr(transformers, kind)(num_hidden_layers=layers, **heads_of, **sizes, **ids)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(SCALE)
    return Subject(name, endless(prepare(model.eval(), tokenizer)), None, _below(scratch, name))


def endless(loaded: LoadedModel) -> LoadedModel:
    """Return the model without stop tokens, so that every sequence reaches its longest length."""
    return dataclasses.replace(loaded, stop_ids=frozenset())


def _below(folder: Path, name: str) -> Path:
    subfolder = folder / name
    subfolder.mkdir(exist_ok=True)
    return subfolder
