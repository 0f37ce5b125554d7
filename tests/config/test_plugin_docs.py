"""docs/plugins.md: its method and its task are complete, short, and work from a file and from an installed package."""

from __future__ import annotations

import ast
import json
import re
import shutil
import tomllib

import pytest
from support.folders import ROOT

TEXT = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")


def block(heading, language):
    (code,) = re.findall(rf"```{language}\n(.*?)```", TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0], re.DOTALL)
    return code


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_method.py").write_text(block("A method", "python"), encoding="utf-8")
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


def test_the_method_comes_with_an_installed_package(folder, kvbench):
    """The entry points of the page's pyproject, as an installer writes them down."""
    project = tomllib.loads(block("In a package", "toml"))["project"]
    ((group, entries),) = project["entry-points"].items()
    site = folder / "site"
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    shutil.copy(folder / "my_method.py", site)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    written = "\n".join(f"{name} = {value}" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[{group}]\n{written}\n")
    assert "my-method" not in kvbench("list", "methods", cwd=folder).out
    listed = kvbench("list", "methods", "--json", cwd=folder, env={"PYTHONPATH": str(site)})
    assert listed.code == 0, listed.err
    assert {"my-method", "gkv"} <= {method["name"] for method in json.loads(listed.out)}


def test_the_invariants_of_the_page_are_those_of_the_audit():
    from kvbench.audit.invariants.checks import INVARIANTS

    table = TEXT.split("\n## Does it hold?\n")[1].split("```\n")[1]
    assert table.splitlines()[0].split() == ["method", *INVARIANTS]
