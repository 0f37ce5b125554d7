"""``kvbench audit`` as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import model_folder

from kvbench import registry
from kvbench.audit.invariants.checks import INVARIANTS
from kvbench.cli.app import main
from kvbench.cli.commands.audit import _chosen

PLUGIN = """
from dataclasses import dataclass
from kvbench.eviction.api import Method, option
from kvbench.registry import methods

@methods.register("same-for-all")
@dataclass(frozen=True)
class Same(Method):
    size: int = option(5, "entries that stay", low=1)

    def score(self, view):
        return -view.keys.norm(dim=-1)

    def allowed(self, budget, prompt_len, seen, evictions):
        return self.size
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(model_folder(tmp_path_factory.mktemp("model")))


@pytest.fixture
def plugin(tmp_path: Path):
    saved = registry.methods.save()
    file = tmp_path / "same.py"
    file.write_text(PLUGIN)
    yield str(file)
    registry.methods.restore(saved)


def test_methods_that_hold(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["audit", "gkv", "headkv", "full", "--method-opt", "headkv.window=8", "--model", model, "--json"])
    out, _ = capsys.readouterr()
    found = json.loads(out)
    assert code == 0
    assert found["ok"] is True
    assert found["models"] == [model]
    assert list(found["methods"]) == ["gkv", "headkv(window=8)", "full"]
    assert set(found["methods"]["gkv"].values()) == {"ok"}
    assert found["methods"]["headkv(window=8)"] == dict.fromkeys(INVARIANTS, "ok") | {"layouts": "n/a"}
    ways = {c["layout"] for c in found["checks"] if (c["method"], c["invariant"]) == ("gkv", "budget")}
    assert ways == {"dense", "paged", "chunked", "tail", "share"}
    assert found["methods"]["full"]["oracle"] == "ok"
    assert {c["layout"] for c in found["checks"] if c["invariant"] == "memory"} == {"dense", "paged"}
    assert all(c["reason"] for c in found["checks"] if c["verdict"] == "n/a")  # nothing is skipped silently


def test_a_plugin_that_does_not(
    model: str, plugin: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code = main(["audit", "same-for-all", "--plugin", plugin, "--method-opt", "size=4", "--model", model, "--quiet"])
    out, err = capsys.readouterr()
    assert code == 1
    assert "same-for-all(size=4)" in out.splitlines()[2]
    assert "FAIL" in out.splitlines()[2]
    [line] = [line for line in out.splitlines() if line.startswith("FAIL") and " effect: " in line]
    assert "budgets 6 and 96 keep the same 16 entries" in line
    assert [line for line in out.splitlines() if line.startswith("n/a ") and "the method protects no tokens" in line]
    assert out.splitlines()[-1].endswith("Not all invariants hold.")
    assert err == ""


def test_a_method_that_drops_nothing(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["audit", "rpc", "gkv", "--method-opt", "rpc.form=native", "--model", model, "--quiet"]
    assert main(arguments) == 0
    out, _ = capsys.readouterr()
    assert out.splitlines()[-1].endswith("All invariants hold. No check saw an entry dropped by rpc(form=native).")
    [line] = [line for line in out.splitlines() if "dropped nothing in sequences this short" in line]
    assert " protect, real, batch, leak, memory, oracle, past, layouts, generate: " in line
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr()[0])
    assert found["dropped_nothing"] == ["rpc(form=native)"]
    assert found["methods"]["rpc(form=native)"]["oracle"] == "n/a"


def test_a_method_that_drops_something(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--method-opt", "form=native", "--method-opt", "P=8", "--method-opt", "R=4"]
    assert main(["audit", "rpc", *options, "--model", model, "--json"]) == 0
    found = json.loads(capsys.readouterr()[0])
    assert found["dropped_nothing"] == []
    [verdicts] = found["methods"].values()
    assert {name for name, verdict in verdicts.items() if verdict == "n/a"} == {"budget", "effect", "full"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no method given"),
        (["gvk"], "Did you mean 'gkv'"),
        (["gkv", "--all"], "methods or --all"),
        (["gkv", "--parity", "."], "leave out METHOD"),
        (["--parity", "nowhere"], "is not a folder"),
        (["gkv", "--method-opt", "windo=3"], "no audited method has the option"),
        (["gkv", "--method-opt", "h2o.recent=3"], "is not checked here"),
        (["gkv", "--method-opt", "window=none"], "takes a whole number"),
        (["gkv", "--plugin", "nowhere.py"], "does not exist"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


def test_the_option_of_every_method_needs_no_method_s_name() -> None:
    [(name, method)] = _chosen(["gkv"], False, ["protection=recent=30"])
    assert (name, method.protection) == ("gkv(protection=recent=30)", "recent=30")
    for text, owners in (("protection", {"snapkv", "gkv"}), ("gkv.protection", {"gkv"})):
        [(_, both)] = _chosen(["snapkv+gkv"], False, [f"{text}=recent=128"])
        found = {option.partition(".")[0] for option, value in both.options().items() if value == "recent=128"}
        assert found == owners


def test_every_invariant_says_what_it_proves() -> None:
    assert all(len(i.statement) > 30 and i.statement.endswith(".") for i in INVARIANTS.values())
