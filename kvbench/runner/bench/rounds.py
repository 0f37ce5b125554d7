"""Measures all systems in rounds: each round measures one system after the other. Figures are medians over rounds."""

from __future__ import annotations

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
import transformers

from kvbench.console import faults, signals
from kvbench.engine.kernels.backends import Backend
from kvbench.engine.memory import release, reset_peak
from kvbench.engine.model.load import LoadedModel, pick_device
from kvbench.engine.model.shape import shape_of_model
from kvbench.engine.plan import Machine, measure, roofline
from kvbench.errors import KVBenchError, SetupError
from kvbench.runner.bench.attention import AttentionTime, fastest
from kvbench.runner.bench.setting import Setting, build
from kvbench.runner.bench.stopwatch import Timing
from kvbench.runner.bench.systems import System, held, systems

Result = TypeVar("Result")
WARM_UP = 40  # tokens before the clock starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Microseconds per generated token in the stretch of an answer that ends after `tokens` tokens.

    Attributes:
        us: median over the rounds; low, high: in the cheapest and in the dearest round.
    """

    tokens: int
    us: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """The speed of a system when "fresh" or "warm" (see the package), in tokens per second of CPU time; on CUDA, of
    wall time.

    Attributes:
        rate: generated tokens per second, the median over the rounds. The time includes reading the prompts.
        low, high: generated tokens per second in the slowest and in the fastest round.
        decode: as `rate`, but from the moment when every sequence has its first token; None where this is not known.
        costs: per stretch of the answer, see `Setting.stretch`; rise: see the function `rise`.
    """

    rate: float
    low: float
    high: float
    decode: float | None
    costs: tuple[Cost, ...] = ()
    rise: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The figures of one system at one number of sequences. Those about eviction and cache are None for a baseline.

    Attributes:
        sequences: the number that the user asked for; decoded: the number that fitted into memory.
        first_seconds: time until every sequence had its first token; None where the system does not tell.
        peak_bytes: most bytes allocated on the GPU, with the weights; None on a CPU.
        evict_share: time of all evictions, also those of prompts, divided by the time of evictions and decoding.
        evict_us: microseconds of all evictions, also those of prompts, per generated token.
        entries: entries per layer and KV head, a mean over sequences and steps; kv_bytes: most KV bytes of a sequence.
        roofline_share: decoded tokens per second of wall time, divided by the most that this machine's memory and
            processor allow with `entries` in the cache.
        decoding: what computed the engine's decode steps, see `Engine.decoding`.
        attention: each backend's time for the attention of a decode step; empty on a CPU and for a baseline.
        fastest: the fastest backend, which the user can choose with --decode-attn. A run never chooses it by itself:
            its answers would depend on which backend was faster at the moment.
    """

    system: str
    sequences: int
    decoded: int
    fresh: Speed
    warm: Speed
    first_seconds: float | None
    peak_bytes: int | None
    evict_share: float | None = None
    evict_us: float | None = None
    entries: float | None = None
    kv_bytes: int | None = None
    roofline_share: float | None = None
    decoding: str | None = None
    attention: tuple[AttentionTime, ...] = ()
    fastest: Backend | None = None


