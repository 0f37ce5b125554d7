"""scope: the prompt's share, the answer's part as it grows, and when it is evicted."""

from __future__ import annotations

import pytest
import torch
from support.models import build

from kvbench.engine.loop import Engine
from kvbench.errors import UserError
from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.records import Request
from kvbench.registry import methods

PROMPT = tuple(range(3, 63))
BASE = "snapkv(window=4)"


def held(form, budget=40, new=60, prompt=PROMPT, **options):
    """(tokens seen, entries of the prompt, entries of the answer) after every eviction, the same in all heads."""
    method = methods.get("scope")(base=BASE, form=form, recent=4, delta=5, **options)
    events = []
    engine = Engine(
        build("llama"), method, budget=budget, interval=8, slots=1, max_tokens=160, log=lambda *e: events.append(e)
    )
    request = Request(task="t", doc_id="d", prompt_ids=prompt, max_new_tokens=new, forced=tuple(range(9, 9 + new)))
    list(engine.generate([request]))
    sizes = {}
    for _, seen, _, heads in events:
        of_prompt = {int((positions < len(prompt)).sum()) for positions in heads}
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
    for base in ("gkv", "full", "duo", "snapkv+gkv", "nothing"):
        with pytest.raises(UserError, match="base"):
            methods.get("scope")(base=base)
    method = methods.get("scope")(base=BASE, recent=7)
    least = method.min_budget()
    assert least - int(0.8 * least) == 8
    assert methods.get("scope")(recent=1).min_budget() * 0.8 >= methods.get("snapkv")().min_budget()
