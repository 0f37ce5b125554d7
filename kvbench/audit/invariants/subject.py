"""The models on which methods are audited: by default the built-in model and the random ones.

Together they cover GQA, MHA, MQA, linear attention before full attention, and prompts with images. The user may name
another model instead.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from kvbench import tiny
from kvbench.audit.invariants.prompts import Prompt, random_prompts
from kvbench.audit.outcome import NotApplicable
from kvbench.engine.model.load import LoadedModel, auto_class, load, prepare
from kvbench.engine.model.random_weights import filled, supply
from kvbench.errors import UserError
from kvbench.eviction.api import Method
from kvbench.sources.models import TINY, describe

# Name -> (configuration class, layers, query heads, KV heads, head dimension, other fields of the text model).
RANDOM: dict[str, tuple[str, int, int, int, int, dict[str, Any]]] = {
    "gqa": ("Qwen3Config", 3, 4, 2, 16, {}),
    "mha": ("LlamaConfig", 2, 2, 2, 16, {}),
    "mqa": ("Qwen3Config", 2, 4, 1, 8, {}),
    "hybrid": (
        *("Qwen3_5TextConfig", 2, 4, 2, 8),
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 1,
            "linear_key_head_dim": 8,
            "linear_num_value_heads": 2,
            "linear_value_head_dim": 8,
        },
    ),
    "vision": (
        *("Qwen3VLConfig", 2, 4, 2, 16),
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
    ),
}
# Further fields of a configuration that has its text model's configuration as a part.
VISION: dict[str, Any] = {
    "image_token_id": 511,
    "vision_config": {
        "depth": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 24,
        "patch_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}
SCALE = 2.0  # factor of random weights: without it attention is almost uniform, which would hide mistakes


@dataclass
class Subject:
    """A model on which methods are audited. It supplies what methods need: weights, tables with a number per head, a
    draft model.

    source: the model's folder or hub name; None for a model in memory only. scratch: the folder for the files that the
    subject supplies; made if missing (its parent must exist).
    """

    name: str
    loaded: LoadedModel
    source: str | None
    scratch: Path
    full: dict[Any, Any] = field(default_factory=dict)  # trials with the full cache, which all methods share

    def __post_init__(self) -> None:
        self.scratch.mkdir(exist_ok=True)

    def serve(self, method: Method) -> tuple[Method, LoadedModel]:
        """Return the method with all files that it needs, and the loaded model on which it runs.

        The files are a draft model, and weights or a table. Missing weights and tables are drawn at random, because no
        invariant depends on their quality. Raises NotApplicable for an oracle (a method that knows tokens that the
        model has yet to generate), and for a method whose weights have unknown shapes.
        """
        if method.oracle:
            raise NotApplicable("the method is an oracle; only 'kvbench replay' runs it")
        method = filled(method, "draft", None, lambda: self.source or self._saved)
        try:
            return supply(method, self.loaded, self.scratch)
        except UserError as error:
            raise NotApplicable(str(error)) from None

    def prompts(self, lengths: Sequence[int], seed: int) -> list[Prompt]:
        """Return a random prompt of each length, with images in some of them if the model reads images."""
        return random_prompts(self.loaded.model, lengths, seed)

    @cached_property
    def _saved(self) -> str:
        """Save the model to a folder, so that it can serve as its own draft model; return the folder."""
        folder = self.scratch / "model"
        self.loaded.model.save_pretrained(folder)
        self.loaded.tokenizer.save_pretrained(folder)
        return str(folder)


@contextmanager
def subjects(model: str | None) -> Iterator[list[Subject]]:
    """Yield the list of models to audit on: only `model`; if it is None, the built-in model and the random ones. Raises
    SetupError or UserError if `model` cannot be loaded."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small matrices: threads cost more than they save
    try:
        with tempfile.TemporaryDirectory(prefix="kvbench-audit-") as folder:
            scratch = Path(folder)
            named = named_subject(model or TINY, scratch)  # first, because loading silences transformers' warnings
            yield [named, *([] if model else [random_subject(name, scratch) for name in RANDOM])]
    finally:
        torch.set_num_threads(before)


def named_subject(name: str, scratch: Path) -> Subject:
    """Load the model with this folder or hub name, in float32 on the CPU."""
    info = describe(name)
    loaded = load(info.where, device="cpu", dtype="float32")
    return Subject(name, endless(loaded), name, scratch / "named")


def random_subject(name: str, scratch: Path) -> Subject:
    """Make a model with random weights and the sizes ``RANDOM[name]``; it has the built-in model's tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.path())
    config = _config(*RANDOM[name])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = auto_class(config).from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(SCALE)
    return Subject(name, endless(prepare(model.eval(), tokenizer)), None, scratch / name)


def _config(kind: str, layers: int, heads: int, kv_heads: int, dim: int, others: dict[str, Any]) -> Any:
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": dim}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 512, "max_position_embeddings": 4096}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    text = {"num_hidden_layers": layers, **heads_of, **sizes, **ids, **others}
    make = getattr(transformers, kind)
    return make(text_config=text, **VISION) if "text_config" in make.sub_configs else make(**text)


def endless(loaded: LoadedModel) -> LoadedModel:
    """Return the model without end tokens, so that every sequence reaches the length limit."""
    return dataclasses.replace(loaded, stop_ids=frozenset())
