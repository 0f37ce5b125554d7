"""Models that cannot be had or used, from a folder or a hub on this machine: B041 to B055 of the bad inputs."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas
import pytest
from support.hub import COMMIT, Hub, Repo, environment

from kvbench import tiny
from kvbench.store import read_rows, read_texts

TOKEN = "hf_canaryABCDEFGHIJKLMNOPQRSTUVWXYZ"
CONFIG = {"model_type": "qwen3", "max_position_embeddings": 32768}
RUN = "run --method knorm --budget 32 --task walk/orbit-100 --limit 1 --interval 8 --max-new-tokens 8 --samples 1 -q"
TINY = {
    path.name: path.read_bytes()
    for path in tiny.path().iterdir()
    if path.suffix in (".json", ".safetensors") and not path.name.startswith(("card", "duo", "headkv"))
}
REPOS = {
    "org/gated": Repo({"config.json": b"{}", "model.safetensors": b""}, gated=True),
    "org/pickled": Repo({"config.json": json.dumps(CONFIG).encode(), "pytorch_model.bin": b"x"}),
    "org/notes": Repo({"README.md": b"#"}),
    "org/own-code": Repo(
        {
            "config.json": json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}).encode(),
            "mine.py": b"raise SystemExit('the code of a repository ran')",
            "model.safetensors": b"",
            "tokenizer.json": b"{}",
        }
    ),
    "org/tiny": Repo(TINY),
}
REFUSED = {  # model and more -> text
    "org/none": "error: the hub has no model 'org/none' (or it is private and HF_TOKEN is not set).",  # B043
    "org/gated": "error: 'org/gated' is gated. Accept its terms on its page, then set HF_TOKEN or run 'hf auth login'.",
    "org/pickled": "error: 'org/pickled' has only pickle weights (pytorch_model.bin). kvbench loads safetensors only",
    "org/notes": "error: 'org/notes' has no config.json on the hub; it is not a model of transformers.",
    "org/own-code": "error: 'org/own-code' needs code from its repository, which kvbench never runs.",  # B047
    "org/tiny --revision v9": "error: model 'org/tiny' has no revision 'v9' on the hub.",
    "./own-code": "error: './own-code' needs code from its repository, which kvbench never runs.",
    "./lacking": "error: './lacking' lacks weights that its index names: model-00002-of-00002.safetensors.",
    "./mixed": "error: the tokenizer has 600 tokens and the model 512 embeddings; they do not belong together.",  # B051
}

DEEP = "[" * 100_000 + "]" * 100_000
SPOILT = {  # file of the built-in model, and what it holds instead, or what is changed in it
    "deep": ("config.json", DEEP),
    "deep tokenizer": ("tokenizer.json", DEEP),
    "deep tokenizer configuration": ("tokenizer_config.json", DEEP),
    "deep generation": ("generation_config.json", DEEP),
    "text": ("config.json", {"text_config": [1]}),
    "context": ("config.json", {"max_position_embeddings": "abc"}),
    "heads": ("config.json", {"num_attention_heads": "abc"}),
    "layers": ("config.json", {"layer_types": 5}),
    "class": ("tokenizer_config.json", {"tokenizer_class": 5}),
    "longest": ("tokenizer_config.json", {"model_max_length": {"a": 1}}),
    "pad": ("generation_config.json", {"pad_token_id": ["a"]}),
    "end": ("generation_config.json", {"eos_token_id": [[1]]}),
}


def weights(path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for name, config in (
        ("own-code", {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}),
        ("lacking", CONFIG),
    ):
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config))
        (path / name / "tokenizer.json").write_text("{}")
    weights(path / "own-code/model.safetensors")
    (path / "own-code/mine.py").write_text("raise SystemExit('the code of a folder ran')")
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weights(path / "lacking" / shards[0])
    index = {"weight_map": dict(zip("ab", shards))}
    (path / "lacking/model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copytree(tiny.path(), path / "mixed", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tokenizer = json.loads((path / "mixed/tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"more{number}": number for number in range(len(vocabulary), 600)}
    (path / "mixed/tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    shutil.copytree(tiny.path(), path / "endless", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((path / "endless" / name).read_text())
        (path / "endless" / name).write_text(json.dumps({k: v for k, v in content.items() if not k.startswith("eos")}))
    return path


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub(REPOS).running() as hub:
        yield hub


@pytest.fixture(scope="module")
def session(calls: Callable, hub: Hub, folder: Path) -> dict:
    """All calls with a hub that answers."""
    variables = environment(hub.url, folder) | {"HF_TOKEN": TOKEN}
    lines = {name: f"{RUN} --model {name}" for name in REFUSED}
    lines |= {
        "usage first": f"{RUN} --model org/none --seed x",
        "plan": f"{RUN} --model org/tiny --dry-run --json",
        "shape": "list models org/tiny --json",
        "run": f"{RUN} --model org/tiny --run-name r1",
        "again": f"{RUN} --model org/tiny --run-name r1",
        "endless": f"{RUN} --model ./endless --run-name endless",
        "stopped": f"{RUN} --model ./endless --run-name stopped --stop 7 --stop 3",
        "first stop": f"{RUN} --model org/tiny --run-name first --stop 7",
    }
    return dict(zip(lines, calls(folder, [(line.split(), variables) for line in lines.values()])))


@pytest.mark.parametrize("model", REFUSED)
def test_what_cannot_be_used(session: dict, model: str) -> None:
    result = session[model]
    assert result.code == 3, result.err
    assert REFUSED[model] in result.err
    assert len(result.err.splitlines()) == 1
    assert TOKEN not in result.err + result.out


def test_without_an_end_token_something_must_stop_an_answer(session: dict, folder: Path) -> None:
    """B052. A missing padding token does not matter: nothing is padded."""
    assert session["endless"].code == 2
    assert session["endless"].err == (
        "error: model './endless' names no end token, and task 'walk/orbit-100' has no stop string: every answer would "
        "have 8 tokens. Give --stop TEXT.\n"
    )
    assert session["stopped"].code == 0, session["stopped"].err
    (row,) = read_rows(folder / "results/stopped").to_dict("records")
    assert (row["stop_reason"], row["stop"]) == ("stop_string", '["7","3"]')
    (text,) = read_texts(folder / "results/stopped")["output"]
    assert not set("73") & set(text)


def test_stop_strings_make_other_rows(session: dict, folder: Path) -> None:
    assert session["first stop"].code == 0, session["first stop"].err
    (row,) = read_rows(folder / "results/first").to_dict("records")
    (plain,) = read_rows(folder / "results/r1").to_dict("records")
    assert row["row_key"] != plain["row_key"]
    assert row["stop"] == '["7"]'
    assert pandas.isna(plain["stop"])


def test_the_token_is_used_and_never_shown(session: dict, hub: Hub, folder: Path) -> None:
    assert session["run"].code == 0, session["run"].err
    assert f"Bearer {TOKEN}" in hub.tokens
    kept = [path for path in (folder / "results").rglob("*") if path.is_file()]
    assert kept
    assert not any(TOKEN.encode() in path.read_bytes() for path in kept)


def test_a_usage_error_is_told_without_asking_the_hub(session: dict) -> None:
    result = session["usage first"]
    assert (result.code, result.torch) == (2, True)
    assert result.err.startswith("error: --seed must be")


def test_a_plan_fetches_no_weights(session: dict, hub: Hub) -> None:
    assert session["plan"].code == 0, session["plan"].err
    assert json.loads(session["plan"].out.splitlines()[-1])["rows_planned"] == 1
    assert json.loads(session["shape"].out)["num_hidden_layers"] == json.loads(TINY["config.json"])["num_hidden_layers"]


def test_a_run_after_a_plan_fetches_the_rest(session: dict, folder: Path) -> None:
    """The cache then holds a part of the model, which is no model."""
    assert session["run"].code == 0, session["run"].err
    record = json.loads((folder / "results/r1/run.json").read_text())
    assert record["environment"]["model"] == {"model": "org/tiny", "model_revision": COMMIT}
    assert session["again"].code == 0, session["again"].err


def test_a_cached_model_needs_no_hub(session: dict, calls: Callable, folder: Path) -> None:
    nowhere = environment("http://127.0.0.1:9", folder)
    (result,) = calls(folder, [(f"{RUN} --model org/tiny --run-name r2".split(), nowhere)])
    assert result.code == 0, result.err


def test_a_model_that_moved_on_the_hub_is_another_one(
    session: dict, calls: Callable, folder: Path, tmp_path: Path
) -> None:
    """A run without --revision goes on where the cache does not hold the commit that it began with."""
    assert session["run"].code == 0, session["run"].err
    shutil.copytree(folder / "results/r1", tmp_path / "results/r1")
    kept = {path: path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()}
    with Hub({"org/tiny": Repo(TINY, commit="2" * 40)}).running() as moved:
        variables = environment(moved.url, tmp_path)
        lines = ["run --resume r1 -q --model org/tiny", f"{RUN} --model org/tiny --run-name r1"]
        results = calls(tmp_path, [(line.split(), variables) for line in lines])
    for result in results:
        assert result.code == 2, result.err
        assert result.err == (
            f"error: model 'org/tiny' is at revision {'2' * 40} now; run 'r1' began with {COMMIT}. Start a "
            f"new run (kvbench run --run-name), or continue the run with --resume and --revision {COMMIT}.\n"
        )
    assert {path: path.read_bytes() for path in (tmp_path / "results").rglob("*") if path.is_file()} == kept
    assert not any("safetensors" in line and line.startswith("GET") for line in moved.asked)  # no weights were fetched


def test_the_recorded_commit_continues_a_run_whose_branch_moved(
    session: dict, calls: Callable, folder: Path, tmp_path: Path
) -> None:
    assert session["run"].code == 0, session["run"].err
    for copied in ("results/r1", "hf/hub/models--org--tiny"):
        shutil.copytree(folder / copied, tmp_path / copied, symlinks=True)
    cache = tmp_path / "hf/hub/models--org--tiny"
    shutil.copytree(cache / "snapshots" / COMMIT, cache / "snapshots" / ("2" * 40), symlinks=True)
    (cache / "refs/main").write_text("2" * 40)
    lines = [f"run --resume r1 -q --revision {revision}" for revision in ("2" * 40, COMMIT)]
    variables = environment("http://127.0.0.1:9", tmp_path)
    other, former = calls(tmp_path, [(line.split(), variables) for line in ("run --resume r1 -q", *lines)])[1:]
    assert (other.code, "differs from the run's default" in other.err) == (2, True), other.err
    assert former.code == 0, former.err


def test_an_unreachable_hub_is_told_soon(kvbench: Callable, folder: Path, tmp_path: Path) -> None:
    result = kvbench(*f"{RUN} --model org/x".split(), cwd=folder, env=environment("http://127.0.0.1:9", tmp_path))
    assert result.code == 3
    assert result.err == (
        "error: cannot reach the hub and 'org/x' is not in the local cache. Try again, or give a local folder "
        "(--model PATH) or a cached model; HF_HUB_OFFLINE=1 then avoids the hub.\n"
    )  # B045


def test_a_damaged_model_folder_is_told_in_one_line(folder: Path, calls: Callable) -> None:
    for name, (file, change) in SPOILT.items():
        shutil.copytree(tiny.path(), folder / name, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        path = folder / name / file
        path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    lines = [([*RUN.split(), "--dry-run", "--model", f"./{name}"], {}) for name in SPOILT]
    wrong = {
        name: (result.code, result.err)
        for name, result in zip(SPOILT, calls(folder, lines), strict=True)
        if result.code != 3 or len(result.err.strip().splitlines()) != 1
    }
    assert not wrong
