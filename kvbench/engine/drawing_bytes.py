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

    vocabulary, dtype: of the logits. The count assumes a slot whose answer may not end yet, so that end tokens are
    banned. It also assumes that a draw among the largest logits, which a CPU tries first, does not suffice and the
    whole vocabulary is drawn from again. On a GPU (`gpu`), backends other than "torch" draw with kernels that hold only
    a few numbers per row; for them the result is 0.
    """
    if not vocabulary or (gpu and backend != "torch"):
        return 0
    drawing = Drawing(sampling=sampling, ends=1, bans=True)
    with torch.inference_mode(), planned_for(gpu=gpu), MetaBytes(Answers()) as live:
        logits, state = torch.empty(1, vocabulary, dtype=dtype, device=META), State(1, 1, drawing, META)
        given = live.now
        next_tokens(logits, state)
    return live.peak - given
