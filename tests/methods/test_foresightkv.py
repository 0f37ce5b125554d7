"""foresightkv: features against the released code and by hand, chunks, the draw among candidates."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.fixtures import FIXTURES, K, Q

from kvbench.errors import UserError
from kvbench.eviction.columns import expanded
from kvbench.eviction.select import decide
from kvbench.eviction.terms.foresight import COUNT, DECAY, scorer_shapes
from kvbench.eviction.view import make_view
from kvbench.registry import methods

FORESIGHT = methods.get("foresightkv")
MODEL = {"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}


class Stream:
    """A sequence whose queries and keys are those of the fixtures; the columns of its entries lie in text order."""

    def __init__(self, method, prompt, budget=24):
        self.method, self.prompt, self.budget = method, prompt, budget
        self.keys, self.values, self.seen, self.evictions = K, K.flip(-1), 0, 0
        self.positions = torch.empty(1, 2, 0, dtype=torch.int64)
        self.columns = {c.name: torch.empty(1, 2, 0) for c in expanded(method.columns(), 4)}
        self.states = {"chunk": torch.zeros(1)}
        g = torch.Generator().manual_seed(1)
        self.weights = {
            name: torch.randn(size, generator=g) for name, size in scorer_shapes(method.features, MODEL).items()
        }

    def view(self, count):
        at = self.positions[..., None].expand(-1, -1, -1, 16)
        return make_view(
            self.keys.gather(2, at),
            Q[:, :, max(0, self.seen - count) : self.seen],
            budget=self.budget,
            values=self.values.gather(2, at),
            positions=self.positions,
            columns=self.columns,
            states=self.states,
            seen=self.seen,
            prompt_len=self.prompt,
            eviction_index=torch.tensor([self.evictions]),
            weights=self.weights,
        )

    def arrive(self, count):
        """Tokens come, and the method sees their queries."""
        new = torch.arange(self.seen, self.seen + count).expand(1, 2, -1)
        self.positions = torch.cat([self.positions, new], dim=-1)
        self.columns = {n: torch.cat([c, torch.zeros(1, 2, count)], dim=-1) for n, c in self.columns.items()}
        self.seen += count
        for name, value in self.method.observe(self.view(count)).items():
            (self.states if name in self.states else self.columns)[name] = value
        return self

    def evict(self):
        [verdict] = decide(self.method, [self.view(self.method.needs().width)])
        size = int(verdict.keep[0, 0].sum())
        self.positions = self.positions[verdict.keep].view(1, 2, size)
        self.columns = {name: c[verdict.keep].view(1, 2, size) for name, c in self.columns.items()}
        self.evictions += 1
        return self

    def features(self):
        """[Hk, N, blocks, g]"""
        x = self.method.inputs(self.view(self.method.needs().width))[0]
        return x[..., 32:].unflatten(-1, (-1, 4))


def attention(first, last, entries):
    """[Hk, g, queries, entries] of the fixtures: queries first .. last - 1 over the tokens before `entries`."""
    logits = torch.einsum("hgqd,hkd->hgqk", Q[0, :, first:last].view(2, 4, -1, 16), K[0, :, :entries]) / 4
    future = torch.arange(entries) > torch.arange(first, last)[:, None]
    return logits.masked_fill(future, float("-inf")).softmax(dim=-1)


def test_features_of_the_released_code():
    want = FIXTURES["foresight_features"]
    params = want["params"]
    stream = Stream(FORESIGHT(features="released8"), params["C"]).arrive(params["C"]).arrive(params["L"])
    got = stream.features()
    assert got[0, 5].numel() == want["dim"]
    for head, entry in ((0, 5), (1, 40)):
        torch.testing.assert_close(
            got[head, entry].flatten(), torch.tensor(want[f"kv_head{head}_entry{entry}"]), rtol=1e-4, atol=1e-6
        )


def test_features_of_the_paper():
    """Prompt of 40, then 44 more: sums over the newest 8, 16, 32 and over the 44; all; the prompt's times 0.9."""
    got = Stream(FORESIGHT(), 40).arrive(40).arrive(44).features()
    before, chunk = attention(0, 40, 84).sum(dim=2), attention(40, 84, 84)
    blocks = [chunk[:, :, -n:].sum(dim=2) for n in (8, 16, 32, 44)]
    blocks += [before + blocks[3], DECAY * before + blocks[3]]
    torch.testing.assert_close(got, torch.stack(blocks).permute(1, 3, 0, 2), rtol=1e-4, atol=1e-6)


