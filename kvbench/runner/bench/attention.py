"""Times the attention of a decode step on a GPU with every attention backend, without the rest of the step.

The attention calls are recorded from a real step of a running engine: its cache, its lengths per slot and head, and the
new tokens' queries, keys and values. Each backend then computes these calls, captured in a CUDA graph as in the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvbench.console import faults
from kvbench.engine.cache.pool import PAGE
from kvbench.engine.cache.recurrent import copied
from kvbench.engine.graph import StepGraph
from kvbench.engine.kernels.backends import BACKENDS, Backend, Decode, decode_with
from kvbench.engine.loop import Engine
from kvbench.engine.step_writers import step_writer
from kvbench.runner.bench.stopwatch import clock

LEAST = 0.05  # least seconds for which replays of the CUDA graph are timed


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTime:
    """A backend's time for the attention of one decode step, all layers together.

    Attributes:
        seconds: the time; None if the backend does not support the model, the cache or this machine. `refused` then
            says why.
        share: the bytes of entries that the step reads and writes per second, divided by the bytes that a copy moves
            per second; None if `seconds` is None.
    """

    backend: Backend
    seconds: float | None = None
    share: float | None = None
    refused: str = ""


class Call(NamedTuple):
    """The arguments of one layer's call of a backend's attention function (`backends.Decode`)."""

    tensors: tuple[torch.Tensor, ...]  # query, key, value, keys, values, lengths, live
    options: dict[str, Any]

    def bytes(self) -> int:
        """Return the bytes of all entries that the call reads, plus the bytes of the new entries that it writes."""
        _, key, value, keys, _, lengths, live = self.tensors
        table = self.options["table"]
        rows = keys.shape[2] if table is None else table.shape[2] * PAGE
        attended = (lengths + 1).clamp(max=rows) * (live[:, None] != 0)
        entry = key.shape[2] * key.element_size() + value.shape[2] * value.element_size()
        return int(attended.expand(key.shape[:2]).sum()) * entry


def attention_times(engine: Engine, bandwidth: float) -> tuple[AttentionTime, ...]:
    """Time the attention of the engine's next step with every backend; the engine can go on afterwards.

    Call this function from the engine's `on_step`, while the engine generates. Do not call it when an eviction is due:
    the cache then has no room for the next step's entries. bandwidth: bytes that a copy moves per second.
    """
    calls = record(engine)
    moved = sum(call.bytes() for call in calls)
    return tuple(_time(backend, engine, calls, moved / bandwidth) for backend in BACKENDS)


def fastest(times: Sequence[AttentionTime]) -> Backend | None:
    """Return the backend with the shortest time; None if no backend was timed."""
    timed = [time for time in times if time.seconds is not None]
    return min(timed, key=lambda time: time.seconds or math.inf).backend if timed else None


def record(engine: Engine) -> list[Call]:
    """Return the attention calls of the engine's next step, one per layer. To record the calls, the function runs a
    step in which every result of attention is zero."""
    calls: list[Call] = []
    scratch: dict[tuple[torch.Size, torch.device], torch.Tensor] = {}

    def note(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        if (sums := options["sums"]) is not None:  # replays must not add to the sums of the engine
            options["sums"] = scratch.setdefault((sums.shape, sums.device), torch.zeros_like(sums))
        calls.append(Call(tensors, options))
        query, value = tensors[0], tensors[2]
        return query.new_zeros(*query.shape[:2], value.shape[-1])

    cache = engine.cache
    writer = step_writer(cache, engine.setup.rules, note)
    writer.load([int(seen > 0) for seen in cache.seen], keep_newest=False)
    seen = torch.tensor(cache.seen, device=cache.device)
    writer.begin(seen, (seen > 0).long())
    tokens, states = torch.zeros_like(seen), copied(cache.recurrent)
    engine.reader.model.run(writer, states, input_ids=tokens[:, None], position_ids=seen[:, None])
    return calls


def _time(backend: Backend, engine: Engine, calls: Sequence[Call], copying: float) -> AttentionTime:
    """Time one backend. copying: seconds in which a copy moves as many bytes as these calls read and write."""
    if backend == "varlen":  # an engine with this backend sums no attention
        calls = [Call(call.tensors, call.options | {"sums": None}) for call in calls]
    try:
        decode = decode_with(backend, engine.cache)
        seconds = _seconds(decode, calls, engine.loaded.device)
    except Exception as error:  # backends that do not support this machine raise errors of several libraries
        if faults.device_failed(error):
            raise
        return AttentionTime(backend=backend, refused=faults.first_line(error))
    return AttentionTime(backend=backend, seconds=seconds, share=copying / seconds)


def _seconds(decode: Decode, calls: Sequence[Call], device: torch.device) -> float:
    """Return the seconds of one replay of all calls, a mean over enough replays to take at least LEAST seconds."""

    def step() -> None:
        for tensors, options in calls:
            decode(*tensors, **options)

    graph = StepGraph(step, device, restore=lambda: None)
    replays = 1
    while True:
        began = clock(device)
        for _ in range(replays):
            graph.replay()
        if (spent := clock(device) - began) >= LEAST:
            return spent / replays
        replays *= 4
