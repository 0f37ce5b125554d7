"""A run that goes on is the run that began: a model, template, table or draft that changed since is refused by name."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from runner.test_execute import Impatient
from safetensors.torch import load_file, save_file
from sources.test_model_files import flip, large

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.errors import Interrupted, UserError
from kvbench.runner import same_run
from kvbench.runner.execute import execute
from kvbench.runner.method_source import Source
from kvbench.sources import models
from kvbench.store import read_run

ROWS = 6
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
BIG = "model-00002-of-00002.safetensors"


@dataclass
class Began:
    """A run `r1` that was interrupted, and what it was made with."""

    home: Path
    config: RunConfig

    @property
    def run(self) -> Path:
        return self.home / "results" / "r1"

    def resumed(self, *more: str) -> tuple[int, str]:
        """Exit code and errors of ``kvbench run --resume r1``."""
        return call("run", "--resume", "r1", "--out", str(self.run.parent), "-q", *more)


def call(*argv: str) -> tuple[int, str]:
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = main(list(argv))
    return code, err.getvalue()


@pytest.fixture(scope="module")
def began(tmp_path_factory: pytest.TempPathFactory) -> Began:
    home = tmp_path_factory.mktemp("same")
    kept = shutil.ignore_patterns("*.py", "__pycache__", "card.json")
    shutil.copytree(tiny.path(), home / "model", ignore=kept)
    shutil.copytree(tiny.path(), home / "draft", ignore=kept)
    (home / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (home / "model" / "special_tokens_map.json").write_text("{}")
    large(home / "model" / BIG)
    (home / "given.jinja").write_text(TEMPLATE)
    for suffix in ("json", "safetensors"):
        shutil.move(home / "model" / f"headkv.{suffix}", home / f"table.{suffix}")
    methods = (
        MethodChoice(name="knorm"),
        MethodChoice(name="headkv", options=(("table", str(home / "table.safetensors")),)),
        MethodChoice(name="speckv", options=(("draft", str(home / "draft")), ("n", 4))),
    )
    config = RunConfig(
        grids=(Grid(methods=methods, budgets=(48,), tasks=("walk/orbit-100",)),),
        model=str(home / "model"),
        chat_template=str(home / "given.jinja"),
        interval=8,
        limit=2,
        samples=1,
        max_new_tokens=8,
        slots=1,
        device="cpu",
    )
    with pytest.raises(Interrupted):
        execute(
            config, out=home / "results", run_name="r1", progress=Impatient(signal.SIGINT, 1), notice=lambda text: None
        )
    assert 0 < read_run(home / "results" / "r1").saved < ROWS
    return Began(home, config)


def stored(began: Began) -> dict[str, bytes]:
    """Every file of the run: journal, record, and tables where there are any."""
    files = (path for path in began.run.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files}


def edit_json(**changes: object) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes))


def swap_tokens(path: Path) -> None:
    content = json.loads(path.read_text("utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content), "utf-8")


def middle(path: Path) -> None:
    flip(path, path.stat().st_size - (3 << 20) * 4 if path.name == BIG else path.stat().st_size // 2)


def unlink(path: Path) -> None:
    path.unlink()


def write(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "config.json": (edit_json(rope_theta=5), "changed"),
    "generation_config.json": (edit_json(eos_token_id=[0, 7]), "changed"),
    "tokenizer.json": (swap_tokens, "changed"),
    "tokenizer_config.json": (edit_json(chat_template="{{ 1 }}"), "changed"),
    "chat_template.jinja": (lambda path: path.write_text("x" + TEMPLATE), "changed"),
    "special_tokens_map.json": (unlink, "removed"),
    "added_tokens.json": (write, "added"),
    "additional_chat_templates/tool_use.jinja": (write, "added"),
    "model.safetensors": (middle, "changed"),
    BIG: (middle, "changed"),
}
UNDO = {"changed": "Put it back", "removed": "Put it back", "added": "Remove it"}


@pytest.fixture
def put_back(began: Began) -> Iterator[None]:
    """The files as they were, after the test."""
    names = [path for path in began.home.rglob("*") if path.is_file() and began.run not in path.parents]
    kept = {path: path.read_bytes() for path in names if path.name != BIG}
    yield
    for path in began.home.rglob("*"):
        if path.is_file() and path not in names and began.run not in path.parents:
            path.unlink()
    for path, content in kept.items():
        path.write_bytes(content)
    large(began.home / "model" / BIG)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.usefixtures("put_back")
def test_a_changed_model_is_refused_by_its_file(began: Began, name: str) -> None:
    change, what = CHANGES[name]
    before = stored(began)
    was = models.state(models.describe(began.config.model)).files.get(name, "")
    change(began.home / "model" / name)
    code, err = began.resumed()
    assert code == 2, err
    said = f"error: {name} of model '{began.home}/model' {what} since run 'r1' began"
    assert err.replace(" was added", " added").replace(" was removed", " removed").startswith(said)
    assert f". {UNDO[what]}, or start a new run (kvbench run --run-name).\n" in err
    if what == "changed":
        assert f"(was {was[:12]}, is " in err
    assert err.count("\n") == 1
    assert stored(began) == before
    with pytest.raises(UserError, match=f"{name} of model"):  # the command that began it, given again
        execute(began.config, out=began.home / "results", run_name="r1")
    with pytest.raises(UserError, match=f"{name} of model"):
        execute(began.config, out=began.home / "results", run_name="r1", allow_version_change=True)
    assert stored(began) == before


@pytest.mark.usefixtures("put_back")
def test_several_changed_files_are_listed(began: Began) -> None:
    for name in ("generation_config.json", "special_tokens_map.json", "added_tokens.json"):
        CHANGES[name][0](began.home / "model" / name)
    code, err = began.resumed()
    assert code == 2
    assert "error: 3 files of model '" in err
    assert "began: added_tokens.json (added), generation_config.json (was " in err
    assert "special_tokens_map.json (removed). Put them back, or start a new run (kvbench run --run-name).\n" in err


@pytest.mark.usefixtures("put_back")
def test_a_changed_template_is_refused(began: Began) -> None:
    before = stored(began)
    (began.home / "given.jinja").write_text("x" + TEMPLATE)
    code, err = began.resumed()
    assert code == 2
    assert f"error: --chat-template '{began.home}/given.jinja' (" in err
    assert "is not the file that run 'r1' began with" in err
    assert stored(began) == before


@pytest.mark.usefixtures("put_back")
def test_a_changed_table_is_refused(began: Began) -> None:
    """File and card both, as another training leaves them."""
    before = stored(began)
    table = began.home / "table.safetensors"
    save_file({name: tensor * 0.5 for name, tensor in load_file(table).items()}, table)
    card = json.loads(table.with_suffix(".json").read_text())
    table.with_suffix(".json").write_text(json.dumps(card | {"sha256": _sha256(table)}))
    code, err = began.resumed()
    assert code == 2, err
    assert "error: headkv of method 'headkv(table=" in err
    assert "changed since run 'r1' began (was " in err
    assert stored(began) == before


@pytest.mark.usefixtures("put_back")
def test_a_changed_draft_model_is_refused(began: Began) -> None:
    before = stored(began)
    edit_json(eos_token_id=[0, 7])(began.home / "draft" / "generation_config.json")
    code, err = began.resumed()
    assert code == 2, err
    assert f"error: draft {began.home}/draft of method 'speckv(draft=" in err
    assert stored(began) == before


@pytest.mark.usefixtures("put_back")
def test_scoring_asks_for_what_makes_prompts(began: Began) -> None:
    run = str(began.run)
    edit_json(eos_token_id=[0, 7])(began.home / "model" / "generation_config.json")
    middle(began.home / "model" / "model.safetensors")
    code, err = call("score", run)
    assert code == 0, err
    before = stored(began)
    swap_tokens(began.home / "model" / "tokenizer.json")
    code, err = call("score", run)
    assert code == 2
    assert "error: tokenizer.json of model '" in err
    assert stored(began) == before


def test_other_settings_are_told_before_another_model(began: Began) -> None:
    other = RunConfig(grids=began.config.grids, model=str(began.home / "draft"))
    with pytest.raises(UserError, match="holds a run with other settings"):
        execute(other, out=began.home / "results", run_name="r1")


def test_the_record_names_every_file(began: Began) -> None:
    record = json.loads((began.run / "run.json").read_text())["environment"]
    names = [entry["name"] for entry in record["model_files"]]
    assert names == sorted([*CHANGES.keys() - {"added_tokens.json", "additional_chat_templates/tool_use.jinja"}])
    assert record["chat_template"] == {"path": str(began.home / "given.jinja"), "sha256": record_hash(began)}
    assert [entry["method"].partition("(")[0] for entry in record["methods"]] == ["knorm", "headkv", "speckv"]


def record_hash(began: Began) -> str:
    return _sha256(began.home / "given.jinja")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_same_model_elsewhere_is_none_of_this(began: Began) -> None:
    """Files that decide no token may change; then the run ends with all its rows. The last test of this run."""
    (began.home / "model" / "README.md").write_text("notes")
    os.utime(began.home / "model" / "model.safetensors")
    code, err = began.resumed()
    assert code == 0, err
    rows = read_run(began.run).rows
    assert len(rows) == ROWS
    assert set(rows.status) == {"ok"}
    assert rows.method_source.str.fullmatch("[0-9a-f]{12}").all()
    assert rows.groupby("method").method_source.nunique().eq(1).all()
    code, err = call("score", str(began.run), "--all")
    assert code == 0, err
    assert read_run(began.run).rows.method_source.notna().all()


# --- the comparison alone ---------------------------------------------------------------------------------------------


def record(**changes: object) -> dict:
    source = Source("aaaaaaaaaaaa", {"kvbench/methods/gkv.py": "1", "kvbench/eviction/select.py": "2"})
    methods = [
        {"method": name, "version": "1", "source": source.hash, "files": list(source.files), "artefacts": []}
        for name in ("gkv", "snapkv+gkv")
    ]
    return {
        "model": {"model": "org/m", "model_revision": "1" * 40},
        "model_files": [],
        "chat_template": None,
        "plugins": [],
        "methods": methods,
        "method_files": [{"name": name, "hash": digest} for name, digest in source.files.items()],
        "device": "cpu",
        "dtype": "float32",
        "tasks": {"walk": {"version": "1", "data": {}, "prompts": "p"}},
    } | changes


def edited(**changes: object) -> list[dict]:
    return [entry | changes for entry in record()["methods"]]


def test_equal_records_are_one_run() -> None:
    assert same_run.check("r1", record(), record()) == []


@pytest.mark.parametrize(
    ("now", "message"),
    [
        (
            record(model={"model": "org/m", "model_revision": "2" * 40}),
            f"model 'org/m' is at revision {'2' * 40} now; run 'r1' began with {'1' * 40}. Start a new run "
            f"(kvbench run --run-name), or continue the run with --resume and --revision {'1' * 40}.",
        ),
        (
            record(methods=edited(version="2")),
            "method 'gkv' is at version 2; run 'r1' began with 1. Start a new run (kvbench run --run-name).",
        ),
        (
            record(dtype="bfloat16", device="cuda"),
            "run 'r1' began with number type float32 on cpu; on cuda it would continue with bfloat16. Continue it on "
            "cpu, or",
        ),
        (
            record(tasks={"walk": {"version": "1", "data": {}, "prompts": "q"}}),
            "task 'walk' makes other prompts than when run 'r1' began",
        ),
    ],
)
def test_what_else_must_be_the_same(now: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        same_run.check("r1", record(), now, allow_version_change=True)
    assert str(caught.value).startswith(message)


def test_another_source_of_a_method_is_refused_unless_versions_may_change() -> None:
    files = [{"name": "kvbench/methods/gkv.py", "hash": "1"}, {"name": "kvbench/eviction/select.py", "hash": "3"}]
    now = record(methods=edited(source="bbbbbbbbbbbb"), method_files=files)
    said = "the source of methods 'gkv', 'snapkv+gkv' changed since run 'r1' began (kvbench/eviction/select.py). "
    with pytest.raises(UserError) as caught:
        same_run.check("r1", record(), now)
    assert (
        str(caught.value)
        == said + "Put it back, give --allow-version-change, or start a new run (kvbench run --run-name)."
    )
    (notice,) = same_run.check("r1", record(), now, allow_version_change=True)
    assert notice == said + "Every row states its source (column method_source)."


FILE = {"sha256": "s", "revision": None}
TABLE = FILE | {"sha256": None, "revision": "c"}


@pytest.mark.parametrize(
    ("was", "has", "same"),
    [
        (FILE | {"revision": "c"}, FILE, True),
        (FILE, FILE | {"revision": "c"}, True),
        (FILE, FILE | {"sha256": "t"}, False),
        (TABLE, FILE, False),  # equal ids say nothing about the reference answers
        (FILE, TABLE, False),
        (TABLE, TABLE | {"revision": "d"}, False),
        ({}, FILE, False),
        ({}, {}, False),
    ],
)
def test_the_same_data_from_another_place_are_the_recorded_data(was: dict, has: dict, same: bool) -> None:
    found = same_run.as_recorded(was, has | {"location": "here"})
    recorded = {part: was[part] for part in ("sha256", "revision")} if same else {}
    assert found == has | {"location": "here"} | recorded


EVIL = "x\n\x1b[2Jerror: y"
HASHES = [{"name": EVIL, "hash": EVIL}, {"name": "z", "hash": "1"}]


@pytest.mark.parametrize(
    "before",
    [
        record(model_files=HASHES[:1]),
        record(model_files=HASHES),
        record(model={"model": "org/m", "model_revision": EVIL}),
        record(chat_template={"path": EVIL, "sha256": EVIL}),
        record(plugins=[{"path": EVIL, "sha256": EVIL}]),
        record(methods=edited(version=EVIL)),
        record(methods=edited(source=EVIL), method_files=HASHES),
        record(methods=edited(artefacts=HASHES)),
        record(dtype=EVIL, device=EVIL),
        record(tasks={"walk": {"version": EVIL, "data": {}}}),
        record(tasks={"walk": {"version": "1", "data": {"sha256": EVIL}}}),
    ],
)
def test_nothing_of_a_record_is_said_raw(before: dict) -> None:
    now = record(chat_template={"path": "t", "sha256": "1"})
    if before["model_files"]:
        now["model_files"] = [{"name": "config.json", "hash": "1" * 64}]
    with pytest.raises(UserError) as caught:
        same_run.check(f"r{EVIL}", before, now)
    assert str(caught.value).isprintable()
