"""Results of `kvbench bench`: a `Measured` per system and load. Speeds and times are medians over rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

from kvbench.engine.kernels.backends import Backend
from kvbench.engine.model.load import pick_device
from kvbench.eviction.api import Method
from kvbench.runner.bench.attention import AttentionTime
from kvbench.runner.bench.setting import Load, Setting
from kvbench.runner.bench.stopwatch import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost per generated token, in microseconds, in one stretch of the answers.

    A stretch is a number of successive tokens, the same for all stretches (`Setting.stretch`).

    Attributes:
        tokens: how many tokens every answer has at the end of the stretch.
        us: median cost over the rounds; low, high: cost in the cheapest and in the dearest round.
    """

    tokens: int
    us: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed of a system: of its first generation in a round ("fresh"), or of its second generation ("warm").

    The unit is tokens per second of CPU time; on CUDA, of wall time.

    Attributes:
        rate: generated tokens per second, the median over the rounds. The time includes reading the prompts.
        low, high: generated tokens per second in the slowest and in the fastest round.
        decode: as `rate`, but from the moment when every sequence has its first token; None if this moment is not
            known.
        costs: the cost per token in each stretch of the answers, see `Cost`; rise: see the function `rise`.
    """

    rate: float
    low: float
    high: float
    decode: float | None
    costs: tuple[Cost, ...] = ()
    rise: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evictions:
    """The evictions of one generation, including evictions of prompts.

    Attributes:
        count: mean number of evictions per sequence. seconds: wall time of all evictions of all sequences together.
        share: time of evictions divided by the time of evictions and decoding. us: microseconds of evictions per
            generated token.
    """

    count: float
    seconds: float
    share: float
    us: float

    @property
    def each(self) -> float | None:
        """Mean wall seconds in which all sequences evict once; None if nothing was evicted."""
        return self.seconds / self.count if self.count else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of one system at one load.

    A system is the engine with a method, or a baseline such as vLLM. Figures about evictions and the cache are None for
    a baseline.

    Attributes:
        load: the requested load; decoded: number of sequences decoded at once, 0 if not even one fitted into memory.
        failure: why the system has no figures: "out of memory" and the cause; None if it was measured.
        notice: that the method evicted nothing, and how to make it evict; None if it evicted, or never evicts.
        fitting: how many sequences fit into memory according to the plan of a run; for a baseline, according to the
            plan for the method `full`.
        random_weights: whether the method's trained weights were replaced by random ones.
        seconds: wall time of the second generation of a round.
        first_seconds: time until every sequence had its first token; None if the system does not report it.
        peak_bytes: most bytes allocated on the GPU, including the weights; None on a CPU and for vLLM.
        entries: entries per layer and KV head, a mean over sequences and steps; kv_bytes: most KV bytes of a sequence.
        roofline_share: decoded tokens per second of wall time, divided by the most that this machine's memory and
            processor allow with `entries` in the cache.
        decoding: what computed the engine's decode steps, see `Engine.decoding`.
        attention: each backend's time for the attention of a decode step; empty on a CPU and for a baseline.
        fastest: the fastest backend, for the user to choose (docs/speed.md); a run never chooses by speed.
    """

    system: str
    load: Load
    decoded: int
    fitting: int
    fresh: Speed | None = None
    warm: Speed | None = None
    failure: str | None = None
    notice: str | None = None
    random_weights: bool = False
    seconds: float | None = None
    first_seconds: float | None = None
    peak_bytes: int | None = None
    evictions: Evictions | None = None
    entries: float | None = None
    kv_bytes: int | None = None
    roofline_share: float | None = None
    decoding: str | None = None
    attention: tuple[AttentionTime, ...] = ()
    fastest: Backend | None = None


def speed(timings: Sequence[Timing], stretch: int | None) -> Speed:
    """Return the speed over several rounds. timings: one generation per round, all fresh or all warm (`Speed`).
    stretch: see `Setting`."""
    rates = [timing.rate for timing in timings]
    decoded = [timing.decode_rate for timing in timings if timing.decode_rate is not None]
    per_stretch = zip(*(timing.costs for timing in timings), strict=True)
    costs = [_cost((index + 1) * (stretch or 0), seconds) for index, seconds in enumerate(per_stretch)]
    return Speed(
        rate=statistics.median(rates),
        low=min(rates),
        high=max(rates),
        decode=statistics.median(decoded) if decoded else None,
        costs=tuple(costs),
        rise=rise(costs),
    )


def _cost(end: int, seconds: Sequence[float]) -> Cost:
    us = [1e6 * s for s in seconds]
    return Cost(tokens=end, us=statistics.median(us), low=min(us), high=max(us))


def rise(costs: Sequence[Cost]) -> float | None:
    """Return by how much the cost per token rises from the second stretch to the last, as a share of the mean cost.

    The first stretch is left out, because caches are still filling up to their budgets then. Each stretch counts with
    the cost in its cheapest round, because other processes can only add to a cost. The result is the rise of a straight
    line fitted to these costs, divided by their mean. Returns None for fewer than three stretches.
    """
    if len(costs) < 3:
        return None
    tokens, us = [cost.tokens for cost in costs[1:]], [cost.low for cost in costs[1:]]
    slope = statistics.linear_regression(tokens, us).slope
    return slope * (tokens[-1] - tokens[0]) / statistics.fmean(us)


def evictions(timings: Sequence[Timing]) -> Evictions:
    """Return the figures about evictions. timings: one `Timing` per generation of the engine. `seconds` is the median
    over the generations; the other figures are taken over all generations together."""
    usages = [usage for timing in timings for usage in timing.usages]
    evicting, decoding = sum(u.evict_seconds for u in usages), sum(u.decode_seconds for u in usages)
    return Evictions(
        count=statistics.fmean(usage.evictions for usage in usages),
        seconds=statistics.median(sum(usage.evict_seconds for usage in timing.usages) for timing in timings),
        share=evicting / max(evicting + decoding, 1e-9),
        us=1e6 * evicting / sum(usage.output_tokens for usage in usages),
    )


def nothing_evicted(method: Method, count: float) -> str | None:
    """Return a notice that the method evicted nothing, with the options that make it evict; None if it evicted, or
    never evicts. count: mean number of evictions per sequence."""
    if count or not method.evicts:
        return None
    longer = "more --new-tokens, a smaller --interval" if method.decode_bounded else "a longer --prompt"
    other = "a smaller --budget" if method.takes_budget else "other values of --method-opt"
    return f"nothing was evicted, so these figures are those of a full cache. Give {longer} or {other}."


def as_json(setting: Setting, results: Sequence[Measured]) -> dict[str, Any]:
    """Return the JSON document: results, settings, device and versions of a measurement."""
    device = pick_device(setting.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "setting": asdict(setting),
        "rows": [asdict(r) | {"load": r.load._asdict()} for r in results],
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "clock": "wall" if device.type == "cuda" else "cpu",
    }
