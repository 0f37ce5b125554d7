"""Protections that replace a method's own: their spelling, the entries that they cover, and which methods take them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.methods import with_tables
from support.models import build, requests

from kvbench.engine.loop import Engine
from kvbench.errors import UserError
from kvbench.eviction.api import Protect
from kvbench.eviction.choose import from_label
from kvbench.eviction.protection import parse_protection
from kvbench.eviction.select import protected


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        ("prompt, sinks=4,recent=64", "prompt+sinks=4+recent=64"),
        ("recent=64+prompt=50%", "prompt=50%+recent=64"),
        ("prompt=12.5%", "prompt=12.5%"),
        ("prompt=100", "prompt=100"),
        (" none ", "none"),
    ],
)
def test_one_spelling(text: str, spelled: str) -> None:
    replaced = parse_protection(text)
    assert str(replaced) == spelled
    assert parse_protection(spelled) == replaced


def test_own_is_no_replacement() -> None:
    assert parse_protection("own") is None
    assert from_label("gkv(protection=own)") == from_label("gkv")
    assert "protection" not in from_label("gkv").options()


@pytest.mark.parametrize(
    "text",
    ["", "prompt=0", "prompt=0%", "prompt=101%", "sinks", "sinks=50%", "recent=-1", "recent=4+recent=5", "tail=3"],
)
def test_malformed_texts(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_protection(text)


@pytest.mark.parametrize(
    ("text", "budget", "most"),
    [
        ("prompt", 48, 31),  # of a longer prompt: room for 16 recent tokens and one more
        ("prompt=50%", 48, 24),
        ("prompt=90%", 48, 31),
        ("prompt=10", 48, 10),
        ("prompt", 17, 0),
    ],
)
def test_the_prompt_leaves_room(text: str, budget: int, most: int) -> None:
    replaced = parse_protection(f"{text}+recent=16")
    assert replaced is not None
    assert replaced.at(budget) == Protect(recent=16, prompt=True, prompt_most=most)


def test_the_mask_has_the_first_tokens_of_the_prompt() -> None:
    positions = torch.arange(12).expand(2, 1, 12)
    seen, prompt_len = torch.tensor([12, 12]), torch.tensor([3, 8])
    mask = protected(Protect(sinks=1, recent=2, prompt=True, prompt_most=5), positions, seen, prompt_len)
    assert mask is not None
    assert [row.nonzero().flatten().tolist() for row in mask[:, 0]] == [[0, 1, 2, 10, 11], [0, 1, 2, 3, 4, 10, 11]]


def test_the_smallest_budget_has_room_for_it() -> None:
    assert from_label("gkv(protection=prompt+sinks=4+recent=20)").min_budget() == 25
    assert from_label("ada-kv(base=gkv(protection=recent=20), protection=recent=30)").min_budget() == 31
    assert from_label("ada-kv(base=gkv(protection=recent=20))").keeps_always(48) == Protect(recent=20)


def test_a_base_under_another_protection_gives_room_to_every_layer() -> None:
    wrapped = from_label("ada-kv(base=pyramidkv(window=8, protection=prompt=90%+recent=32))")
    assert wrapped.replaced is not None
    assert not wrapped.layerwise
    assert from_label("ada-kv(base=pyramidkv(window=8))").layerwise


@pytest.mark.parametrize("label", ["random(prompt=all)", "triattention", "lagkv(sinks=4, lag=8)"])
def test_scores_that_protect_give_way(label: str) -> None:
    """Under another protection no score may keep what the method keeps by an infinite score of its own."""
    loaded, kept = with_tables(build("llama")), []
    method = from_label(f"{label.removesuffix(')')}{', ' if '(' in label else '('}protection=recent=8)")

    def log(key: int, seen: int, layer: int, heads: Sequence[torch.Tensor]) -> None:
        kept.extend(set(head.tolist()) for head in heads)

    engine = Engine(loaded, method, budget=24, interval=8, slots=1, max_tokens=100, log=log)
    list(engine.generate(requests(lengths=(16,), new_tokens=(60,), samples=1)))
    assert kept
    assert any(not {0, 1, 2, 3} <= positions for positions in kept)


def test_text_stays_before_images_under_any_protection() -> None:
    assert from_label("text-first(protection=sinks=2+recent=16)").keeps_always(48) == Protect(
        sinks=2, recent=16, text=True
    )


def test_each_part_of_two_methods_has_its_own() -> None:
    both = from_label("snapkv+gkv(snapkv.window=8, protection=recent=20)")
    assert both.options()["snapkv.protection"] == both.options()["gkv.protection"] == "recent=20"
    assert both.during("decode").keeps_always(48) == Protect(recent=20)


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("full(protection=none)", "is for methods that take a budget"),
        (
            "gkv(protection=recent=8)",
            "must keep the newest 16 tokens, which the method does not score: give recent=16 or more",
        ),
        ("rkv(compat=reference, protection=recent=8)", "is not in the code that compat=reference reproduces"),
        ("h2o(protection=newest)", "takes own, none, or some of prompt"),
    ],
)
def test_methods_that_cannot_take_it_say_why(label: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_label(label)
