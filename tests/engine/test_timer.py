"""The timer counts the pieces of work inside its blocks, and waits for the device only when it is read."""

from __future__ import annotations

import time

import pytest
import torch
from support.pretend_cuda import pretended_cuda

from kvbench.engine.timer import Timer


def spend(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_pieces_add_up_and_what_is_between_them_does_not_count(kind):
    with pretended_cuda() as device:
        timer = Timer(torch.device(kind))
        assert timer.seconds() == 0
        began = time.perf_counter()
        for _ in range(3):
            with device.count() as count, timer.running():
                spend(0.002)
            assert count.waits + count.syncs == 0
            spend(0.02)
        with device.count() as count:
            seconds = timer.seconds()
        assert 0.006 <= seconds < time.perf_counter() - began - 0.06 + 0.001
        assert count.waits == int(kind == "cuda")
        assert timer.seconds() == seconds
