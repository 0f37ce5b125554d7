"""Methods, tasks and recipes from a file: found, refused with a cause, and put back when the file fails."""

from __future__ import annotations

import importlib.util
import py_compile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench import registry
from kvbench.cli.request import build
from kvbench.config import plugins
from kvbench.config.layers import gather
from kvbench.console.problems import Problems
from kvbench.errors import UserError
from kvbench.scoring.pool import ScorePool
from kvbench.sources.data import Data
from kvbench.task import Output
from kvbench.train.catalogue import entry_of, recipe_class

METHOD = """
from dataclasses import dataclass
from kvbench.eviction.api import Method, option
from kvbench.registry import methods, tasks
from kvbench.taskkit.synthetic_task import SyntheticTask

@methods.register("newest", aliases=["latest"])
@dataclass(frozen=True)
class Newest(Method):
    shift: int = option(3, "does nothing", low=0)

    def score(self, view):
        return view.positions.float()

@tasks.register("mine")
class Mine(SyntheticTask):
    variants = ("lookup-8",)
"""
RECIPE = """
from kvbench.registry import recipes
from kvbench.train.recipe import Entry, Recipe

@recipes.register("gkv")
class Mine(Recipe):
    entry = Entry(about="mine", traces=2, steps=3, lr=0.5)
"""


@pytest.fixture(autouse=True)
def _afterwards_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugins, "_LOADED", {})
    every = registry.methods, registry.tasks, registry.recipes
    saved = [known.save() for known in every]
    yield
    for known, state in zip(every, saved):
        known.restore(state)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my plugin.py"
    path.write_text(METHOD)
    return path


def test_what_a_file_registers_is_there_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugins.load_plugin(str(file)) == ["newest", "mine"]
    monkeypatch.chdir(file.parent)
    assert plugins.load_plugin("./my plugin.py") == ["newest", "mine"]
    assert registry.methods.canonical("Latest") == "newest"
    (record,) = plugins.loaded([str(file)])
    assert record["path"] == str(file)
    assert len(record["sha256"]) == 64
    assert not list(file.parent.glob("__pycache__"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = (\n", ", line 1: not Python ('(' was never closed)."),
        ("import json\n1 / 0\n", ", line 2: ZeroDivisionError (division by zero) while the file was imported."),
        (
            "import no_such_module\n",
            ", line 1: ModuleNotFoundError (No module named 'no_such_module') while the file was imported.",
        ),
        ("raise SystemExit(3)\n", ", line 1: SystemExit (3) while the file was imported."),
        (
            "x = 1\n",
            " registers nothing; use @methods.register, @tasks.register or @recipes.register of kvbench.registry.",
        ),
        (METHOD.replace('"newest"', '"Newest"'), ": method 'Newest': a name may have only lower-case letters, digits"),
        (METHOD.replace('"mine"', '"walk"'), ": task 'walk' is defined twice: in kvbench.tasks.walk and in"),
        (METHOD.replace('"latest"', '"gkv"'), "Register it under another name."),
        (
            RECIPE.replace('"gkv"', '"duo"'),
            ": recipe 'duo' is defined twice: in kvbench.train.recipes.duo:DuoRecipe and in kvbench_plugin_bad_",
        ),
        (
            RECIPE.replace("lr=0.5)", "lr=0.5, presets={'x': Preset(about='', values={'y': 1})})").replace(
                "import Entry", "import Preset, Entry"
            ),
            ": preset 'x' of a recipe sets 'y', which the recipe lacks.",
        ),
    ],
)
def test_a_file_that_fails_leaves_nothing_behind(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)
    methods, tasks = registry.methods.names(), registry.tasks.names()
    with pytest.raises(UserError) as caught:
        plugins.load_plugin(str(path))
    assert str(caught.value).startswith(f"--plugin '{path}'")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (registry.methods.names(), registry.tasks.names()) == (methods, tasks)
    path.write_text(METHOD)
    assert plugins.load_plugin(str(path)) == ["newest", "mine"]


def test_a_recipe_may_have_the_name_of_a_method(tmp_path: Path) -> None:
    (path := tmp_path / "recipe.py").write_text(RECIPE)
    assert plugins.load_plugin(str(path)) == ["gkv"]
    assert plugins.hash_of("gkv", "recipe") == plugins.loaded([str(path)])[0]["sha256"]
    assert plugins.hash_of("gkv", "method", "task") is None
    assert entry_of("gkv").defaults()["lr"] == 0.5
    assert recipe_class("gkv") is registry.recipes.get("gkv")


def test_a_recipe_declares_its_settings(tmp_path: Path) -> None:
    (path := tmp_path / "recipe.py").write_text(RECIPE.replace("entry =", "other ="))
    plugins.load_plugin(str(path))
    with pytest.raises(UserError, match="recipe 'gkv' declares no settings; give its class an attribute 'entry"):
        entry_of("gkv")


def test_no_compiled_copy_runs_in_the_place_of_the_file(file: Path) -> None:
    """What was hashed is what runs: a compiled file that says it needs no check is not looked at."""
    other = file.with_name("other.py")
    other.write_text("from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n" + METHOD)
    cached = importlib.util.cache_from_source(str(file))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(other), cfile=cached, dfile=str(file), invalidation_mode=mode)
    assert plugins.load_plugin(str(file)) == ["newest", "mine"]
    assert not list(file.parent.glob("*.ran"))


