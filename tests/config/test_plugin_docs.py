"""docs/plugins.md: its methods, task and recipe are complete, short, and work from a file and an installed package."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import tomllib

import pytest
from support.folders import ROOT

TEXT = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")


def block(heading, language, page=TEXT):
    (code,) = re.findall(rf"```{language}\n(.*?)```", page.split(f"\n## {heading}\n")[1].split("\n## ")[0], re.DOTALL)
    return code


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_method.py").write_text(block("A method", "python"), encoding="utf-8")
    (tmp_path / "my_trained.py").write_text(block("A trained method", "python"), encoding="utf-8")
    (tmp_path / "my_task.py").write_text(block("A task", "python"), encoding="utf-8")
    return tmp_path


def test_the_method_is_complete_and_at_most_thirty_lines():
    code = block("A method", "python")
    assert len(code.splitlines()) <= 30
    assert "Paper:" in ast.get_docstring(ast.parse(code))
    assert 'paper = "' in code
    assert "option(" in code


def test_the_method_runs_from_a_file(folder, kvbench):
    options = "--budget 32 --task walk --limit 2 --interval 16 --max-new-tokens 48 --out out -q"
    done = kvbench("run", "--plugin", "my_method.py", "--method", "my-method", *options.split(), cwd=folder)
    assert done.code == 0, done.err
    (run,) = (folder / "out").iterdir()
    (plugin,) = json.loads((run / "run.json").read_text())["environment"]["plugins"]
    assert plugin["path"] == str(folder / "my_method.py")
    lines = [line for file in (run / "journal").iterdir() for line in file.read_text().splitlines()]
    assert sum('"my-method"' in line for line in lines) >= 2
    assert not list(folder.glob("**/__pycache__"))


def test_what_the_page_says_of_the_method(folder, calls):
    plugin = ["--plugin", "my_method.py"]
    run = ["run", *plugin, "--task", "walk", "--dry-run", "--quiet"]
    listed, small, base, nobody = calls(
        folder,
        [
            (["list", "methods", "my-method", "--json", *plugin], {}),
            ([*run, "--method", "snapkv+my-method", "--budget", "8"], {}),
            ([*run, "--method", "ada-kv", "--method-opt", "ada-kv.base=my-method", "--budget", "32"], {}),
            (["run", "--method", "nobodys", "--budget", "32", "--task", "walk"], {}),
        ],
    )
    about = json.loads(listed.out)
    assert about["paper"] == "after Guo et al., arXiv 2406.12335"
    assert about["min budget"] == 8 + 4 + 1
    assert about["bounded"]
    assert small.code == 2
    assert "must be at least 33; got 8" in small.err
    assert base.code == 0, base.err
    assert nobody.code == 2


def test_the_task_runs_from_a_file(folder, kvbench):
    options = "--plugin my_task.py --task my-task --method full --limit 2 --out out -q"
    done = kvbench("run", *options.split(), cwd=folder)
    assert done.code == 0, done.err


def test_the_task_of_the_page_on_tasks_is_complete(tmp_path, kvbench):
    code = block("A new task", "python", (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8"))
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    options = "--plugin mine.py --task mine --method full --max-new-tokens 4 -q"
    done = kvbench("run", *options.split(), cwd=tmp_path)
    assert done.code == 0, done.err


def test_the_trained_method_is_complete_and_under_eighty_lines():
    code = block("A trained method", "python")
    assert len(code.splitlines()) < 80
    assert {"methods.register", "recipes.register"} <= set(re.findall(r"@(\w+\.register)", code))
    assert "Paper:" in ast.get_docstring(ast.parse(code))


def test_the_trained_method_is_trained_from_a_file_and_runs(folder, kvbench):
    train = ["train", "key-probe", "--plugin", "my_trained.py", "--samples", "8", "--out", "probe", "--json", "-q"]
    done = kvbench(*train, "--preset", "long", "--steps", "25", cwd=folder)
    assert done.code == 0, done.err
    card = json.loads(done.out.splitlines()[-1])
    made, more = card["made"], card["made"]["settings"]["more"]
    assert made["held_out_after"]["loss"] < 0.7 * made["held_out_before"]["loss"]
    assert made["settings"]["schedule"] == "constant"
    assert more["preset"] == "long"
    assert more["plugin_sha256"] == hashlib.sha256((folder / "my_trained.py").read_bytes()).hexdigest()
    assert made["command"].startswith("kvbench train key-probe --plugin my_trained.py --model tiny --preset long ")
    (folder / "my_trained.py").write_text(block("A trained method", "python") + "# changed\n", encoding="utf-8")
    again = kvbench(*train, "--preset", "long", "--steps", "25", cwd=folder)
    assert (again.code, "other settings: plugin_sha256" in again.err) == (2, True)
    run = "--plugin my_trained.py --method key-probe --method-opt key-probe.file=probe --budget 48 --task lookup"
    done = kvbench("run", *run.split(), "--limit", "1", "--out", "out", "-q", cwd=folder)
    assert done.code == 0, done.err


def test_what_the_page_says_of_the_recipe(folder, calls):
    plugin = ["--plugin", "my_trained.py"]
    train = ["train", "key-probe", "--out", "x"]
    unknown, listed, all_, misnamed, preset = calls(
        folder,
        [
            (train, {}),
            (["list", "recipes", "key-probe", "--json", *plugin], {}),
            (["list", "recipes", *plugin], {}),
            ([*train, *plugin, "--opt", "warmpu=3"], {}),
            ([*train, *plugin, "--preset", "lnog"], {}),
        ],
    )
    assert not any(done.torch for done in (listed, all_, unknown, misnamed, preset))
    about = json.loads(listed.out)
    assert {"setting": "schedule", "default": "cosine", "long": "constant"} in about["settings"]
    assert {"preset": "long", "about": "twice the steps, constant rate"} in about["presets"]
    assert "key-probe" in all_.out
    assert "gkv-distill" in all_.out
    assert (unknown.code, "cannot train 'key-probe'." in unknown.err) == (2, True)
    assert "key-probe has no setting 'warmpu'. Did you mean 'warmup'?" in misnamed.err
    assert "the recipe has no preset 'lnog'. Did you mean 'long'? There are long." in preset.err


def test_methods_and_recipes_come_with_an_installed_package(folder, kvbench):
    """The entry points of the page's pyproject, as an installer writes them down."""
    project = tomllib.loads(block("In a package", "toml"))["project"]
    groups = project["entry-points"]
    assert set(groups) == {"kvbench.methods", "kvbench.recipes"}
    site = folder / "site"
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    for file in ("my_method.py", "my_trained.py"):
        shutil.copy(folder / file, site)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    written = (
        f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in entries.items()) for group, entries in groups.items()
    )
    (info / "entry_points.txt").write_text("\n".join(written))
    for kind, ours in (("methods", {"my-method", "key-probe", "gkv"}), ("recipes", {"key-probe", "duo"})):
        assert "key-probe" not in kvbench("list", kind, cwd=folder).out
        listed = kvbench("list", kind, "--json", cwd=folder, env={"PYTHONPATH": str(site)})
        assert listed.code == 0, listed.err
        assert ours <= {member["name"] for member in json.loads(listed.out)}


def test_the_invariants_of_the_page_are_those_of_the_audit():
    from kvbench.audit.invariants.checks import INVARIANTS

    table = TEXT.split("\n## Does it hold?\n")[1].split("```\n")[1]
    assert table.splitlines()[0].split() == ["method", *INVARIANTS]
