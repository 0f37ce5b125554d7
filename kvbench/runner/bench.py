"""Measures the engine's speed beside that of `transformers.generate`, in one process and one run.

Random weights of a named shape, greedy decoding, equal prompts. The systems take turns, repetition by repetition, so
that a busy machine slows both; each figure is the median over the repetitions. On a CPU, tokens are counted per second
of process CPU time, which other processes disturb less than wall time; on a GPU per second of wall time. Ratios
transfer between machines, absolute numbers do not. Only speed is measured: random weights give no quality to compare.

On a CPU every repetition runs in a fresh copy of the process and is timed twice there, because the baseline changes:
its growing cache asks for new memory at every step, and in a fresh process glibc hands the old pages back to the system
each time. After a first long generation glibc keeps them, and transformers becomes up to twice as fast. "fresh" is the
speed of a job that generates once, "warm" the speed of a job that continues. Both occur in practice: both are shown.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

from kvbench.console import signals
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import LoadedModel, pick_device, pick_dtype, prepare
from kvbench.engine.model.shape import ModelShape
from kvbench.engine.plan import Machine, measure, roofline
from kvbench.errors import BudgetViolation, KVBenchError, UserError, quote
from kvbench.eviction import choose
from kvbench.eviction.api import Method
from kvbench.records import Request

_SMALL: dict[str, Any] = dict(vocab_size=4096, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True)
SHAPES: dict[str, Any] = {
    "A": dict(_SMALL, hidden_size=256, intermediate_size=768, num_hidden_layers=4, head_dim=32),
    "B": dict(_SMALL, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, head_dim=64),
    "qwen3-4b": dict(
        vocab_size=151936,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        head_dim=128,
    ),
    "r1-distill-qwen-7b": dict(
        model_type="qwen2",
        vocab_size=152064,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
    ),
}


WARM_UP = 40  # tokens before the clock starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The options of a benchmark. Budget and interval as in a run; `sequences` decode side by side, one slot each."""

    shape: str = "A"
    method: str = "tova"
    budget: int = 128
    interval: int = 32
    prompt: int = 64
    new_tokens: int = 1024
    sequences: tuple[int, ...] = (1, 8, 32)
    repeats: int = 5
    threads: int = 1
    baseline: str = "transformers"  # or "none"
    device: str = "auto"
    dtype: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Median speeds of a process that is "fresh" or "warm": tokens per second of CPU time (on CUDA: wall time)."""

    kvbench: float
    kvbench_spread: tuple[float, float]  # smallest and largest
    baseline: float | None
    baseline_spread: tuple[float, float] | None
    ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result for one number of sequences."""

    sequences: int
    fresh: State
    warm: State
    evict_share: float  # of decode + evict time
    roofline_share: float  # wall-time tokens/s over the most that this machine allows


def bench(setting: Setting, note: Callable[[str], None] = lambda text: None) -> list[Measured]:
    """Measure every number of sequences. `note` receives each round's name. Raises UserError for invalid options."""
    if setting.shape not in SHAPES:
        raise UserError(f"--shape {quote(setting.shape)}: choose {', '.join(SHAPES)}.")
    if setting.baseline not in ("transformers", "none"):
        raise UserError(f"--baseline {quote(setting.baseline)}: choose transformers, none.")
    if setting.repeats < 1:
        raise UserError(f"--repeats must be 1 or more; got {setting.repeats}.")
    method = choose.make(setting.method, {})
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # until the processes are forked: threads do not survive a fork
    try:
        loaded = _build(setting)
        machine = measure(loaded.device, loaded.dtype)
        return [_measure(setting, method, loaded, machine, n, note) for n in setting.sequences]
    finally:
        torch.set_num_threads(before)


def _build(setting: Setting) -> LoadedModel:
    """A model of the named shape with random weights."""
    transformers.logging.set_verbosity_error()
    device = pick_device(setting.device)
    dtype = pick_dtype(setting.dtype, device)
    torch.manual_seed(0)
    sizes = {"model_type": "qwen3", **SHAPES[setting.shape]}
    config = transformers.AutoConfig.for_model(
        **sizes, max_position_embeddings=40960, pad_token_id=0, eos_token_id=None, bos_token_id=1
    )
    with torch.device(device):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return prepare(model, None)