def test_attention_alone_is_the_paper_s_list_without_key_and_value():
    streams = [Stream(FORESIGHT(features=name), 40).arrive(40).arrive(44) for name in ("paper6", "attn")]
    whole, alone = (stream.method.inputs(stream.view(32)) for stream in streams)
    torch.testing.assert_close(alone, whole[..., 32:])
    assert scorer_shapes("attn", MODEL)["w1"][2] == alone.shape[-1]
    assert not FORESIGHT(features="attn").needs().values


@pytest.mark.parametrize("features", COUNT)
def test_a_prompt_is_one_chunk_in_however_many_blocks_it_is_read(features):
    method = FORESIGHT(features=features)
    once = Stream(method, 60).arrive(60)
    blocks = Stream(method, 60).arrive(1).arrive(24).arrive(35)
    for name, column in once.columns.items():
        torch.testing.assert_close(blocks.columns[name], column, rtol=1e-5, atol=1e-6)


def test_sums_decay_at_evictions_only():
    """Two chunks before the first eviction count in full until the second one ends with it; survivors keep theirs."""
    method = FORESIGHT(features="released8", sampling=False, recent=8)
    stream = Stream(method, 20, budget=28).arrive(20).arrive(8).arrive(8)
    before, chunk = attention(0, 28, 36).sum(dim=2), attention(28, 36, 36).sum(dim=2)
    torch.testing.assert_close(stream.features()[:, :, 6], (before + chunk).transpose(1, 2), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        stream.features()[:, :, 7], (DECAY * before + chunk).transpose(1, 2), rtol=1e-4, atol=1e-6
    )
    decayed = stream.features()[:, :, 7].gather(1, stream.positions[0][..., None].expand(-1, -1, 4))
    assert torch.equal(decayed, stream.features()[:, :, 7])
    stays = decide(method, [stream.view(0)])[0].keep[0]
    left = decayed[stays].view(2, 28, 4)
    stream.evict().arrive(8)
    got = stream.features()
    torch.testing.assert_close(got[:, :28, 7], DECAY * left + got[:, :28, 2], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(got[:, 28:, 7], got[:, 28:, 2])  # new entries begin with their own chunk
    torch.testing.assert_close(got[:, 28:, 6], got[:, 28:, 2])


def test_the_released_evaluation_does_not_decay():
    plain, reference = (
        Stream(FORESIGHT(features="released8", compat=c), 20).arrive(20).arrive(30).features()
        for c in ("none", "reference")
    )
    assert torch.equal(reference[:, :, 7], reference[:, :, 6])
    assert not torch.allclose(plain[:, :, 7], plain[:, :, 6])
    assert torch.equal(plain[:, :, :7], reference[:, :, :7])


def phi(stream):
    method = FORESIGHT(**{**stream.method.options(), "sampling": False})
    return -method.score(stream.view(method.needs().width))


def test_without_sampling_the_largest_phi_go():
    stream = Stream(FORESIGHT(sampling=False, recent=10), 60, budget=40).arrive(60)
    scores = phi(stream)[0]
    stream.evict()
    for head in range(2):
        gone = set(range(60)) - set(stream.positions[0, head].tolist())
        assert gone == set(scores[head, :50].topk(20).indices.tolist())


@pytest.mark.parametrize("pool", [1.0, 1.5, 2.0])
def test_only_candidates_go(pool):
    stream = Stream(FORESIGHT(recent=10, pool=pool), 60, budget=44).arrive(60)
    scores = phi(stream)[0]
    stream.evict()
    for head in range(2):
        gone = set(range(60)) - set(stream.positions[0, head].tolist())
        worst = set(scores[head, :50].topk(int(16 * pool)).indices.tolist())
        assert len(gone) == 16
        assert gone <= worst
        assert (gone == worst) == (pool == 1)


def test_a_pool_larger_than_what_may_go_is_cut():
    stream = Stream(FORESIGHT(recent=4), 60, budget=10).arrive(60).evict()
    assert stream.positions.shape[-1] == 10
    assert stream.positions[0, :, -4:].tolist() == [[56, 57, 58, 59]] * 2


def test_the_draw_is_without_replacement_from_the_softmax():
    """Two of four candidates with given phi: how often each pair goes, over 4000 samples."""
    phis = torch.tensor([1.0, 0.0, -0.5, 0.3])

    class Fixed(FORESIGHT):
        def input_parts(self, view):
            return [torch.zeros(*view.positions.shape, 1)]

    count = 4000
    weights = {"w1": torch.zeros(1, 1, 1, 1), "b1": torch.zeros(1, 1, 1), "w2": torch.zeros(1, 1, 1)}
    method, keys = Fixed(recent=1), torch.zeros(count, 1, 5, 2)
    view = make_view(keys, budget=3, weights=weights | {"b2": torch.zeros(1, 1)})
    score = method.score(view)
    assert bool(torch.isinf(score[..., 4]).all())  # the newest is no candidate
    noise = score[:, 0, :4]  # of equal phi this is the noise alone
    first = (noise - phis).argsort(dim=-1)[:, :2]  # as the method subtracts phi
    p = phis.softmax(dim=-1)
    for i, j in itertools.permutations(range(4), 2):
        want = float(p[i] * p[j] / (1 - p[i]))
        got = float(((first[:, 0] == i) & (first[:, 1] == j)).float().mean())
        assert abs(got - want) < 4 * (want * (1 - want) / count) ** 0.5


def test_the_draw_depends_on_sample_eviction_layer_and_head_alone():
    stream = Stream(FORESIGHT(recent=10), 60, budget=40).arrive(60)
    view = stream.view(32)
    first = stream.method.score(view)
    assert torch.equal(first, stream.method.score(view))
    for change in ({"layer": 0, "noise_key": view.noise_key + 1}, {"eviction_index": view.eviction_index + 1}):
        other = stream.view(32)
        for name, value in change.items():
            setattr(other, name, value)
        assert not torch.equal(stream.method.score(other), first)


def test_the_newest_always_stay():
    """The paper's 256 of 1024, its evaluation's 128; a quarter where evictions are far apart; or as many as asked."""
    cases = {(1024, 256): 256, (4096, 128): 128, (100, 128): 25, (24, 32): 6, (24, 4): 4, (1, 8): 1}
    assert {case: FORESIGHT().protect(case[0]).at(case[1]).recent for case in cases} == cases
    assert FORESIGHT(recent=9).protect(4096).at(4).recent == 9
    view = make_view(torch.zeros(1, 1, 60, 4), budget=40, interval=3)
    assert (~FORESIGHT().competing(view))[0, 0].nonzero().flatten().tolist() == [57, 58, 59]
    assert FORESIGHT().min_budget() == 2
    assert FORESIGHT(recent=9).min_budget() == 10


def test_weights_that_do_not_fit_say_why():
    model = MODEL | {"num_hidden_layers": 3}
    tensors = {
        name: torch.zeros(size) for name, size in scorer_shapes("released8", model, 5).items()
    }  # any number of hidden units
    assert FORESIGHT(features="released8").weights().check(tensors, model) == ""
    why = FORESIGHT().weights().check(tensors, model)
    assert why == "they read features=released8, the method has features=paper6"
    assert FORESIGHT().weights().check({"w1": torch.zeros(2)}, model) == "their tensors are no scorer"
    why = FORESIGHT(features="released8").weights().check(tensors, model | {"num_hidden_layers": 2})
    assert why.startswith("b1 is [3, 2, 5]; this model needs [2, 2, 5]")


def test_options_have_ranges():
    for options in ({"recent": 0}, {"pool": 0.5}):
        with pytest.raises(UserError):
            FORESIGHT(**options)