def test_answers_are_scored_by_the_bytes_that_were_loaded(file: Path) -> None:
    """Also if the file changes before the scoring process starts."""
    plugins.load_plugin(str(file))
    file.write_text("raise SystemExit('changed')")
    task = registry.tasks.get("mine")()
    task.cheap_score = False
    [doc] = task.docs(Data(env={}), limit=1)
    output = Output(text="x", stop_reason="stop", prompt_tokens=1, output_tokens=1)
    with ScorePool() as pool:
        assert pool.submit(task, doc, output).result().value == 0.0


def test_other_files_are_refused_before_they_are_imported(file: Path) -> None:
    marker = file.with_name("ran")
    file.write_text(f"open({str(marker)!r}, 'w')\n" + METHOD)
    recorded = [{"path": "mine.py", "sha256": "0" * 64}]
    with pytest.raises(UserError, match=r"is none of the plug-ins that run 'r1' began with \(mine.py 000000000000\)"):
        plugins.check_same(plugins.hashed([str(file)]), recorded, "r1", more=False)
    with pytest.raises(UserError, match=r"began with plug-in 'mine.py' \(000000000000\): give it with --plugin"):
        plugins.check_same(plugins.hashed([str(file)]), recorded, "r1", more=True)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [("no.py", "does not exist"), (".", "is a folder"), ("notes.txt", "is no Python file")],
)
def test_what_is_no_plugin(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match=message):
        plugins.load_plugin(str(tmp_path / name))


def test_names_of_a_plugin_are_known_to_a_run(file: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'plugin = "{file}"\nmethod = "newest+newest,gkv+latest"\nbudget = 48\ntask = "mine"\n')
    problems = Problems()
    made = build(gather({"method_opt": ["newest.shift=5"]}, {}, None, config), problems)
    problems.stop()
    assert made is not None
    assert [c.label for c in made.cells()] == ["mine newest(shift=5) @48", "mine gkv+newest(newest.shift=5) @48"]
    assert made.plugin == (str(file),)


def test_without_its_plugin_a_run_has_one_problem() -> None:
    problems = Problems()
    flags = {"plugin": ["no.py"], "method": ["mymethod"], "budget": ["48"], "task": ["mytask"]}
    assert build(gather(flags, {}), problems) is None
    assert [str(error) for error in problems.errors] == [
        "--plugin 'no.py' does not exist; give the path of a Python file."
    ]
