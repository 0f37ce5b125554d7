"""The options of one call of `kvbench bench`, and the model that it measures with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers

from kvbench.config.run_config import MethodChoice
from kvbench.engine.kernels.backends import Backend
from kvbench.engine.model.load import LoadedModel, pick_device, pick_dtype, prepare
from kvbench.eviction.budget import Budget, label
from kvbench.runner.bench.shapes import LONGEST, SHAPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The options of a call of `kvbench bench`.

    Attributes:
        budgets: every method that takes a budget is measured at each of these. Budgets and interval mean the same as in
            a run.
        prompt, new_tokens: length of every prompt and of every answer, in tokens.
        sequences: how many sequences are decoded side by side, one slot each. Every number is a measurement of its own.
        samples: sequences that share one prompt, as the samples of a question do.
        stretch: also measure the cost per token in each stretch of this many tokens of the answers; None: measure none.
        repeats: timed rounds. threads: processor threads.
        decode_attn: the attention backend while a GPU decodes, as in a run.
        baselines: systems beside the methods, all with the full cache, by their names in `shapes.BASELINES`.
    """

    shape: str = "A"
    methods: tuple[MethodChoice, ...] = (MethodChoice(name="tova"),)
    budgets: tuple[Budget, ...] = (128,)
    interval: int = 32
    prompt: int = 64
    new_tokens: int = 1024
    sequences: tuple[int, ...] = (1, 8, 32)
    samples: int = 1
    stretch: int | None = None
    repeats: int = 5
    threads: int = 1
    baselines: tuple[str, ...] = ("transformers",)
    decode_attn: Backend = "triton"
    device: str = "auto"
    dtype: str = "auto"

    def members(self) -> list[tuple[MethodChoice, Budget | None]]:
        """Return every method at every budget. A method that takes no budget appears once."""
        return [(m, budget) for m in self.methods for budget in (self.budgets if m.takes_budget else (None,))]

    def names(self) -> list[str]:
        """Return the systems' names in tables: ``gkv @512``, ``full``, ``transformers``."""
        return [named(m, budget) for m, budget in self.members()] + list(self.baselines)

    def prompts(self, sequences: int) -> torch.Tensor:
        """Return random token ids [sequences, prompt], in which each group of `samples` successive prompts is equal."""
        generator = torch.Generator().manual_seed(1)
        vocabulary = int(SHAPES[self.shape][1]["vocab_size"])
        rows = -(-sequences // self.samples)
        ids = torch.randint(5, vocabulary - 5, (rows, self.prompt), generator=generator)
        return ids.repeat_interleave(self.samples, 0)[:sequences]


def named(method: MethodChoice, budget: Budget | None) -> str:
    return method.label if budget is None else f"{method.label} @{label(budget)}"


def build(setting: Setting) -> LoadedModel:
    """Return a model of the setting's shape with random weights, which never ends an answer."""
    transformers.logging.set_verbosity_error()
    device = pick_device(setting.device)
    dtype = pick_dtype(setting.dtype, device)
    family, sizes = SHAPES[setting.shape]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **sizes, max_position_embeddings=LONGEST, pad_token_id=0, eos_token_id=None, bos_token_id=1
    )
    with torch.device(device):
        model: Any = getattr(transformers, f"{family}ForCausalLM")(config)
        model = model.to(dtype).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return prepare(model, None)
