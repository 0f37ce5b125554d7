"""trimkv: a gate predicts, when a token is read, how slowly its entry's worth decays; the most decayed are evicted.

Paper: Bui et al., Cache What Lasts: Token Retention for Memory-Bounded KV Cache in LLMs, arXiv 2512.03324.

A trained gate per layer gives a new token a retention beta in (0, 1) for every KV head. The gate reads the input of the
layer's attention (`gate=rg`), or keys and values (rg2, rg3). An entry of age n has the worth beta^n; the score is the
logarithm of this worth, n * log beta, with the age at the next query. Attention is not used. Every KV head keeps its
best C entries (C: the budget); no entry is protected (`recent` 0). `kvbench train trimkv` trains gates;
`kvbench weights import` imports published gates.

The released code adds one to every age (`age_offset=1`), which changes the order because age multiplies log beta. The
code's `knorm_alpha` is `knorm=true` here, its `sliding_window_size` is `recent`. The code evicts when a head holds
C + buffer entries (buffer 128; 32 in its examples); here the method evicts at ticks, so the interval takes the buffer's
place.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.eviction.terms.gated import Gated
from kvbench.eviction.terms.gates import GateForm
from kvbench.registry import methods


@methods.register("trimkv", aliases=("trim-kv",))
@dataclass(frozen=True)
class TrimKV(Gated):
    paper = "Bui et al., arXiv 2512.03324"
    name = "trimkv"
    usual = GateForm("rg", "none")
