"""Options: from text to fields, and every way that can go wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import pytest

from kvbench.errors import UserError
from kvbench.eviction.api import Method, Needs, Protect, option
from kvbench.eviction.choose import from_label, make
from kvbench.eviction.options import check_budget, describe, parse_options, split_option

LONG = "1" + "0" * 18


@dataclass(frozen=True)
class Example(Method):
    window: int = option(32, "newest queries", low=1)
    sinks: int = 4
    lam: float = option(0.5, "weight", low=0, high=1)
    alpha: float = option(0.8, "decay", above=0, high=1)
    kernel: int = option(5, "width", low=1, odd=True)
    pool: bool = True
    form: Literal["max", "mean"] = "max"
    limit: int | None = None
    name: str = "x"

    def needs(self) -> Needs:
        return Needs(queries="window", window=self.window)

    def protect(self, budget: int) -> Protect:
        return Protect(sinks=self.sinks, recent=self.window)

    def score(self, view):
        return view.positions.float()


def parse(*pairs):
    return parse_options("snapkv", Example, pairs)


def message(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return str(caught.value)


def test_values_of_every_type():
    method = parse(("window", "8"), ("lam", "1e-1"), ("pool", "OFF"), ("form", "mean"), ("limit", "3"), ("name", "a=b"))
    assert method == Example(window=8, lam=0.1, pool=False, form="mean", limit=3, name="a=b")
    assert parse(("limit", "none")).limit is None
    assert parse().window == 32


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        (("window", "abc"), "option 'window' of method 'snapkv' takes a whole number; got 'abc'."),
        (("window", "1.5"), "option 'window' of method 'snapkv' takes a whole number; got '1.5'."),
        (("window", "１２"), "option 'window' of method 'snapkv' takes a whole number; got '１２'."),
        (
            ("window", LONG),
            f"option 'window' of method 'snapkv' takes a whole number of at most 18 digits; got '{LONG}'.",
        ),
        (
            ("limit", f"-{LONG}"),
            f"option 'limit' of method 'snapkv' takes a whole number of at most 18 digits; got '-{LONG}'.",
        ),
        (("windw", "32"), "method 'snapkv' has no option 'windw'. Did you mean 'window'?"),
        (("window", "0"), "option 'window' of method 'snapkv' must be 1 or more; got 0."),
        (("lam", "nan"), "option 'lam' of method 'snapkv' takes a number; got 'nan'."),
        (("lam", "1_0"), "option 'lam' of method 'snapkv' takes a number; got '1_0'."),
        (("lam", "1e999"), "option 'lam' of method 'snapkv' must be from 0 to 1; got inf."),
        (("lam", "2"), "option 'lam' of method 'snapkv' must be from 0 to 1; got 2.0."),
        (("alpha", "0"), "option 'alpha' of method 'snapkv' must be above 0 and at most 1; got 0.0."),
        (("kernel", "4"), "option 'kernel' of method 'snapkv' must be an odd number, 1 or more; got 4."),
        (("pool", "maybe"), "option 'pool' of method 'snapkv' takes true or false; got 'maybe'."),
        (("form", "min"), "option 'form' of method 'snapkv' takes 'max' or 'mean'; got 'min'."),
        (("limit", ""), "option 'limit' of method 'snapkv' takes a whole number or 'none'; got ''."),
    ],
)
def test_one_line_says_what_is_wrong(pair, expected):
    assert message(parse, pair) == expected


def test_unknown_options_are_listed_when_nothing_is_near():
    assert message(parse, ("zzz", "1")).startswith("method 'snapkv' has no option 'zzz'. Known: window, sinks, lam")


def test_an_option_is_given_once():
    assert "twice" in message(lambda: parse(("window", "1"), ("window", "2")))


def test_ranges_hold_in_python_too():
    assert message(lambda: Example(lam=-0.1)) == "option 'lam' must be from 0 to 1; got -0.1."


def test_split_option():
    assert split_option("window=8") == (None, "window", "8")
    assert split_option("gkv.lam=0.5") == ("gkv", "lam", "0.5")
    assert split_option("snapkv-decode.compat=reference") == ("snapkv-decode", "compat", "reference")
    assert split_option("pool-kernel=a.b=c") == (None, "pool_kernel", "a.b=c")
    for text in ("window", "=3", ""):
        assert message(split_option, text) == f"--method-opt takes NAME=VALUE; got '{text}'."


def test_describe():
    infos = {info.name: info for info in describe(Example)}
    assert list(infos) == ["window", "sinks", "lam", "alpha", "kernel", "pool", "form", "limit", "name"]
    assert infos["window"].help == "newest queries"
    assert (infos["form"].type, infos["pool"].default, infos["limit"].default) == ("'max' or 'mean'", "true", "none")


def test_budgets():
    method = parse()
    check_budget("snapkv", method, 37)
    assert message(check_budget, "snapkv", method, 16) == (
        "method 'snapkv' keeps 4 sink + 32 window tokens at all times, so --budget must be at least 37; got 16."
    )
    assert message(check_budget, "gkv", method, None) == "method 'gkv' needs --budget. Example: --budget 512."


def test_a_label_of_two_methods_gives_each_its_options():
    both = from_label("snapkv+gkv(alpha=0.5, window=8)").options()
    assert (both["gkv.alpha"], both["gkv.window"], both["snapkv.window"]) == (0.5, 8, 8)
    one = from_label("snapkv+gkv(gkv.window=8)").options()
    assert (one["gkv.window"], one["snapkv.window"]) == (8, 32)
    with pytest.raises(UserError, match="no option 'nosuch'"):
        from_label("snapkv+gkv(nosuch=0.5)")
    for label in ("snapkv(window=8)+gkv", "snapkv(window=8) + gkv(alpha=0.9)"):
        with pytest.raises(UserError, match=r"together at the end, .* as in snapkv\+gkv\(snapkv\.window=8, gkv\."):
            from_label(label)
    with pytest.raises(UserError, match=r"names neither method; give 'gkv\.alpha'"):
        make("snapkv+gkv", {"alpha": 0.5})


def test_query_heads_share_the_budget_of_their_kv_head():
    method = from_label("snapkv(heads=query, window=12)")
    check_budget("snapkv", method, 26, group=2)
    with pytest.raises(UserError, match=r"--budget must be at least 26 \(13 in each of 2 query heads\); got 20\.$"):
        check_budget("snapkv", method, 20, group=2)


def test_a_budget_has_another_name_where_there_are_no_flags():
    with pytest.raises(UserError, match=r"^method 'gkv' needs budget\. Example: budget=512\.$"):
        check_budget("gkv", parse(), None, word="budget")
    with pytest.raises(UserError, match="so budget must be at least 37; got 16"):
        check_budget("gkv", parse(), 16, word="budget")


def test_full_takes_no_budget():
    from kvbench.registry import methods

    full = methods.get("full")()
    check_budget("full", full, None)
    assert message(check_budget, "full", full, 512) == "method 'full' evicts nothing and takes no --budget."


def test_listing_methods_does_not_import_torch():
    code = """if True:
        import sys
        from kvbench.eviction.options import describe, parse_options
        from kvbench.registry import methods
        for name, cls in methods.items():
            describe(cls), parse_options(name, cls, []).min_budget()
        sys.exit('torch' in sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("snapkv+tova", {}, "'tova' needs the same tokens in all heads"),
        ("snapkv+trimkv", {"snapkv.heads": "query"}, "'trimkv' has trained weights.*give snapkv.heads=kv"),
        ("ada-kv", {"base": "tova"}, "must name a method that does not average over heads; got 'tova'"),
        ("snapkv+chunkkv", {"chunkkv.base": "tova"}, "'chunkkv' needs the same tokens in all heads"),
        ("criticalkv", {"base": "chunkkv(base=tova)"}, "must name a method that does not average over heads"),
        ("ada-kv", {"base": "golden"}, "'base' .*must name a method that does not read the future; got 'golden'"),
        ("laq", {"inner": "golden(within=mean)"}, "must name a method that does not read the future"),
    ],
)
def test_combinations_whose_scores_would_be_wrong_are_refused(name, options, why):
    with pytest.raises(UserError, match=why):
        make(name, options)


@pytest.mark.parametrize(
    "name", ["streaming-llm+tova", "pyramidinfer+tova", "sepllm+tova", "snapkv+streaming-llm", "snapkv+trimkv"]
)
def test_combinations_whose_scores_are_right_are_taken(name):
    assert make(name, {}).takes_budget
