"""Arguments for torch's varlen attention. The kernel itself needs a GPU; here its definition stands in for it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention import varlen

from kvbench.engine.kernels import masked
from kvbench.engine.kernels.varlen import decode
from kvbench.errors import UserError

S, HK, G, D, P = 3, 2, 4, 16, 24


def by_definition(
    query, key, value, *, cu_seq_q, cu_seq_k, max_q, max_k, scale, enable_gqa, seqused_k, num_splits, return_aux
):
    assert (cu_seq_q.dtype, cu_seq_k.dtype, seqused_k.dtype) == (torch.int32,) * 3
    assert (max_q, max_k, enable_gqa, num_splits, return_aux.lse) == (1, P, True, 1, True)
    assert cu_seq_q.diff().tolist() == [1] * S * HK
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for i, used in enumerate(seqused_k.tolist()):
        rows = slice(int(cu_seq_k[i]), int(cu_seq_k[i]) + used)
        logits = query[i] @ key[rows, 0].T * scale  # [G, used]
        lse[:, i] = logits.logsumexp(-1)
        out[i] = logits.softmax(-1) @ value[rows, 0] if used else 0
    return out, lse


@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 2, HK * G)])
def test_the_attention_of_the_reference(sinks, monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", by_definition)
    monkeypatch.setattr("kvbench.engine.kernels.varlen.check", lambda *layer: None)  # it wants a GPU
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(S, n, D, generator=generator) for n in (HK * G, HK, HK))
    store = torch.randn(2, S, HK, P, D, generator=generator)
    lengths, live = torch.tensor([[5, 0], [23, 7], [70, 3]]), torch.tensor([1, 1, 0])
    mine, theirs = store.clone(), store.clone()
    rest = dict(scaling=0.3, splits=1, sinks=sinks)
    got = decode(query, key, value, *mine, lengths, live, **rest)
    want = masked.decode(query, key, value, *theirs, lengths, live, **rest)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(device="cpu"), "the device cpu"),
        (dict(dtype=torch.float32), "float32"),
        (dict(table=torch.zeros(1, 1, 1)), "the paged layout"),
        (dict(softcap=50.0), "a softcap"),
        (dict(value_dim=8), "keys and values of different dimensions"),
        (dict(dim=512, value_dim=512), "head dimension 512"),
    ],
    ids=str,
)
def test_what_it_does_not_serve_is_refused(change, said):
    shape = dict(device="cuda", dtype=torch.bfloat16, table=None, softcap=None, dim=D, value_dim=D) | change
    with FakeTensorMode(allow_non_fake_inputs=True):
        options = dict(device=shape["device"], dtype=shape["dtype"])
        query, value = (torch.empty(1, 1, shape[d], **options) for d in ("dim", "value_dim"))
        rest = dict(scaling=1.0, splits=1, table=shape["table"], softcap=shape["softcap"])
        with pytest.raises(UserError, match=rf"varlen does not support {said}.*Use --decode-attn triton\.$"):
            decode(query, query, value, *[query] * 4, **rest)
