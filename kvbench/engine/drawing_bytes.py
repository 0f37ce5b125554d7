"""The bytes that drawing the next tokens takes, counted on the meta device."""

from __future__ import annotations

import torch

from kvbench.engine.kernels.backends import Backend
from kvbench.engine.meta import Answers, MetaBytes
from kvbench.engine.sampler import next_tokens
from kvbench.engine.state import Drawing, State
from kvbench.eviction.planned_device import planned_for
from kvbench.records import Sampling

META = torch.device("meta")


def drawing_bytes(vocabulary: int, dtype: torch.dtype, sampling: Sampling, backend: Backend, *, gpu: bool) -> int:
    """Return the most bytes that `sampler.next_tokens` takes per row, in addition to the logits.

    vocabulary, dtype: number and dtype of the logits in a row. gpu: whether a GPU draws. On a GPU, the result is 0 for
    every backend but "torch": their kernels hold only a few numbers per row.

    The count assumes the most costly case: end tokens are banned, because the answer may not end yet; and on a CPU, a
    first draw among the largest logits does not suffice, so that a second draw reads the whole vocabulary.
    """
    if not vocabulary or (gpu and backend != "torch"):
        return 0
    drawing = Drawing(sampling=sampling, ends=1, bans=True)
    with torch.inference_mode(), planned_for(gpu=gpu), MetaBytes(Answers()) as live:
        logits, state = torch.empty(1, vocabulary, dtype=dtype, device=META), State(1, 1, drawing, META)
        given = live.now
        next_tokens(logits, state)
    return live.peak - given
