"""The systems that `kvbench bench` measures beside each other: the engine with a method, and full-cache baselines.

A system continues all prompts of a batch and returns the times as a `Timing`. The baselines are transformers'
`generate` with its growing cache, transformers' continuous batching (`generate_batch`), and vLLM where it is installed.
The method `full` is the engine with its own full cache: all other methods differ from it by their evictions only.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from kvbench.config.run_config import MethodChoice
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.random_weights import supply
from kvbench.errors import BudgetViolation, UserError
from kvbench.eviction import choose
from kvbench.eviction.budget import Budget
from kvbench.records import Request, Usage
from kvbench.runner.bench.setting import Setting, named
from kvbench.runner.bench.vllm_process import vllm_seconds

BLOCK = 256  # tokens of a block of transformers' continuous batching


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One timed generation of `tokens` tokens in each of `sequences` sequences.

    Attributes:
        seconds: by `clock`, prompts included; wall: the same in wall time.
        first, first_wall: seconds until every sequence had its first token, by `clock` and in wall time; None where the
            system does not tell.
        usages: of each sequence, from the engine; empty for a baseline.
        peak_bytes: most bytes allocated on the GPU; None on a CPU.
        costs: seconds per generated token in each whole stretch of the answers, by `clock`; see `Setting.stretch`.
    """

    sequences: int
    tokens: int
    seconds: float
    wall: float
    first: float | None = None
    first_wall: float | None = None
    usages: tuple[Usage, ...] = ()
    peak_bytes: int | None = None
    costs: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Generated tokens per second, prompts included."""
        return self.sequences * self.tokens / self.seconds

    @property
    def decode_rate(self) -> float | None:
        """Generated tokens per second after the first token of every sequence; None where that is not known."""
        return None if self.first is None else self._after(self.seconds - self.first)

    @property
    def decode_wall_rate(self) -> float | None:
        """`decode_rate` in wall time."""
        return None if self.first_wall is None else self._after(self.wall - self.first_wall)

    def _after(self, seconds: float) -> float:
        return self.sequences * (self.tokens - 1) / max(seconds, 1e-9)


class Stopwatch:
    """Times one generation and its parts: the time until the first token, and stretches of `stretch` tokens.

    A system reports its steps (`lap`). With k tokens per sequence at the first report, the first token came at
    `lap - (k - 1) * step`, with the mean step of the rest.
    """

    def __init__(self, device: torch.device, stretch: int | None = None) -> None:
        self.device, self.stretch = device, stretch
        self.began = self._now()
        self._lap: tuple[tuple[float, float], int] | None = None
        self._marks: list[tuple[float, int]] = []  # time and tokens per sequence where a stretch begins or ends
        self._next: float = 0 if stretch else math.inf

    def _now(self) -> tuple[float, float]:
        return clock(self.device), time.perf_counter()

    def lap(self, tokens: int) -> None:
        """Note that every sequence has `tokens` tokens. Reads the clock at the first call and where stretches end."""
        if self._lap is None:
            self._lap = self._now(), tokens
        if self.stretch and tokens >= self._next:
            self._marks.append((clock(self.device), tokens))
            self._next = (tokens // self.stretch + 1) * self.stretch

    def stop(self, sequences: int, tokens: int, usages: tuple[Usage, ...] = ()) -> Timing:
        """Return the measurement of a generation that has ended."""
        spent = [now - began for now, began in zip(self._now(), self.began)]
        firsts: list[float | None] = [None, None]
        if self._lap is not None and self._lap[1] < tokens:
            at, done = [now - began for now, began in zip(self._lap[0], self.began)], self._lap[1]
            firsts = [max(0.0, a - (done - 1) * (s - a) / (tokens - done)) for a, s in zip(at, spent)]
        on_gpu = self.device.type == "cuda"
        return Timing(
            sequences=sequences,
            tokens=tokens,
            seconds=spent[0],
            wall=spent[1],
            first=firsts[0],
            first_wall=firsts[1],
            usages=usages,
            peak_bytes=torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
            costs=tuple((b - a) / (n - m) / sequences for (a, m), (b, n) in itertools.pairwise(self._marks)),
        )


def clock(device: torch.device) -> float:
    """Return seconds of process CPU time on a CPU, of synchronised wall time on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


class System(ABC):
    """A system to be measured: the engine with a method, or a baseline. name: its name in tables."""

    name: str

    @abstractmethod
    def run(self, ids: torch.Tensor, tokens: int) -> Timing:
        """Generate `tokens` tokens after each prompt of ids [sequences, prompt]."""

    def warm_up(self, ids: torch.Tensor, tokens: int) -> None:
        """Generate a few tokens before the clock starts."""
        self.run(ids, tokens)


