"""``train --data hub:...``: a data set by name, its commit on the card, and one line where it cannot be had."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.hub import COMMIT, Hub, Repo
from support.recipes import change

from kvbench.cli.app import main
from kvbench.errors import SetupError, UserError
from kvbench.sources import hub
from kvbench.sources.data import hub_data
from kvbench.train.data_place import check_data, locate

ASK = "# Facts: cod 31, bow 46,\nAsk: cod?\nThink:"
ROWS = [{"problem": f"{ASK} {i}", "response": " cod 31,"} for i in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The `datasets` library with one data set in its cache, no network; and what it was asked for."""
    import datasets

    asked: dict[str, object] = {}

    def load(name: str, config: str | None, *, split: str, revision: str | None) -> datasets.Dataset:
        asked.update(name=name, config=config, split=split, revision=revision)
        table = datasets.Dataset.from_list(ROWS)
        table.info.download_checksums = {f"hf://datasets/{name}@{COMMIT}/data.jsonl": {}}
        return table

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "is_offline", lambda: True)
    monkeypatch.setattr(hub_data, "_in_datasets_cache", lambda name: True)
    return asked


def test_an_address_names_data_set_split_and_revision(cached: dict[str, object]) -> None:
    place = locate("hub:org/math")
    assert place.name == f"hub:org/math:train@{COMMIT}"
    assert place.path.read_bytes() == LINES
    assert cached == {"name": "org/math", "config": None, "split": "train", "revision": None}
    locate("hub:org/math:validation@v1.0")
    assert cached == {"name": "org/math", "config": None, "split": "validation", "revision": "v1.0"}
    cached.clear()
    assert locate(f"hub:org/math:train@{COMMIT}") == place
    assert not cached  # kvbench has the rows of this commit
    with pytest.raises(SetupError, match=f"the local cache has 'org/math' at revision {COMMIT}, not at 'ffff"):
        locate(f"hub:org/math@{'f' * 40}")


@pytest.mark.parametrize("data", ["hub:", "hub:a b", "hub:org/x:", "hub:org/x:train[:9]", "hub:org/x@", "hub:../x"])
def test_a_malformed_address_is_one_line(data: str) -> None:
    with pytest.raises(UserError, match=r"is no hub address; write hub:OWNER/NAME\[:SPLIT\]\[@REVISION\]\."):
        check_data(data)


def test_offline_is_one_line(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "is_offline", lambda: True)
    monkeypatch.setattr(hub_data, "_in_datasets_cache", lambda name: False)
    assert main(["train", "trimkv", "--data", "hub:org/none", "--out", str(tmp_path / "out")]) == 3
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        "error: data set 'org/none' is not on this machine and the hub is unreachable. Run the command once with "
        "network access, or give a file."
    )


def test_a_recipe_trains_on_a_data_set(cached, tmp_path: Path, capsys, monkeypatch) -> None:
    change(monkeypatch, "retention", held_out=1)
    small = [word for text in ("width=4", "budget=8", "interval=4", "max_tokens=24") for word in ("--opt", text)]
    command = ["train", "retention", "--data", "hub:org/math", "--steps", "1", "--batch", "2", *small, "-q", "--json"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    made = json.loads(capsys.readouterr().out.splitlines()[-1])["made"]
    assert made["settings"]["more"]["data"] == f"hub:org/math:train@{COMMIT}"
    assert "--data hub:org/math " in made["command"]


def test_a_training_does_not_go_on_with_a_newer_commit(cached, tmp_path: Path, capsys, monkeypatch) -> None:
    import datasets

    change(monkeypatch, "retention", held_out=1)
    small = [word for text in ("width=4", "budget=8", "interval=4", "max_tokens=24") for word in ("--opt", text)]
    command = ["train", "retention", "--steps", "1", "--batch", "2", *small, "-q", "--out", str(tmp_path / "out")]
    assert main([*command, "--data", "hub:org/math"]) == 0, capsys.readouterr().err
    older, newer = datasets.load_dataset, "e" * 40

    def load(*name: str, **how: str) -> datasets.Dataset:
        table = older(*name, **how)
        table.info.download_checksums = {f"hf://datasets/org/math@{newer}/data.jsonl": {}}
        return table

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert main([*command, "--data", "hub:org/math"]) == 2
    assert f"data hub:org/math:train@{COMMIT}, now hub:org/math:train@{newer}" in capsys.readouterr().err
    assert main([*command, "--data", f"hub:org/math@{COMMIT}"]) == 0, capsys.readouterr().err


def test_the_hub_is_asked_for_it(tmp_path: Path) -> None:
    """The real library against a hub on this machine."""
    import subprocess
    import sys

    code = "import sys; from kvbench.train.data_place import locate\ntry: print(locate(sys.argv[1]))\n"
    code += "except Exception as e: print(type(e).__name__, e)"
    served = Hub({"datasets/org/math": Repo({"train.jsonl": LINES})})

    def ask(data: str) -> str:
        env = os.environ | served.environment(tmp_path)
        done = subprocess.run([sys.executable, "-c", code, data], env=env, capture_output=True, text=True, timeout=120)
        return done.stdout.strip()

    with served.running():
        assert f"name='hub:org/math:train@{COMMIT}'" in ask("hub:org/math")
        assert ask("hub:org/other").startswith("SetupError the hub has no data set 'org/other'")
        assert ask("hub:org/math@v9") == "SetupError data set 'org/math' has no revision 'v9' on the hub."
