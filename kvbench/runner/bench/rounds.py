"""Measures all systems in rounds: each round measures one system after the other."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch

from kvbench.console import faults
from kvbench.engine.attention.geometry import largest_group
from kvbench.engine.cache.layout import fit
from kvbench.engine.memory import limit, release, reset_peak
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.plan import Machine, measure, roofline
from kvbench.runner.bench.attention import AttentionTime, fastest
from kvbench.runner.bench.capacity import Capacity
from kvbench.runner.bench.forked import forked
from kvbench.runner.bench.results import Measured, evictions, nothing_evicted, speed
from kvbench.runner.bench.setting import Load, Setting, build
from kvbench.runner.bench.stopwatch import Timing
from kvbench.runner.bench.systems import System, systems

Result = TypeVar("Result")


class NothingFits(NamedTuple):
    """The result when not even one sequence fits into memory.

    cause: the first line of the allocator's message. If the plan already says that nothing fits, `cause` names the
    memory size of the plan instead.
    """

    cause: str


class Pair(NamedTuple):
    """The two timed generations of a system in a round: the first ("fresh") and the second ("warm")."""

    first: Timing
    second: Timing


def bench(setting: Setting, note: Callable[[str], None] = lambda text: None) -> Iterator[Measured]:
    """Measure every system at every load; yield the figures of a load when all its rounds are done.

    note: receives the name of each measurement before it begins, and a line when fewer sequences are tried. Raises
    UserError, before the first measurement, for a baseline or a method that cannot run here. If a signal or an error
    ends a round, the function first yields the figures of the systems already measured at this load. Then it raises
    what ended the round.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # no thread pool before the forks: threads do not survive a fork
    try:
        loaded = build(setting)
        limit(loaded.device, setting.memory)
        contest = Contest(setting, loaded, note)
        for load in setting.loads():
            yield from contest.rows(load)
    finally:
        torch.set_num_threads(before)


