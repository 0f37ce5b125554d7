"""A Triton kernel for tests of the interpreter."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def double(source, target, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, 2 * tl.load(source + at, mask=at < n), mask=at < n)
