"""A method is known by its source: own file, shared terms, both parts; a run does not go on with another in silence."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.folders import ROOT

from kvbench.config.plugins import load_plugin
from kvbench.eviction.choose import make
from kvbench.registry import methods, tasks
from kvbench.runner.method_source import source_of
from kvbench.store import read_rows

RUN = "--method knorm,gkv,snapkv+gkv --budget 48 --task walk/orbit-100 --limit 1 --samples 1 --interval 8"
OWN = """
from dataclasses import dataclass
from kvbench.eviction.api import Method
from kvbench.registry import methods
from {package}.terms import nothing
from .terms import weight

@methods.register("{name}")
@dataclass(frozen=True)
class Own(Method):
    def score(self, view):
        return view.positions.float() * weight()
"""


def files(name: str, **options: object) -> set[str]:
    return set(source_of(make(name, options)).files)


def test_a_method_s_files_are_its_own_and_the_terms_it_imports() -> None:
    gkv = files("gkv")
    assert {
        "kvbench/methods/gkv.py",
        "kvbench/eviction/terms/redundancy.py",
        "kvbench/eviction/terms/window_vote.py",
    } < gkv
    assert {"kvbench/eviction/terms/window_attention.py", "kvbench/eviction/view.py"} < gkv  # through others
    assert "kvbench/eviction/select.py" in gkv  # every method's scores go through it
    assert not gkv & {"kvbench/methods/h2o.py", "kvbench/eviction/terms/gates.py", "kvbench/lazy.py"}


def test_of_two_methods_both_count() -> None:
    both = files("snapkv+gkv")
    assert files("snapkv") | files("gkv") < both
    assert "kvbench/eviction/combined.py" in both
    assert "kvbench/methods/rkv.py" in files("ada-kv", base="rkv")
    assert "kvbench/methods/rkv.py" not in files("ada-kv")
    assert "kvbench/methods/rkv.py" in files("snapkv+ada-kv", **{"ada-kv.base": "rkv"})


def test_every_method_has_a_source_of_its_own() -> None:
    made = {name: source_of(make(name, {"draft": "tiny"} if name == "speckv" else {})) for name in methods.names()}
    assert len({source.hash for source in made.values()}) == len(made)


def test_a_plug_in_counts_wherever_it_lies(tmp_path: Path) -> None:
    saved = methods.save(), tasks.save()
    hashes: list[str] = []
    try:
        for file, note in (("mine.py", ""), ("moved.py", ""), ("moved.py", "# changed")):
            methods.restore(saved[0])
            folder = tmp_path / f"v{len(hashes)}"
            folder.mkdir()
            path = folder / file
            text = "\n".join(line for line in OWN.splitlines() if "terms" not in line).replace("weight()", "1")
            path.write_text(text.replace("{name}", "mine") + note)
            load_plugin(str(path))
            found = source_of(make("mine", {}))
            (own,) = (file for file in found.files if file.startswith("plug-in "))
            assert "kvbench/eviction/api.py" in found.files
            assert len(found.files[own]) == 64
            hashes.append(found.hash)
    finally:
        methods.restore(saved[0])
        tasks.restore(saved[1])
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_package_counts_with_what_it_imports_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an entry point brings it."""
    package = tmp_path / "own_methods"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "terms.py").write_text("from own_methods import deeper\nnothing = None\ndef weight(): return 1\n")
    (package / "deeper.py").write_text("import os\n")
    (package / "unused.py").write_text("1 / 0\n")
    (package / "method.py").write_text(OWN.format(package="own_methods", name="own-packaged"))
    monkeypatch.syspath_prepend(str(tmp_path))
    saved = methods.save()
    try:
        importlib.import_module("own_methods.method")
        found = files("own-packaged")
    finally:
        methods.restore(saved)
        for name in [name for name in sys.modules if name.startswith("own_methods")]:
            del sys.modules[name]
    own = {f"own_methods/{name}.py" for name in ("method", "terms", "deeper")}
    assert own < found
    assert "own_methods/unused.py" not in found


def test_nothing_is_imported_for_it(tmp_path: Path) -> None:
    """A list of methods has read no torch; neither has a hash of their sources."""
    code = (
        "import sys\nfrom kvbench.eviction.choose import make\nfrom kvbench.runner.method_source import source_of\n"
        "assert source_of(make('rkv', {})).hash\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "False\n", done.stderr


def lose_the_last_row(run: Path) -> None:
    """As a process killed before its last row was written leaves it."""
    for name in ("rows.parquet", "texts.parquet", "seal.json"):
        (run / name).unlink()
    (journal,) = (run / "journal").iterdir()
    lines = journal.read_bytes().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if b'"kind":"row"' in line)
    journal.write_bytes(b"".join(lines[:last]))


def test_a_run_does_not_go_on_with_another_source(calls: Callable, tmp_path: Path) -> None:
    """Two processes, and between them a shared term of two of three methods is edited in a copy of kvbench."""
    leave = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kvbench", tmp_path / "kvbench", ignore=leave)
    for name in ("methods", "tasks"):
        shutil.copytree(ROOT / name, tmp_path / "kvbench" / name, ignore=leave)
    (first,) = calls(tmp_path, [(f"run {RUN} --max-new-tokens 8 --run-name r1 -q".split(), {})])
    assert first.code == 0, first.err
    run = tmp_path / "results" / "r1"
    record = json.loads((run / "run.json").read_text())["environment"]
    before = read_rows(run).set_index("method")
    lose_the_last_row(run)
    kept = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with (tmp_path / "kvbench" / "eviction" / "terms" / "redundancy.py").open("a") as file:
        file.write("# another way to add the same numbers\n")
    resume = "run --resume r1 -q"
    (refused,) = calls(tmp_path, [(resume.split(), {})])
    assert refused.code == 2, refused.err
    said = (
        "the source of methods 'gkv', 'snapkv+gkv' changed since run 'r1' began (kvbench/eviction/terms/redundancy.py)."
    )
    assert (
        f"error: {said} Put it back, give --allow-version-change, or start a new run (kvbench run --run-name).\n"
        == refused.err
    )
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == kept
    assert [entry["version"] for entry in record["methods"]] == ["1", "1", "1+1"]
    (allowed,) = calls(tmp_path, [(f"{resume} --allow-version-change".split(), {})])
    assert allowed.code == 0, allowed.err
    assert f"warning: {said} Every row states its source (column method_source).\n" in allowed.err
    before, after = before.method_source, read_rows(run).set_index("method").method_source
    assert (after["knorm"], after["gkv"]) == (before["knorm"], before["gkv"])
    assert after["snapkv+gkv"] != before["snapkv+gkv"]
