"""model_args of lm-eval: what fits becomes kvbench's settings, what does not is one sentence in lm-eval's spelling."""

from __future__ import annotations

import pytest

from kvbench.errors import UserError
from kvbench.integrations.model_args import read


def given(**values):
    return read(values, device=None, batch_size=None)


def test_settings_budget_and_options():
    args = read(
        {"model": "tiny", "method": "g-kv", "budget": 64, "interval": 32, "gkv.alpha": 0.9, "thinking": True},
        device="cpu",
        batch_size=1,
    )
    assert (args.choice.name, args.choice.options, args.budget) == ("gkv", (("alpha", 0.9),), 64)
    assert (args.run.interval, args.run.device, args.run.thinking, args.run.slots) == (32, "cpu", True, "auto")
    assert args.method().alpha == 0.9


def test_a_share_of_the_prompt_and_two_methods():
    args = given(method="snapkv+gkv", budget="25%", **{"gkv.alpha": 0.9, "snapkv.window": 8})
    assert (args.budget, args.choice.name) == (0.25, "snapkv+gkv")
    assert args.method().options()["gkv.alpha"] == 0.9


def test_without_a_method_nothing_is_evicted():
    assert (given().choice.name, given().budget, given().run.model) == ("full", None, "tiny")


@pytest.mark.parametrize(("batch_size", "slots"), [(None, "auto"), (1, "auto"), ("auto", "auto"), ("8", 8), (8, 8)])
def test_batch_size_is_the_number_of_slots_but_for_its_default(batch_size, slots):
    assert read({}, device=None, batch_size=batch_size).run.slots == slots


def test_slots_win_over_the_batch_size():
    assert read({"slots": 3}, device=None, batch_size=8).run.slots == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"methd": "gkv"}, "unknown key 'methd'. Did you mean 'method'? Options of a method are written"),
        ({"method": "gkv"}, "method 'gkv' needs budget. Example: budget=512."),
        ({"method": "full", "budget": 64}, "method 'full' evicts nothing and takes no budget."),
        ({"method": "gkv", "budget": 8}, "budget must be at least 17; got 8."),
        ({"method": "gkv", "budget": 0.5}, "got '0.5'. Did you mean 50%?"),
        ({"method": "gkv", "budget": 64, "gkv.alpah": 1}, "no option 'alpah'. Did you mean 'alpha'?"),
        ({"method": "gkv", "budget": 64, "h2o.sinks": 1}, "option 'h2o.sinks' is for method 'h2o'"),
        ({"revision": 1234567}, "revision was read as 1234567, not as text; put single quotes round the value"),
        ({"interval": 0}, "interval must be 1 or more; got 0."),
        ({"truncate": "right"}, "truncate 'right': choose none, left."),
    ],
)
def test_what_does_not_fit(values, message):
    with pytest.raises(UserError) as caught:
        given(**values)
    assert str(caught.value).startswith("model_args: ")
    assert message in str(caught.value)
    assert "--" not in str(caught.value)
