"""Every family that the docs name, as a repository on disk, by the commands that a user types."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file
from support import zoo
from support.families import BLOCK, ENGINE_DOCS, FAMILIES, Family, lists
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from kvbench import EvictionCache
from kvbench.cli.app import main
from kvbench.engine.model.load import auto_class
from kvbench.store import read_rows, read_texts

BUDGET, INTERVAL, NEW = 32, 8, 20
HERE = [family for family in FAMILIES if family.model_type in CONFIG_MAPPING_NAMES]
RUN = (
    f"run --task walk/orbit-100 --limit 2 --samples 1 --temperature 0 --budget {BUDGET} --interval {INTERVAL} "
    f"--max-new-tokens {NEW} --json -q"
).split()
REPLAY = (
    f"replay --task walk/orbit-100 --limit 1 --method gkv --budget {BUDGET} --interval {INTERVAL} "
    f"--max-new-tokens {NEW} --json -q"
).split()


def named(families: list[Family]):
    return pytest.mark.parametrize("family", families, ids=lambda family: family.name.replace(" ", "-"))


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs one command line in the folder that holds the repository `model`; its code, last line and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVBENCH_NO_PROGRESS", "1")

    def run(*arguments: str):
        capsys.readouterr()  # what making the repository printed
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, json.loads(out.splitlines()[-1]) if code == 0 else None, err

    return run


@named([family for family in HERE if family.refused is None])
def test_a_family_that_runs(family, tmp_path, command):
    config = zoo.configuration(family.model_type, family.changes)
    folder = zoo.repository(tmp_path / "model", config, family.seed)
    ask = [*RUN, "--model", "./model", "--run-name", "r"]

    code, plan, err = command(*ask, "--method", "full,gkv", "--dry-run")
    assert code == 0, err
    assert ("estimated" in err) == family.estimated
    assert [cell["method"] for cell in plan["plan"]] == ["full", "gkv"]

    code, _, err = command(*ask, "--method", "full,gkv")
    assert code == 0, err
    rows, texts = read_rows(tmp_path / "results/r"), read_texts(tmp_path / "results/r")
    assert (rows["status"] == "ok").all()
    evicted = rows[rows["method"] == "gkv"]
    assert (evicted["evictions"] > 0).any()
    assert evicted["entries_after_evict"].dropna().max() <= BUDGET
    assert evicted["entries_peak"].max() <= max(BUDGET + INTERVAL, rows["prompt_tokens"].max())

    code, resumed, err = command("run", "--resume", "r", "--json", "-q")
    assert code == 0, err
    assert (resumed["rows_done"], resumed["rows_planned"]) == (4, 4)

    code, _, err = command(*REPLAY, "--model", "./model")
    assert code == 0, err

    model = auto_class(config).from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for row, text in list(zip(rows.to_dict("records"), texts.to_dict("records")))[::2]:  # of each method the first
        ids = tokenizer(text["prompt"], return_tensors="pt")["input_ids"]
        cache = None if row["method"] == "full" else EvictionCache(model, "gkv", budget=BUDGET, interval=INTERVAL)
        out = model.generate(ids, max_new_tokens=NEW, past_key_values=cache)[0, ids.shape[1] :]
        assert tokenizer.decode(out, skip_special_tokens=True) == text["output"]


@named([family for family in HERE if family.refused is not None])
def test_a_family_that_is_refused(family, tmp_path, command):
    """The refusal comes from the configuration: the weights do not fit it."""
    zoo.repository(tmp_path / "model", zoo.configuration(family.model_type, family.changes), family.seed)
    for weights in (tmp_path / "model").glob("*.safetensors"):
        save_file({"other": torch.zeros(1)}, weights)
    for more in ["--dry-run"], []:
        code, _, err = command(*RUN, "--model", "./model", "--run-name", "r", "--method", "full,gkv", *more)
        assert code == 2
        assert err.startswith("error: ")
        assert family.refused in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "results/r").exists()


def refused(command, folder, config):
    """Return the exit code and the line that refuses a repository before it reads the weights, which do not fit."""
    folder.mkdir()
    save_file({"other": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    zoo.copy_tokenizer(folder)
    code, _, err = command(*RUN, "--model", "./model", "--run-name", "r", "--method", "full,gkv", "--dry-run")
    [line] = err.splitlines()
    return code, line


def test_a_hybrid_whose_layers_are_of_an_unknown_kind_is_refused(tmp_path, command):
    config = zoo.configuration("qwen3_5_text", {}).to_dict()
    config["layer_types"] = ["resonant_attention", *config["layer_types"][1:]]
    code, line = refused(command, tmp_path / "model", config)
    assert code in (2, 3)
    assert line.startswith("error: model ")
    assert "'resonant_attention'" in line


def test_a_model_that_speaks_is_refused(tmp_path, command):
    code, line = refused(command, tmp_path / "model", zoo.configuration("qwen3_omni_moe", {}).to_dict())
    assert code == 2
    assert line.startswith("error: model type 'qwen3_omni_moe' is not supported")


def test_the_zoo_is_large():
    assert len(HERE) >= 40
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_docs_name_what_the_zoo_runs():
    """`python -m support.families`, in tests/, writes them."""
    found = BLOCK.search(ENGINE_DOCS.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == found[1] + lists() + found[2]
