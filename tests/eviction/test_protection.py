"""Protections that replace a method's own: their spelling, the entries that they cover, and which methods take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from support.methods import with_tables
from support.models import build, requests

from kvbench.engine.loop import Engine
from kvbench.errors import BudgetViolation, UserError
from kvbench.eviction.api import Method, Protect
from kvbench.eviction.choose import from_label
from kvbench.eviction.protection import parse_protection
from kvbench.eviction.rope import Rope
from kvbench.eviction.select import protected
from kvbench.eviction.view import LayerView, make_view


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
    assert from_label("duo(sinks=4, recent=16, protection=sinks=4+recent=64)").min_budget() == 69
    assert from_label("duo(sinks=4, recent=16)").min_budget() == 2


def test_a_base_under_another_protection_gives_room_to_every_layer() -> None:
    wrapped = from_label("ada-kv(base=pyramidkv(window=8, protection=prompt=90%+recent=32))")
    assert wrapped.replaced is not None
    assert not wrapped.layerwise
    assert from_label("ada-kv(base=pyramidkv(window=8))").layerwise


def evictions(label: str, prompt: int = 16) -> list[tuple[int, set[int]]]:
    """Tokens seen and positions kept, for every eviction, layer and head of a prompt with 60 more tokens."""
    kept = list[tuple[int, set[int]]]()

    def log(key: int, seen: int, layer: int, heads: Sequence[torch.Tensor]) -> None:
        kept.extend((seen, set(head.tolist())) for head in heads)

    loaded, method = with_tables(build("llama")), from_label(label)
    engine = Engine(loaded, method, budget=24, interval=8, slots=1, max_tokens=140, log=log)
    list(engine.generate(requests(lengths=(prompt,), new_tokens=(60,), samples=1)))
    assert kept
    return kept


PROTECT = (
    *("random(prompt=all)", "triattention", "lagkv(sinks=4, lag=8)", "criticalkv(base=random(prompt=all))"),
    *("ada-kv(base=random(prompt=all))", "chunkkv(base=lagkv(sinks=4, lag=8), chunk=4)"),
)


@pytest.mark.parametrize("label", PROTECT)
def test_scores_that_protect_give_way(label: str) -> None:
    """Under another protection no score may keep what the method keeps by an infinite score of its own."""
    kept = evictions(f"{label.removesuffix(')')}{', ' if '(' in label else '('}protection=recent=8)")
    assert any(not {0, 1, 2, 3} <= positions for _, positions in kept)


def test_uneven_budgets_of_layers_that_decide_together_have_room() -> None:
    kept = evictions("ada-kv(base=chunkkv(base=gkv(window=8), chunk=4, whole=true), protection=recent=16)")
    assert all({*range(seen - 16, seen)} <= positions for seen, positions in kept)


@pytest.mark.parametrize(
    "options", ["ada-kv(", "ada-kv(rounding=official, ", "ada-kv(floor=guarantee, ", "criticalkv(ada=true, "]
)
def test_a_layer_with_less_than_is_protected_gets_room_from_other_layers(options: str) -> None:
    kept = evictions(f"{options}base=pyramidkv(window=4, kernel=1), protection=sinks=2+recent=16)", prompt=70)
    assert all({0, 1, *range(54, 70)} <= positions for _, positions in kept)
    assert sum(len(positions) for _, positions in kept) == 24 * len(kept)


def test_sinks_that_another_protection_does_not_keep_are_scored() -> None:
    states = {"count": torch.tensor([5.0]), "mean": torch.ones(1, 1, 2)}
    keys = torch.randn(1, 1, 12, 2, generator=torch.Generator().manual_seed(0))
    view = make_view(keys, budget=6, prompt_len=8, states=states, rope=Rope(torch.zeros(1)))

    def score(options: str) -> torch.Tensor:
        return from_label(f"expected-attention(covariance=false, {options})").score(view)

    assert torch.equal(score("protection=recent=2"), score("sinks=0"))
    assert torch.equal(score("protection=sinks=2"), score("sinks=2"))
    for kept in ("sinks=4+recent=1", "sinks=5", "prompt=50%+sinks=4", "prompt"):
        assert torch.equal(score(f"protection={kept}"), score("sinks=4"))


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
        ("rpc(selectors=new, protection=recent=31)", "must keep the newest 32 tokens"),
        ("morphkv(voters=8, protection=recent=32)", "must keep the newest 33 tokens"),
        ("lookaheadkv(recent=32, protection=none)", "must keep the newest 32 tokens"),
    ],
)
def test_methods_that_cannot_take_it_say_why(label: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_label(label)


@dataclass(frozen=True)
class Full(Method):
    """Protects all entries at each budget, or at budgets below `most`."""

    sinks: int = 0
    most: int = 1 << 40

    def protect(self, budget: int) -> Protect:
        return Protect(sinks=self.sinks, recent=min(budget, self.most) - self.sinks)

    def score(self, view: LayerView) -> torch.Tensor:
        return view.positions.float()


@pytest.mark.parametrize("sinks", [0, 4])
def test_a_protection_that_fills_every_budget_is_refused_at_once(sinks: int) -> None:
    with pytest.raises(BudgetViolation, match=r"^Full\.protect\(\) fills every budget; it must leave room for one"):
        Full(sinks=sinks).min_budget()
    assert Full(sinks=sinks, most=200).min_budget() == 201
