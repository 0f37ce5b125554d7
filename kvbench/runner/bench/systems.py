"""The systems that `kvbench bench` measures beside each other: the engine with a method, and full-cache baselines.

A system continues every prompt of a batch and returns the times as a `Timing`. The baselines are transformers'
`generate` with its growing cache, transformers' continuous batching (`generate_batch`), and vLLM where it is installed.
The method `full` is the engine with its own full cache. Other methods differ from `full` only by their evictions, and
by the extra work that these evictions need in other steps.
"""

from __future__ import annotations

import importlib.util
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from kvbench.engine.blocks import LOOK
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.random_weights import supply
from kvbench.errors import BudgetViolation, UserError
from kvbench.eviction import choose
from kvbench.eviction.api import Method
from kvbench.eviction.budget import Budget
from kvbench.records import Request
from kvbench.runner.bench.attention import AttentionTime, attention_times
from kvbench.runner.bench.setting import Member, Setting
from kvbench.runner.bench.stopwatch import Stopwatch, Timing
from kvbench.runner.bench.vllm_process import vllm_seconds

WARM_UP = 40  # tokens per sequence before the clock starts
BLOCK = 256  # tokens of a block of transformers' continuous batching


class System(ABC):
    """A system to be measured: the engine with a method, or a baseline.

    name: its name in tables. random_weights: whether a method's trained weights were replaced by random ones.
    """

    name: str
    random_weights = False

    @property
    def planned(self) -> tuple[Method, Budget | None]:
        """The method and budget for which the system's memory is planned; for a baseline, the engine's full cache."""
        return choose.make("full", {}), None

    @abstractmethod
    def run(self, ids: torch.Tensor, tokens: int) -> Timing:
        """Generate `tokens` tokens after each prompt of ids [sequences, prompt]; return the times."""

    def warm_up(self, ids: torch.Tensor, tokens: int) -> None:
        """Generate a few tokens before the clock starts. tokens: how many tokens per prompt `run` will generate."""
        self.run(ids, min(WARM_UP, tokens))

    def attention(self, ids: torch.Tensor, tokens: int, bandwidth: float) -> tuple[AttentionTime, ...]:
        """Time the attention of a decode step with each backend; () for a baseline, and on a CPU. bandwidth: bytes that
        a copy moves per second."""
        return ()


