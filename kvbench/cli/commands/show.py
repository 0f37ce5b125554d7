"""``kvbench show RUN [--ids | --sample ID]``: prints a run's settings and progress, its questions, or the texts of one
question. No torch."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

from kvbench.cli import samples
from kvbench.cli.options import Document, Out, Plugins, Run, Text, plain, same_as_run
from kvbench.cli.run_questions import RunQuestions
from kvbench.config.plugins import check_same, hashed, load_plugins
from kvbench.console import terminal
from kvbench.console.redact import redact_argv, redact_config
from kvbench.errors import UserError, few, quote
from kvbench.report.load import find_runs
from kvbench.store import again, manifest, read_run, resume_command

EPILOG = """Examples:
  kvbench show demo
  kvbench show demo --ids
  kvbench show results/demo --sample orbit-300-1000000000 --method gkv
  kvbench show results/demo --sample orbit-300-1000000000 --html question.html
"""
COPIED = ("run", "command", "continue")  # lines that users copy; they are not broken at the terminal's width


def show_(
    run: Run,
    sample: Annotated[Text, plain("--sample", "Show one question: its id, TASK/ID, or a row key.", "ID")] = None,
    method: Annotated[Text, plain("--method", "With --sample: only the answers of this method.", "NAME")] = None,
    ids: Annotated[
        bool, plain("--ids", "List the questions: id (for --sample), number of rows, mean, lowest and highest score.")
    ] = False,
    html: Annotated[
        Text, plain("--html", "With --sample: also write one page with prompt, images and answers.", "FILE")
    ] = None,
    data: Annotated[Text, same_as_run("data")] = None,
    plugin: Plugins = None,
    out: Out = "results",
    json: Document = False,
) -> None:
    """Show a run: its settings, how complete it is, and with --sample the prompt, output and scores of a question."""
    if html is not None and sample is None:
        raise UserError(
            f"--html {quote(html)} writes a page of one question. Give --sample ID too. "
            "'kvbench report RUN --html FILE' writes a page of the run."
        )
    if method is not None and sample is None:
        raise UserError(f"--method {quote(method)} picks among the answers to one question; give --sample ID with it.")
    if ids and sample is not None:
        raise UserError(f"--ids lists all questions and --sample {quote(sample)} shows one; give one of them.")
    if plugin and sample is None:
        raise UserError(
            f"--plugin {quote(plugin[0])} brings the questions of a task; give --sample ID with it, or leave it out."
        )
    folder = one_run(run, Path(out))
    if sample is not None:
        _show_samples(folder, sample, method, html, data, plugin or [], json=json)
        return
    document: dict[str, Any] = {"questions": _questions(folder)} if ids else _summary(folder)
    if json:
        terminal.data(document)
    elif ids:
        _print_questions(document["questions"])
    else:
        _print_summary(document)


def _show_samples(
    folder: Path,
    wanted: str,
    method: str | None,
    html: str | None,
    data: str | None,
    plugin: list[str],
    *,
    json: bool,
) -> None:
    """Print the samples of a question. If `html` names a file, also write the samples to this file as an HTML page.
    wanted: the question's id, TASK/ID, or a row key. method: use only the answers of this method. plugin: the
    plug-in files, which must be those of the run; [] if none is needed."""
    record = manifest.read(folder)
    if plugin:
        check_same(hashed(plugin), record["environment"].get("plugins") or (), folder.name)
        load_plugins(plugin)
    questions = RunQuestions(record, data)
    found = samples.samples(folder, wanted, method, questions)
    if json:
        terminal.data({"samples": found})
    else:
        samples.show(found, questions)
    if html is not None:
        from kvbench.cli.sample_page import write

        terminal.note(f"wrote {write(found, questions, Path(html), run=folder.name)}")


def one_run(name: str, out: Path) -> Path:
    """Return the folder of one run. name: a path, or the name of a run in the results folder `out`.

    Raises UserError if the name stands for no run, for several runs, or for a file (a table of rows).
    """
    runs = find_runs([name], out)
    if not os.path.isdir(runs[0]) and len(runs) == 1:
        raise UserError(f"{quote(name)} is a file. Name one run's folder.")
    if len(runs) > 1:
        listed = few([path.name for path in runs], 5)
        raise UserError(f"{quote(name)} is not the folder of one run; it holds {listed}. Name one run's folder.")
    return runs[0]


def _summary(folder: Path) -> dict[str, Any]:
    info, snapshot = manifest.read(folder), read_run(folder)
    rows = snapshot.rows
    status = {str(k): int(v) for k, v in rows["status"].value_counts().items()}
    return {
        "run": str(folder),
        "created": info["created"],
        "command": ["kvbench", *redact_argv(info.get("command", [])[1:])],
        "rows": snapshot.progress,
        "continue": resume_command(folder) if snapshot.unfinished else None,
        "status": status,
        "config": redact_config(info["config"]),
        "environment": redact_config(info["environment"]),
        "notices": list(snapshot.notices),
    }


def _print_summary(document: dict[str, Any]) -> None:
    environment, config = document["environment"], document["config"]
    lines = {
        "run": document["run"],
        "created": document["created"],
        "command": again.line(document["command"]),
        "rows": f"{document['rows']} ({', '.join(f'{n} {s}' for s, n in document['status'].items()) or 'none yet'})",
        "continue": document["continue"],
        "shard": environment.get("shard"),
        "versions": ", ".join(f"{k} {v}" for k, v in environment.get("versions", {}).items()),
        "kvbench": f"commit {git}" if (git := environment.get("git")) else None,
        "device": environment.get("device"),
        "plug-ins": ", ".join(Path(plugin["path"]).name for plugin in environment.get("plugins") or ()),
        "judge": " ".join(filter(None, (environment.get("judge"), environment.get("judge_model")))),
        "settings": ", ".join(f"{k}={v}" for k, v in config.items() if k != "grids" and v not in (None, [])),
    }
    for number, grid in enumerate(config.get("grids", []), 1):
        lines[f"grid {number}"] = manifest.value([grid])
    for text in document["notices"]:
        terminal.warning(text)
    for key, value in lines.items():
        if value:
            print(_wrapped(key, terminal.clean(str(value))))


def _wrapped(key: str, value: str) -> str:
    """Return a line of the summary, broken at the terminal's width. Lines whose key is in `COPIED` are not broken,
    because users copy them."""
    width = terminal.console().width if key not in COPIED else sys.maxsize
    indent = " " * 10
    return textwrap.fill(
        f"{key:<9} {value}", width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _questions(folder: Path) -> list[dict[str, Any]]:
    """Return every question of a run, each with its number of rows and the mean, lowest and highest score of these
    rows."""
    rows = read_run(folder, ("task", "doc_id", "category", "status", "score")).rows
    found = []
    for (task, doc), part in rows.groupby(["task", "doc_id"], sort=False, observed=True):
        scores = part["score"].dropna()
        figures = (scores.mean(), scores.min(), scores.max()) if len(scores) else (None, None, None)
        category = part["category"].dropna()
        found.append(
            {
                "task": task,
                "id": doc,
                "category": None if category.empty else category.iloc[0],
                "rows": len(part),
                **{name: None if x is None else float(x) for name, x in zip(("mean", "lowest", "highest"), figures)},
            }
        )
    return found


def _print_questions(questions: list[dict[str, Any]]) -> None:
    numbers = ("rows", "mean", "lowest", "highest")
    rows: list[tuple[str, ...]] = []
    for one in questions:
        names = (terminal.clean(one[key] or "-") for key in ("task", "id", "category"))
        scores = ("-" if one[key] is None else f"{one[key]:.3f}" for key in numbers[1:])
        rows.append((*names, str(one["rows"]), *scores))
    terminal.table(("task", "id", "category", *numbers), rows, right=numbers)
