"""One sequence being generated: its tokens, its clocks and what it used."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbench.engine.prefill import PromptState
from kvbench.records import Request, Usage


@dataclass(slots=True)
class Meter:
    """Measured use of one sequence, filled by the engine step by step.

    Seconds are shares: step time / live sequences.
    """

    budget: int | None = None
    entries_after_evict: float | None = None
    entries_peak: float = 0
    entries_sum: float = 0
    bytes_peak: int = 0
    extra_peak: int = 0
    bytes_sum: int = 0
    steps: int = 0
    evictions: int = 0
    first_eviction: int | None = None
    prefill_peak: float = 0
    prefill_bytes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    evict_seconds: float = 0.0

    def read(self, prompt: PromptState, samples: int, copies: int) -> None:
        """Note what reading the prompt took; its time is shared by all samples.

        copies: heads that stand for one KV head.
        """
        self.budget = None if prompt.budget is None else prompt.budget * copies
        self.prefill_seconds, self.evict_seconds = prompt.seconds / samples, prompt.evict_seconds / samples
        self.prefill_peak, self.prefill_bytes = prompt.entries_peak * copies, prompt.bytes_peak
        self.evictions, self.first_eviction = prompt.evictions, prompt.first_eviction
        self.entries_after_evict = None if prompt.after_evict is None else prompt.after_evict * copies

    def held(self, entries: float, live_bytes: int, extra_bytes: int) -> None:
        """Note what the cache holds after a decode step; extra: what of it is neither key nor value."""
        self.steps += 1
        self.entries_sum += entries
        self.bytes_sum += live_bytes
        self.entries_peak = max(self.entries_peak, entries)
        if live_bytes > self.bytes_peak:
            self.bytes_peak, self.extra_peak = live_bytes, extra_bytes

    def evicted(self, entries: float, seen: int) -> None:
        """Note an eviction that left `entries`, when the sequence had `seen` tokens."""
        self.evictions += 1
        self.entries_after_evict = max(self.entries_after_evict or 0, entries)
        if self.first_eviction is None:
            self.first_eviction = seen

    def usage(self, prompt_tokens: int, output_tokens: int, slot_bytes: int) -> Usage:
        steps = max(1, self.steps)
        return Usage(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            entries_after_evict=self.entries_after_evict,
            entries_peak=self.entries_peak,
            entries_mean=self.entries_sum / steps,
            entries_prefill_peak=self.prefill_peak,
            kv_bytes_prefill_peak=self.prefill_bytes,
            budget_entries=self.budget,
            kv_bytes_peak=self.bytes_peak,
            kv_bytes_extra=self.extra_peak,
            kv_bytes_mean=self.bytes_sum // steps,
            kv_bytes_slot=slot_bytes,
            evictions=self.evictions,
            first_eviction=self.first_eviction,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            evict_seconds=self.evict_seconds,
        )


@dataclass(slots=True)
class Sequence:
    """A live sample. `clock` counts decode steps, the trigger's clock; `tokens` are the generated ids."""

    request: Request
    sample: int
    key: int  # noise key, as int64
    tokens: list[int] = field(default_factory=list)
    clock: int = 0
    meter: Meter = field(default_factory=Meter)
    stop_reason: str = ""
    status: str = "ok"

    @property
    def finished(self) -> bool:
        return bool(self.stop_reason)
