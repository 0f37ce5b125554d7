"""The options of one call of `kvbench bench`, and the model that it measures with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import transformers

from kvbench.config.run_config import MethodChoice
from kvbench.engine.kernels.backends import Backend
from kvbench.engine.model.load import LoadedModel, pick_device, pick_dtype, prepare
from kvbench.eviction.budget import Budget, label
from kvbench.runner.bench.shapes import LONGEST, SHAPES


class Member(NamedTuple):
    """A method at a budget. budget: None for a method that takes no budget."""

    method: MethodChoice
    budget: Budget | None

    @property
    def name(self) -> str:
        """The member's name in tables: ``gkv @512``, ``full``."""
        return self.method.label if self.budget is None else f"{self.method.label} @{label(self.budget)}"


class Load(NamedTuple):
    """The load under which every system is measured: tokens per prompt, tokens per answer, and number of sequences.

    The sequences are decoded side by side, in one slot each. sequences: None for as many as fit into memory.
    """

    prompt: int
    new_tokens: int
    sequences: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The options of a call of `kvbench bench`.

    Attributes:
        members: the methods that are measured, each at its budget. Budgets and interval mean the same as in a run.
        prompts, new_tokens, sequences: the values of the fields of `Load`; every combination is one load.
        samples: sequences that share one prompt, as the samples of a question do.
        stretch: tokens per stretch. The answers are cut into stretches of this length, and the cost per token is also
            measured in each of them; None: not measured.
        repeats: timed rounds. threads: processor threads.
        decode_attn: the attention backend while a GPU decodes, as in a run.
        compile_cpu: whether methods decode on a CPU with a compiled program, as in a run.
        baselines: systems beside the methods, all with the full cache, by their names in `shapes.BASELINES`.
        memory: bytes of GPU memory with which the number of sequences is planned, as in a run. On a GPU, torch may not
            allocate more than this. None: the whole memory of the device.
    """

    shape: str = "A"
    members: tuple[Member, ...] = (Member(MethodChoice(name="tova"), 128),)
    interval: int = 32
    prompts: tuple[int, ...] = (64,)
    new_tokens: tuple[int, ...] = (1024,)
    sequences: tuple[int | None, ...] = (1, 8, 32)
    samples: int = 1
    stretch: int | None = None
    repeats: int = 5
    threads: int = 1
    baselines: tuple[str, ...] = ("transformers",)
    decode_attn: Backend = "triton"
    compile_cpu: bool = False
    device: str = "auto"
    dtype: str = "auto"
    memory: int | None = None

    def names(self) -> list[str]:
        """Return the systems' names in tables."""
        return [member.name for member in self.members] + list(self.baselines)

    def loads(self) -> list[Load]:
        return [Load(*load) for load in itertools.product(self.prompts, self.new_tokens, self.sequences)]

    def ids(self, prompt: int, sequences: int) -> torch.Tensor:
        """Return random token ids [sequences, prompt]: each prompt is repeated for `samples` successive sequences, the
        last prompt perhaps for fewer."""
        generator = torch.Generator().manual_seed(1)
        vocabulary = int(SHAPES[self.shape][1]["vocab_size"])
        rows = -(-sequences // self.samples)
        ids = torch.randint(5, vocabulary - 5, (rows, prompt), generator=generator)
        return ids.repeat_interleave(self.samples, 0)[:sequences]


SEPARATED = 8  # tokens per separator (a comma) in random prompts; an arbitrary figure


class NoTokenizer:
    """Stands in for the tokenizer of a model with random weights.

    Methods that read additional text get one token per 4 characters. For methods that look for separators,
    `batch_decode` turns every eighth token id into a comma.
    """

    all_special_ids = ()

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return self.vocabulary

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        """Return token ids below the vocabulary's size. options: a tokenizer's options, which have no effect here."""
        return {"input_ids": [5 + ord(text[at]) % (self.vocabulary - 10) for at in range(0, len(text), 4)]}

    def decode(self, ids: Any, **options: Any) -> str:
        """Return no text, because nothing reads the answers."""
        return ""

    def batch_decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return ["," if ids[0] % SEPARATED == 0 else "a" for ids in sequences]


def build(setting: Setting) -> LoadedModel:
    """Return a model of the setting's shape with random weights and no end token, so that no answer ends early."""
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
    return replace(prepare(model, None), tokenizer=NoTokenizer(int(sizes["vocab_size"])))
