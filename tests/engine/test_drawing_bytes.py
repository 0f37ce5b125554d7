"""The planned bytes of drawing tokens, against what torch's allocator measures on a CPU."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch.autograd.profiler import profile

from kvbench.engine.footprint import drawing_bytes
from kvbench.engine.sampler import next_tokens
from kvbench.engine.state import Drawing, State
from kvbench.records import Sampling

ROWS, VOCABULARY = 4, 5000
SAMPLINGS = {
    "plain": Sampling(temperature=1.0),
    "filters": Sampling(temperature=0.6, top_k=20, top_p=0.95),
}


def planned(sampling, dtype, backend="torch", *, gpu=False):
    return drawing_bytes(VOCABULARY, dtype, sampling, backend, gpu=gpu)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_planned_bytes_of_a_draw_are_those_measured(sampling, dtype):
    """All logits are equal, so filters cut beyond the candidates."""
    state = State(ROWS, 1, Drawing(sampling=sampling, ends=1, bans=True), torch.device("cpu"))
    logits = torch.zeros(ROWS, VOCABULARY, dtype=dtype)
    with torch.inference_mode(), profile(profile_memory=True) as record:
        next_tokens(logits, state)
    events = sorted(record.kineto_results.events(), key=lambda event: event.start_ns())
    most = max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))
    assert ROWS * planned(sampling, dtype) == pytest.approx(most, rel=0.05)


def test_kernels_of_a_gpu_hold_nothing_as_large_as_the_vocabulary():
    plain = SAMPLINGS["plain"]
    assert planned(plain, torch.bfloat16, "triton", gpu=True) == 0 < planned(plain, torch.bfloat16, gpu=True)