def bench(setting: Setting, note: Callable[[str], None] = lambda text: None) -> list[Measured]:
    """Measure every system at every number of sequences.

    note: receives the name of each measurement before it begins, and a line when fewer sequences are tried. Raises
    UserError for a baseline that cannot run here, SetupError when not even one sequence fits into memory.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # until the processes are forked: threads do not survive a fork
    try:
        loaded = build(setting)
        contest = Contest(setting, loaded, note)
        machine = contest.apart(partial(measure, loaded.device, loaded.dtype))
        return [row for n in setting.sequences for row in contest.rows(machine, n)]
    finally:
        torch.set_num_threads(before)


class Contest:
    """The systems to be compared, all with one model, and the rounds in which they are measured."""

    def __init__(self, setting: Setting, loaded: LoadedModel, note: Callable[[str], None]) -> None:
        self.setting, self.loaded, self.note = setting, loaded, note
        self.systems = systems(setting, loaded)

    def rows(self, machine: Machine, sequences: int) -> list[Measured]:
        """Return the figures of each system at one number of sequences. Each round measures every system once."""
        setting = self.setting
        ids = setting.prompts(sequences)
        pairs: dict[str, list[tuple[Timing, Timing]]] = {system.name: [] for system in self.systems}
        for repeat in range(setting.repeats):
            for system in self.systems:
                done = pairs[system.name]
                self.note(f"{system.name}, {sequences} sequences, round {repeat + 1} of {setting.repeats}")
                rows = done[-1][0].sequences if done else sequences
                pair = self.apart(partial(self._fitting, system, ids[:rows]))
                if pair[0].sequences < rows:
                    done.clear()  # medians are over rounds with equally many sequences
                done.append(pair)
        return [self._measured(machine, system, ids, pairs[system.name]) for system in self.systems]

    def _fitting(self, system: System, ids: torch.Tensor) -> tuple[Timing, Timing]:
        """Warm a system up and time two generations. The number of sequences is halved until they fit into memory."""
        tokens = self.setting.new_tokens
        while True:
            try:
                release(self.loaded.device)
                system.warm_up(ids, min(WARM_UP, tokens))
                return self._timed(system, ids, tokens), self._timed(system, ids, tokens)
            except Exception as error:
                if not faults.out_of_memory(error):
                    raise
                cause = faults.first_line(error)
            if len(ids) == 1:
                cure = "Use a smaller --shape, or fewer --prompt or --new-tokens."
                raise SetupError(f"{system.name}: one sequence does not fit into memory ({cause}). {cure}")
            ids = ids[: len(ids) // 2]
            self.note(f"{system.name}: out of memory, trying {len(ids)} sequences")

    def _timed(self, system: System, ids: torch.Tensor, tokens: int) -> Timing:
        release(self.loaded.device)
        reset_peak(self.loaded.device)
        return system.run(ids, tokens)

    def apart(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a forked process, with the setting's number of threads; return its result.

        On CUDA, which does not survive a fork, run it in this process.
        """

        def threaded() -> Result:
            torch.set_num_threads(self.setting.threads)
            return work()

        return threaded() if self.loaded.device.type == "cuda" else _forked(threaded)

    def _measured(
        self, machine: Machine, system: System, ids: torch.Tensor, pairs: Sequence[tuple[Timing, Timing]]
    ) -> Measured:
        timings = [timing for pair in pairs for timing in pair]
        firsts = [timing.first for timing in timings if timing.first is not None]
        peaks = [timing.peak_bytes for timing in timings if timing.peak_bytes is not None]
        decoded = timings[-1].sequences
        release(self.loaded.device)
        attention = system.attention(ids[:decoded], self.setting.new_tokens, machine.bandwidth)
        return Measured(
            system=system.name,
            sequences=len(ids),
            decoded=decoded,
            fresh=self._speed([first for first, _ in pairs]),
            warm=self._speed([second for _, second in pairs]),
            first_seconds=statistics.median(firsts) if firsts else None,
            peak_bytes=max(peaks, default=None),
            attention=attention,
            fastest=fastest(attention),
            **(self._cache(machine, decoded, timings) if timings[-1].usages else {}),
        )

    def _speed(self, timings: Sequence[Timing]) -> Speed:
        rates = [timing.rate for timing in timings]
        decoded = [timing.decode_rate for timing in timings if timing.decode_rate is not None]
        per_stretch = zip(*(timing.costs for timing in timings), strict=True)
        costs = [self._cost(index, seconds) for index, seconds in enumerate(per_stretch)]
        return Speed(
            rate=statistics.median(rates),
            low=min(rates),
            high=max(rates),
            decode=statistics.median(decoded) if decoded else None,
            costs=tuple(costs),
            rise=rise(costs),
        )

    def _cost(self, index: int, seconds: Sequence[float]) -> Cost:
        us = [1e6 * s for s in seconds]
        end = (index + 1) * (self.setting.stretch or 0)
        return Cost(tokens=end, us=statistics.median(us), low=min(us), high=max(us))

    def _cache(self, machine: Machine, decoded: int, timings: Sequence[Timing]) -> dict[str, Any]:
        """Return the fields of `Measured` about evictions and the cache, which only the engine reports."""
        usages = [usage for timing in timings for usage in timing.usages]
        evicting, decoding = sum(u.evict_seconds for u in usages), sum(u.decode_seconds for u in usages)
        entries = held(timings[-1].usages)
        limit = roofline(shape_of_model(self.loaded.model), machine, decoded, entries, self.loaded.dtype)
        rates = [timing.decode_wall_rate for timing in timings if timing.decode_wall_rate is not None]
        return {
            "evict_share": evicting / max(evicting + decoding, 1e-9),
            "evict_us": 1e6 * evicting / sum(usage.output_tokens for usage in usages),
            "entries": entries,
            "kv_bytes": max(usage.kv_bytes_peak for usage in usages),
            "decoding": usages[-1].decoding,
            "roofline_share": statistics.median(rates) / limit if rates else None,
        }


def rise(costs: Sequence[Cost]) -> float | None:
    """Return the rise of the cost per token from the second stretch to the last, as a share of the mean cost.

    The rise is that of a straight line through the cost of each stretch in its cheapest round, because other processes
    only ever add to a cost. The first stretch is left out: caches still fill up to their budgets. None for fewer than
    three stretches.
    """
    if len(costs) < 3:
        return None
    tokens, us = [cost.tokens for cost in costs[1:]], [cost.low for cost in costs[1:]]
    slope = statistics.linear_regression(tokens, us).slope
    return slope * (tokens[-1] - tokens[0]) / statistics.fmean(us)


def _forked(work: Callable[[], Result]) -> Result:
    """Return the result of a function that runs in a fork of this process, or raise its KVBenchError.

    Raises SetupError if memory runs out there, and KVBenchError if the fork ends without a result.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        try:
            sender.send((work(), None))
        except KVBenchError as error:
            sender.send((None, error))
        except Exception as error:
            if not faults.out_of_memory(error):
                raise
            cure = "Use fewer --sequences, or a smaller --shape."
            sender.send((None, SetupError(f"out of memory ({faults.first_line(error)}). {cure}")))

    process = context.Process(target=child)
    process.start()
    signals.at_end(process.kill)
    sender.close()
    try:
        result, error = receiver.recv()
    except EOFError:
        process.join()
        cure = "If the system killed it for memory, use fewer --sequences or a smaller --shape."
        raise KVBenchError(
            f"a measuring process ended without a result (exit code {process.exitcode}). {cure}"
        ) from None
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()
        signals.not_at_end(process.kill)
    if error is not None:
        raise error
    return cast(Result, result)


def as_json(setting: Setting, results: Sequence[Measured]) -> dict[str, Any]:
    """Return the JSON document: results, settings, device and versions of a measurement."""
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
