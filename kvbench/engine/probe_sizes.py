"""The sizes of the probes that a method will run over a prompt, which a plan must know before any prompt is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvbench.eviction.api import Method

HEADER = 32  # tokens of the reply header; the longest known headers, with an empty block of thinking, have about half


@dataclass(frozen=True, slots=True)
class ProbeSizes:
    """The sizes of a method's probes over one prompt.

    longest: tokens of the longest probe; kept: total tokens of those probes to which later probes attend; against: the
    methods that evict copies of the cache for probes (`Probe.against`).
    """

    longest: int = 0
    kept: int = 0
    against: tuple[Method, ...] = ()


@dataclass(slots=True)
class _MadeUp:
    """A prompt of zeros, as a method's `probes` reads it (implements `api.Prompt`)."""

    ids: tuple[int, ...]
    budget: int
    next_token: int = 0
    reply_header: tuple[int, ...] = (0,) * HEADER

    def encode(self, text: str) -> tuple[int, ...]:
        return (0,) * len(text.encode())  # no tokenizer makes more tokens of a text than the text has bytes

    def draft(self, model: str, count: int) -> tuple[int, ...]:
        return (0,) * count


def probe_sizes(method: Method, weights: Mapping[str, torch.Tensor], rows: int, budget: int) -> ProbeSizes:
    """Return the sizes of the probes over a prompt of `rows` tokens. The method's `probes` gets a prompt of zeros.

    weights: the method's weights by name, on the meta device; budget: entries per head. If the method's code fails on
    this prompt, a probe as long as the prompt is counted. At most `rows` probes are counted.
    """
    longest, kept, against = 0, 0, list[Method]()
    try:
        steps = method.probes(_MadeUp((0,) * rows, budget))
        probe = next(steps)
        for _ in range(rows):
            length = len(weights[probe.learned]) if probe.learned else len(probe.tokens)
            longest, kept = max(longest, length), kept + length * probe.keep
            if isinstance(probe.against, Method) and probe.against not in against:
                against.append(probe.against)
            probe = steps.send(0)
    except StopIteration:
        pass
    except Exception:  # the code of a plug-in may need a real prompt
        longest = max(longest, rows)
    return ProbeSizes(longest, kept, tuple(against))
