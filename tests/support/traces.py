"""Finished sequences of random tokens."""

from __future__ import annotations

import torch

from kvbench.records import Request
from kvbench.replay.traces import ForcedTrace
from support.models import VOCABULARY


def traces(lengths, seed=3):
    """Random prompts and answers of these lengths."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count):
        return tuple(torch.randint(0, VOCABULARY, (count,), generator=generator).tolist())

    return [
        ForcedTrace(
            request=Request(
                task="t", doc_id=str(i), prompt_ids=tokens(prompt), forced=tokens(answer), max_new_tokens=answer
            ),
            cluster=str(i),
        )
        for i, (prompt, answer) in enumerate(lengths)
    ]