class EngineSystem(System):
    """The engine with a method at a budget, with one slot for each sequence."""

    def __init__(self, setting: Setting, loaded: LoadedModel, member: Member) -> None:
        self.name, self.setting, self.budget = member.name, setting, member.budget
        self._folder = tempfile.TemporaryDirectory(prefix="kvbench-bench-")
        method = choose.make(member.method.name, dict(member.method.options))
        method.drafts()  # raises UserError where the user must name a draft model
        self.method, self.loaded = supply(method, loaded, Path(self._folder.name))
        self.random_weights = self.loaded is not loaded

    @property
    def planned(self) -> tuple[Method, Budget | None]:
        return self.method, self.budget

    def warm_up(self, ids: torch.Tensor, tokens: int) -> None:
        """As `System.warm_up`. The engine has the size that `run` uses, because a program is compiled for one size."""
        for _ in self._engine(ids, tokens, lambda made: None).generate(self._requests(ids, min(WARM_UP, tokens))):
            pass

    def run(self, ids: torch.Tensor, tokens: int) -> Timing:
        engine = self._engine(ids, tokens, lambda made: watch.lap(made))
        watch = Stopwatch(self.loaded.device, self.setting.stretch)
        done = list(engine.generate(self._requests(ids, tokens)))
        generated = sum(len(d.token_ids) for d in done)
        if generated != len(ids) * tokens:
            raise BudgetViolation(f"{self.name} generated {generated} tokens instead of {len(ids) * tokens}.")
        return watch.stop(len(ids), tokens, tuple(d.usage for d in done if d.usage))

    def attention(self, ids: torch.Tensor, tokens: int, bandwidth: float) -> tuple[AttentionTime, ...]:
        """Time each backend in the middle of a generation, about halfway between two ticks; () on a CPU."""
        if self.loaded.device.type != "cuda":
            return ()
        interval = self.setting.interval
        middle = min(tokens - 1, tokens // 2 // interval * interval + interval // 2)
        times: list[AttentionTime] = []

        def note(made: int) -> None:
            if made >= middle and not times:
                times.extend(attention_times(engine, bandwidth))

        engine = self._engine(ids, tokens, note)
        for _ in engine.generate(self._requests(ids, min(tokens, max(2, middle)))):
            pass
        return tuple(times)

    def _engine(self, ids: torch.Tensor, tokens: int, on_tokens: Callable[[int], None]) -> Engine:
        """Return an engine with one slot per prompt.

        on_tokens: called after each block of steps with the number of tokens that every sequence has generated. The
        steps form at least two blocks, so that `Stopwatch` can estimate the time of the first token. If stretches are
        timed (`Setting.stretch`) and the device is a CPU, a block is one step, so that `Stopwatch` sees the end of each
        stretch.
        """
        sequences = made = len(ids)  # the prompts give the first tokens
        by_step = self.setting.stretch is not None and self.loaded.device.type == "cpu"

        def on_step(tokens: int, *_: int) -> None:
            nonlocal made
            made += tokens
            on_tokens(made // sequences)

        return Engine(
            self.loaded,
            self.method,
            budget=self.budget,
            interval=self.setting.interval,
            slots=sequences,
            max_tokens=ids.shape[1] + tokens,
            on_step=on_step,
            look=1 if by_step else max(1, min(LOOK, tokens // 2)),
            backend=self.setting.decode_attn,
            program=self.setting.compile_cpu,
        )

    def _requests(self, ids: torch.Tensor, tokens: int) -> list[Request]:
        each = self.setting.samples
        return [
            Request(
                task="bench",
                doc_id=str(first),
                prompt_ids=tuple(ids[first].tolist()),
                samples=tuple(range(min(each, len(ids) - first))),
                max_new_tokens=tokens,
            )
            for first in range(0, len(ids), each)
        ]


class Generate(System):
    """The baseline of transformers' own greedy `generate` with its full DynamicCache."""

    name = "transformers"

    def __init__(self, setting: Setting, loaded: LoadedModel) -> None:
        self.loaded, self.stretch = loaded, setting.stretch

    @torch.inference_mode()
    def run(self, ids: torch.Tensor, tokens: int) -> Timing:
        watch, prompt = Stopwatch(self.loaded.device, self.stretch), ids.shape[1]

        def step(rows: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            watch.lap(rows.shape[1] - prompt)
            return torch.zeros(len(rows), dtype=torch.bool, device=rows.device)

        ids = ids.to(self.loaded.device)
        self.loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            stopping_criteria=transformers.StoppingCriteriaList([step]),
        )
        return watch.stop(len(ids), tokens)


class Continuous(System):
    """The baseline of transformers' greedy continuous batching with its paged full cache.

    transformers does not report when the prompts were read, so the speed after the first token is unknown.
    """

    name = "continuous"

    def __init__(self, setting: Setting, loaded: LoadedModel) -> None:
        if loaded.device.type == "cpu" and importlib.util.find_spec("psutil") is None:
            raise UserError(
                "--baseline continuous: transformers' continuous batching needs psutil on a CPU. "
                "Install it with 'pip install psutil'."
            )
        self.loaded = loaded

    @torch.no_grad()  # not inference_mode: transformers writes to its tensors outside of that mode
    def run(self, ids: torch.Tensor, tokens: int) -> Timing:
        watch = Stopwatch(self.loaded.device)
        blocks = len(ids) * (-(-(ids.shape[1] + tokens) // BLOCK) + 1)
        answers = self.loaded.model.generate_batch(
            inputs=ids.tolist(),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                block_size=BLOCK,
                num_blocks=blocks,
                max_batch_tokens=max(512, len(ids)),
                allow_block_sharing=len(ids.unique(dim=0)) < len(ids),  # sequences with one prompt may share its blocks
            ),
        )
        if errors := [str(answer.error) for answer in answers.values() if answer.error]:
            raise RuntimeError(errors[0])  # transformers itself returns answers without tokens
        generated = sum(len(answer.generated_tokens) for answer in answers.values())
        if generated != len(ids) * tokens:
            raise BudgetViolation(f"continuous batching generated {generated} tokens instead of {len(ids) * tokens}.")
        return watch.stop(len(ids), tokens)


class Vllm(System):
    """vLLM in a separate process, which loads the same random weights from a temporary folder."""

    name = "vllm"

    def __init__(self, setting: Setting, loaded: LoadedModel) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UserError("--baseline vllm: vLLM is not installed here. Leave it out of --baseline.")
        if loaded.device.type != "cuda":
            raise UserError("--baseline vllm can be measured on a GPU only. Leave it out of --baseline.")
        self.loaded = loaded

    def warm_up(self, ids: torch.Tensor, tokens: int) -> None:
        """Do nothing: each call of `run` starts a new process, which loads the model and warms up itself."""

    def run(self, ids: torch.Tensor, tokens: int) -> Timing:
        with tempfile.TemporaryDirectory(prefix="kvbench-vllm-") as folder:
            self.loaded.model.save_pretrained(folder)
            seconds = vllm_seconds(Path(folder), ids, tokens, str(self.loaded.dtype).removeprefix("torch."))
        return Timing(sequences=len(ids), tokens=tokens, seconds=seconds, wall=seconds)


_BASELINES: dict[str, Callable[[Setting, LoadedModel], System]] = {s.name: s for s in (Generate, Continuous, Vllm)}


def systems(setting: Setting, loaded: LoadedModel) -> list[System]:
    """Return all systems of a setting, methods first. Raises UserError for a system that cannot run here."""
    methods = [EngineSystem(setting, loaded, member) for member in setting.members]
    return [*methods, *(_BASELINES[name](setting, loaded) for name in setting.baselines)]