def _measure(
    setting: Setting,
    method: Method,
    loaded: LoadedModel,
    machine: Machine,
    sequences: int,
    note: Callable[[str], None],
) -> Measured:
    generator = torch.Generator().manual_seed(1)
    vocabulary = int(SHAPES[setting.shape]["vocab_size"])
    ids = torch.randint(5, vocabulary - 5, (sequences, setting.prompt), generator=generator)
    ours: list[tuple[_Run, _Run]] = []
    theirs: list[tuple[float, float]] = []
    for repeat in range(setting.repeats):
        note(f"{sequences} sequences, round {repeat + 1} of {setting.repeats}")
        ours.append(_apart(setting, loaded, lambda n: _run_engine(setting, method, loaded, ids, n)))
        if setting.baseline == "transformers":
            theirs.append(_apart(setting, loaded, lambda n: _run_generate(loaded, ids, n)))
    held = setting.budget + setting.interval / 2 if method.takes_budget else setting.prompt + setting.new_tokens / 2
    parameters = sum(p.numel() for p in loaded.model.parameters())
    shape = ModelShape(geometry=loaded.geometry, parameters=parameters, streamed=parameters)
    limit = roofline(shape, machine, sequences, held, loaded.dtype)
    runs = [run for pair in ours for run in pair]
    return Measured(
        sequences=sequences,
        fresh=_state([first.rate for first, _ in ours], [first for first, _ in theirs]),
        warm=_state([second.rate for _, second in ours], [second for _, second in theirs]),
        evict_share=statistics.median(run.evict_share for run in runs),
        roofline_share=statistics.median(run.wall_rate for run in runs) / limit,
    )


def _state(ours: list[float], theirs: list[float]) -> State:
    return State(
        kvbench=statistics.median(ours),
        kvbench_spread=(min(ours), max(ours)),
        baseline=statistics.median(theirs) if theirs else None,
        baseline_spread=(min(theirs), max(theirs)) if theirs else None,
        ratio=statistics.median(ours) / statistics.median(theirs) if theirs else None,
    )


def _apart(setting: Setting, loaded: LoadedModel, run: Callable[[int], Any]) -> Any:
    """Warm up with a few tokens, then run twice: in a forked process, or in this process on CUDA, which cannot fork."""

    def work() -> Any:
        torch.set_num_threads(setting.threads)
        run(min(WARM_UP, setting.new_tokens))
        return run(setting.new_tokens), run(setting.new_tokens)

    if loaded.device.type == "cuda":
        return work()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=lambda: sender.send(work()))
    process.start()
    signals.at_end(process.kill)
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        raise KVBenchError("a measuring process ended without a result; its message is above.") from None
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
        signals.not_at_end(process.kill)


def _clock(device: torch.device) -> float:
    """Seconds of process CPU time on a CPU, of synchronised wall time on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


@dataclass(frozen=True, slots=True)
class _Run:
    rate: float  # generated tokens per second by `_clock`; the time includes reading the prompts
    evict_share: float
    wall_rate: float  # tokens per second of wall time


def _run_engine(setting: Setting, method: Method, loaded: LoadedModel, ids: torch.Tensor, tokens: int) -> _Run:
    engine = Engine(
        loaded,
        method,
        budget=setting.budget if method.takes_budget else None,
        interval=setting.interval,
        slots=len(ids),
        max_tokens=ids.shape[1] + tokens,
    )
    requests = [
        Request(task="bench", doc_id=str(i), prompt_ids=tuple(row), max_new_tokens=tokens)
        for i, row in enumerate(ids.tolist())
    ]
    wall, began = time.perf_counter(), _clock(loaded.device)
    done = list(engine.generate(requests))
    spent, wall = _clock(loaded.device) - began, time.perf_counter() - wall
    generated = sum(len(d.token_ids) for d in done)
    if generated != len(ids) * tokens:
        raise BudgetViolation(f"bench made {generated} tokens instead of {len(ids) * tokens}.")
    used = [d.usage for d in done if d.usage]
    evict, decode = sum(u.evict_seconds for u in used), sum(u.decode_seconds for u in used)
    return _Run(generated / spent, evict / max(evict + decode, 1e-9), generated / wall)


def _run_generate(loaded: LoadedModel, ids: torch.Tensor, tokens: int) -> float:
    """Generated tokens per second (by `_clock`) of transformers' own loop with its full DynamicCache."""
    ids = ids.to(loaded.device)
    with torch.inference_mode():
        began = _clock(loaded.device)
        loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        return ids.numel() // ids.shape[1] * tokens / (_clock(loaded.device) - began)


def as_json(setting: Setting, results: list[Measured]) -> dict[str, Any]:
    """The JSON document: results, and all that is needed to repeat the measurement."""
    device = pick_device(setting.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "setting": asdict(setting),
        "rows": [asdict(r) for r in results],
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "clock": "wall" if device.type == "cuda" else "cpu",
    }