class EngineSystem(System):
    """The engine with a method at a budget, with one slot for each sequence."""

    def __init__(self, setting: Setting, loaded: LoadedModel, choice: MethodChoice, budget: Budget | None) -> None:
        self.name, self.setting, self.budget = named(choice, budget), setting, budget
        self._folder = tempfile.TemporaryDirectory(prefix="kvbench-bench-")
        method = choose.make(choice.name, dict(choice.options))
        self.method, self.loaded = supply(method, loaded, Path(self._folder.name))

    def run(self, ids: torch.Tensor, tokens: int) -> Timing:
        sequences = made = len(ids)  # the prompts give the first tokens

        def step(tokens: int, *_: int) -> None:
            nonlocal made
            made += tokens
            watch.lap(made // sequences)

        engine = Engine(
            self.loaded,
            self.method,
            budget=self.budget,
            interval=self.setting.interval,
            slots=sequences,
            max_tokens=ids.shape[1] + tokens,
            on_step=step,
        )
        watch = Stopwatch(self.loaded.device, self.setting.stretch)
        done = list(engine.generate(self._requests(ids, tokens)))
        generated = sum(len(d.token_ids) for d in done)
        if generated != sequences * tokens:
            raise BudgetViolation(f"bench made {generated} tokens instead of {sequences * tokens}.")
        return watch.stop(sequences, tokens, tuple(d.usage for d in done if d.usage))

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
    """Transformers' own loop with its full DynamicCache, greedy."""

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
    """Transformers' continuous batching with its paged full cache, greedy.

    It does not report when the prompts were read.
    """

    name = "continuous"

    def __init__(self, setting: Setting, loaded: LoadedModel) -> None:
        if loaded.device.type == "cpu" and importlib.util.find_spec("psutil") is None:
            raise UserError(
                "--baseline continuous: transformers' continuous batching needs psutil on a CPU. "
                "Install it with 'pip install psutil'."
            )
        self.loaded = loaded

    @torch.no_grad()  # it writes to its tensors outside of inference mode
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
                allow_block_sharing=self._shared(ids),
            ),
        )
        if errors := [str(answer.error) for answer in answers.values() if answer.error]:
            raise RuntimeError(errors[0])  # it logs what its thread raised, and gives back answers without tokens
        generated = sum(len(answer.generated_tokens) for answer in answers.values())
        if generated != len(ids) * tokens:
            raise BudgetViolation(f"continuous batching made {generated} tokens instead of {len(ids) * tokens}.")
        return watch.stop(len(ids), tokens)

    @staticmethod
    def _shared(ids: torch.Tensor) -> bool:
        """Return whether several sequences have the same prompt, whose blocks may then be stored once."""
        return len(ids.unique(dim=0)) < len(ids)


class Vllm(System):
    """vLLM in a process of its own, which loads the same random weights from a temporary folder."""

    name = "vllm"

    def __init__(self, setting: Setting, loaded: LoadedModel) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UserError("--baseline vllm: vLLM is not installed here. Leave it out of --baseline.")
        if loaded.device.type != "cuda":
            raise UserError("--baseline vllm is measured on a GPU only. Leave it out of --baseline.")
        self.loaded = loaded

    def warm_up(self, ids: torch.Tensor, tokens: int) -> None:
        """Do nothing: every run loads the model in a new process, which warms up itself."""

    def run(self, ids: torch.Tensor, tokens: int) -> Timing:
        with tempfile.TemporaryDirectory(prefix="kvbench-vllm-") as folder:
            self.loaded.model.save_pretrained(folder)
            seconds = vllm_seconds(Path(folder), ids, tokens, str(self.loaded.dtype).removeprefix("torch."))
        return Timing(sequences=len(ids), tokens=tokens, seconds=seconds, wall=seconds)


_BASELINES: dict[str, Callable[[Setting, LoadedModel], System]] = {s.name: s for s in (Generate, Continuous, Vllm)}


def systems(setting: Setting, loaded: LoadedModel) -> list[System]:
    """Return all systems of a setting, methods first. Raises UserError for a baseline that cannot run here."""
    methods = [EngineSystem(setting, loaded, choice, budget) for choice, budget in setting.members()]
    return [*methods, *(_BASELINES[name](setting, loaded) for name in setting.baselines)]


def held(usages: tuple[Usage, ...]) -> float:
    """Return the number of entries that a head holds, a mean over sequences and steps."""
    return statistics.fmean(usage.entries_mean for usage in usages)
