"""scope: the prompt's share, the answer's part as it grows, and when it is evicted."""

from __future__ import annotations

import pytest
import torch
from support.models import build

from kvbench.engine.loop import Engine
from kvbench.errors import UserError
from kvbench.eviction.choose import from_label
from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.records import Request
from kvbench.registry import methods

PROMPT = tuple(range(3, 63))
BASE = "snapkv(window=4)"


def kept(method, budget=40, new=60, prompt=PROMPT, compress_at=None):
    """(tokens seen, kept positions of each head) of every eviction of every layer."""
    events = []
    sizes = {"budget": budget, "interval": 8, "slots": 1, "max_tokens": 160}
    engine = Engine(build("llama"), method, **sizes, tail=16, log=lambda *e: events.append((e[1], e[3])))
    facts = {"task": "t", "doc_id": "d", "prompt_ids": prompt, "max_new_tokens": new, "compress_at": compress_at}
    list(engine.generate([Request(**facts, forced=tuple(range(9, 9 + new)))]))
    return events


def held(form, **more):
    """(tokens seen, entries of the prompt, entries of the answer) after every eviction, the same in all heads."""
    method = methods.get("scope")(base=BASE, form=form, recent=4, delta=5)
    sizes, count = {}, len(more.get("prompt", PROMPT))
    for seen, heads in kept(method, **more):
        of_prompt = {int((positions < count).sum()) for positions in heads}
        sizes.setdefault(seen, set()).update((n, len(p) - n) for n in of_prompt for p in heads)
    assert all(len(found) == 1 for found in sizes.values())
    return [(seen, *found.pop()) for seen, found in sorted(sizes.items())]


def test_the_prompt_keeps_its_share_and_the_answer_slides():
    first, *later = held("slide")
    assert first == (60, 32, 0)
    assert later
    assert all((prompt, answer) == (32, 8) for _, prompt, answer in later)
    assert [seen for seen, _, _ in later] == [76, 84, 92, 100, 108, 116]


def test_the_answer_s_part_grows_within_the_budget():
    _, *later = held("adaptive", budget=50)
    assert all((prompt, answer) == (40, min(10, 4 + (seen - 60) // 5)) for seen, prompt, answer in later)
    assert [seen for seen, _, _ in later][:2] == [68, 76]


def test_it_jumps_every_delta_tokens():
    _, *later = held("discontinuous", budget=50)
    assert all((seen - 60) % 5 == 0 and answer == min(10, 4 + (seen - 60) // 5) for seen, _, answer in later)


def test_a_short_prompt_stays_and_leaves_its_room():
    sizes = held("slide", prompt=PROMPT[:20])
    assert sizes
    assert all((prompt, answer) == (20, 20) for _, prompt, answer in sizes)


def test_the_newest_query_decides():
    keys = torch.eye(8)[None, None]
    method = methods.get("scope")(base=BASE, recent=1, form="slide").during("decode")
    query = torch.tensor([0, 0, 0, 5.0, 1, 9, 2, 0])[None, None, None]
    [decision] = decide(method, [make_view(keys, query, budget=5, prompt_len=2)])
    assert decision.keep[0, 0].nonzero()[:, 0].tolist() == [0, 1, 3, 5, 7]


def test_bases_and_budgets_are_checked():
    for base in ("gkv", "full", "duo", "snapkv+gkv", "scope", "nothing", "ada-kv", "pyramidkv", "pyramidinfer"):
        with pytest.raises(UserError, match="base"):
            methods.get("scope")(base=base)
    method = methods.get("scope")(base=BASE, recent=7)
    least = method.min_budget()
    assert least - int(0.8 * least) == 8
    assert methods.get("scope")(recent=1).min_budget() * 0.8 >= methods.get("snapkv")().min_budget()


def test_another_protection_holds_in_both_parts():
    method = from_label("scope(base=snapkv(window=4), recent=4, protection=sinks=12+recent=8)")
    assert method.min_budget() == 45  # of which a fifth is the newest 8 and one more
    events = kept(method, budget=60)
    assert len({seen for seen, _ in events}) > 2
    for seen, heads in events:
        stays = {*range(12), *range(seen - 8, seen)}
        assert all(stays <= set(head.tolist()) for head in heads)


def test_without_protection_the_newest_tokens_of_the_answer_compete():
    keys, query = torch.eye(8)[None, None], torch.tensor([0, 0, 0, 5.0, 1, 9, 2, 0])[None, None, None]
    view = make_view(keys, query, budget=4, prompt_len=2)
    for protection, newest in (("own", [5, 7]), ("none", [3, 5])):
        method = methods.get("scope")(base="locret", recent=1, form="slide", protection=protection)
        [decision] = decide(method.during("decode"), [view])
        assert decision.keep[0, 0].nonzero()[:, 0].tolist() == [0, 1, *newest]


def test_a_protection_that_the_base_cannot_take_is_refused():
    with pytest.raises(UserError, match=r"'protection' .* must keep the newest 4 tokens"):
        from_label("scope(base=snapkv(window=4), protection=recent=2)")


def test_a_question_read_after_the_eviction_does_not_displace_the_oldest_tokens():
    method = methods.get("scope")(base=BASE, recent=4, delta=5)
    events = kept(method, new=10, compress_at=48)
    before = [{*head.tolist(), *range(48, 60)} for seen, heads in events if seen == 48 for head in heads]
    after = [set(head.tolist()) for seen, heads in events if seen == 68 for head in heads]
    assert {len(head) for head in after} == {32 + 4 + 8 // 5}
    assert all(set(range(64, 68)) <= head for head in after)
    assert any(min(new) == min(old) for old, new in zip(before, after, strict=True))


def test_entries_of_the_prompt_go_last_and_the_least_attended_first():
    keys = torch.eye(8)[None, None]
    method = methods.get("scope")(base=BASE, recent=1, form="slide").during("decode")
    query = torch.tensor([3.0, 0, 2, 1, 9, 9, 9, 0])[None, None, None]
    [decision] = decide(method, [make_view(keys, query, budget=4, prompt_len=4)])
    assert decision.keep[0, 0].nonzero()[:, 0].tolist() == [0, 2, 3, 7]


def test_a_draft_reads_as_many_entries_of_the_prompt_as_stay():
    """laq drafts from a copy of the prompt's cache, so a share of a budget is as good as a smaller budget."""
    laq = "laq(inner=knorm, w2=4)"
    share = kept(from_label(f"scope(base={laq}, share=0.5, recent=4)"), budget=40, new=4)
    alone = kept(from_label(laq), budget=20, new=4)
    assert [seen for seen, _ in share] == [seen for seen, _ in alone]
    for (_, mine), (_, other) in zip(share, alone, strict=True):
        assert all(torch.equal(a.sort().values, b.sort().values) for a, b in zip(mine, other, strict=True))


LABELS = (
    *("scope+gkv", "snapkv+scope", "text-first(base=scope)", "ada-kv(base=scope)", "chunkkv(base=scope)"),
    *("laq(inner=scope)", "criticalkv(base=scope)", "criticalkv(base=scope, ada=true)", "scope(base=scope)"),
    *("text-first(base=snapkv+gkv)", "laq(inner=snapkv+gkv)"),
)


@pytest.mark.parametrize("label", LABELS)
def test_no_method_wraps_a_combination_of_two(label):
    with pytest.raises(UserError, match=r"combines two methods|two combined methods"):
        from_label(label)