class Contest:
    """The systems to be compared, all with one model, and the rounds in which they are measured.

    machine: the limits of this machine; None: measure them.
    """

    def __init__(
        self, setting: Setting, loaded: LoadedModel, note: Callable[[str], None], machine: Machine | None = None
    ) -> None:
        self.setting, self.loaded, self.note = setting, loaded, note
        self.systems = systems(setting, loaded)
        self.machine = machine or self.apart(partial(measure, loaded.device, loaded.dtype))
        self.capacity = Capacity(setting, loaded, self.machine)

        @cache  # how many sequences fit does not depend on how many the load has
        def fitting(system: System, load: Load) -> int:
            return self.capacity.fitting(*system.planned, load)

        # Before any measurement: a method that the engine cannot serve is refused at once.
        self.plans = {
            (system.name, load): fitting(system, load._replace(sequences=None))
            for system in self.systems
            for load in setting.loads()
        }

    def rows(self, load: Load) -> Iterator[Measured]:
        """Measure all systems at one load, each system that fits into memory once per round; yield each system's
        figures. If a signal or an error ends a round early, raise it after the figures (see `bench`)."""
        done: dict[str, list[Pair] | NothingFits] = {s.name: self._by_plan(s, load) for s in self.systems}
        ended: BaseException | None = None
        try:
            for repeat in range(self.setting.repeats):
                for system in self.systems:
                    before = done[system.name]
                    if not isinstance(before, NothingFits):
                        self.note(f"{system.name}, {_named(load)}, round {repeat + 1} of {self.setting.repeats}")
                        done[system.name] = self._round(system, load, before)
        except BaseException as error:
            ended = error
        for system in self.systems:
            attention: tuple[AttentionTime, ...] = ()
            pairs = done[system.name]
            if ended is None and not isinstance(pairs, NothingFits):
                try:
                    attention = self._attention(system, load, pairs)
                except BaseException as error:
                    ended = error
            if pairs or ended is None:
                yield self._measured(system, load, pairs, attention)
        if ended is not None:
            raise ended

    def _by_plan(self, system: System, load: Load) -> list[Pair] | NothingFits:
        """Return `NothingFits` if not even one sequence fits by the plan, otherwise [] (no rounds measured yet)."""
        if self.capacity.first(self.plans[system.name, load], load):
            return []
        return NothingFits(f"the plan of {self.capacity.machine.memory / 2**30:.3g} GiB")

    def _round(self, system: System, load: Load, before: list[Pair]) -> list[Pair] | NothingFits:
        """Measure a system for one more round, and return all rounds that count. before: the earlier rounds.

        The first round tries as many sequences as planned, later rounds as many as the round before. If fewer fit now,
        the earlier rounds are dropped, because medians are taken over rounds with equally many sequences.
        """
        most = self.capacity.first(self.plans[system.name, load], load)
        rows = before[-1].first.sequences if before else most
        pair = self.apart(partial(self._fitting, system, load, self.setting.ids(load.prompt, most)[:rows]))
        if isinstance(pair, NothingFits):
            return pair
        return [*(before if pair.first.sequences == rows else []), pair]

    def _fitting(self, system: System, load: Load, ids: torch.Tensor) -> Pair | NothingFits:
        """Warm a system up and time two generations; if memory runs out, try again with fewer sequences until they fit.

        ids: prompts [sequences, prompt]. Each new attempt has half as many sequences if the user gave their number,
        otherwise seven eighths as many.
        """
        tokens = load.new_tokens
        while True:
            try:
                release(self.loaded.device)
                system.warm_up(ids, tokens)
                return Pair(self._timed(system, ids, tokens), self._timed(system, ids, tokens))
            except Exception as error:
                if not faults.out_of_memory(error):
                    raise
                cause = faults.first_line(error)
            if len(ids) == 1:
                return NothingFits(cause)
            ids = ids[: len(ids) // 2 if load.sequences else len(ids) * 7 // 8]
            self.note(f"{system.name}: out of memory, trying {len(ids)} sequences")

    def _timed(self, system: System, ids: torch.Tensor, tokens: int) -> Timing:
        release(self.loaded.device)
        reset_peak(self.loaded.device)
        return system.run(ids, tokens)

    def apart(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a forked process, with the setting's number of threads; return its result. On CUDA, which does
        not survive a fork, run it in this process."""

        def threaded() -> Result:
            torch.set_num_threads(self.setting.threads)
            return work()

        return threaded() if self.loaded.device.type == "cuda" else forked(threaded)

    def _attention(self, system: System, load: Load, pairs: list[Pair]) -> tuple[AttentionTime, ...]:
        release(self.loaded.device)
        ids = self.setting.ids(load.prompt, pairs[-1].second.sequences)
        return system.attention(ids, load.new_tokens, self.machine.bandwidth)

    def _measured(
        self, system: System, load: Load, pairs: list[Pair] | NothingFits, attention: tuple[AttentionTime, ...]
    ) -> Measured:
        facts: dict[str, Any] = {
            "system": system.name,
            "load": load,
            "fitting": self.plans[system.name, load],
            "random_weights": system.random_weights,
        }
        if isinstance(pairs, NothingFits):
            return Measured(**facts, decoded=0, failure=f"out of memory ({pairs.cause})")
        timings = [timing for pair in pairs for timing in pair]
        firsts = [timing.first for timing in timings if timing.first is not None]
        peaks = [timing.peak_bytes for timing in timings if timing.peak_bytes is not None]
        decoded = timings[-1].sequences
        return Measured(
            **facts,
            decoded=decoded,
            fresh=speed([pair.first for pair in pairs], self.setting.stretch),
            warm=speed([pair.second for pair in pairs], self.setting.stretch),
            seconds=statistics.median(pair.second.wall for pair in pairs),
            first_seconds=statistics.median(firsts) if firsts else None,
            peak_bytes=max(peaks, default=None),
            attention=attention,
            fastest=fastest(attention),
            **(self._cache(system, load, decoded, timings) if timings[-1].usages else {}),
        )

    def _cache(self, system: System, load: Load, decoded: int, timings: Sequence[Timing]) -> dict[str, Any]:
        """Return the fields of `Measured` about evictions and the cache, which only the engine reports."""
        usages = [usage for timing in timings for usage in timing.usages]
        entries = statistics.fmean(usage.entries_mean for usage in timings[-1].usages)
        (method, _), shape = system.planned, self.capacity.shape
        geometry = fit(shape.geometry, method, load.prompt + load.new_tokens)
        own = entries / largest_group(shape.geometry) if method.per_query_head else entries  # per head of the cache
        seen = load.prompt + load.new_tokens / 2
        most = roofline(shape, self.machine, geometry, decoded, own, seen, self.loaded.dtype)
        rates = [timing.decode_wall_rate for timing in timings if timing.decode_wall_rate is not None]
        evicted = evictions(timings)
        return {
            "evictions": evicted,
            "notice": nothing_evicted(method, evicted.count),
            "entries": entries,
            "kv_bytes": max(usage.kv_bytes_peak for usage in usages),
            "decoding": usages[-1].decoding,
            "roofline_share": statistics.median(rates) / most if rates else None,
        }


def _named(load: Load) -> str:
    sequences = "the most sequences that fit" if load.sequences is None else f"{load.sequences} sequences"
    return f"{sequences}, {load.prompt} + {load.new_tokens} tokens"
