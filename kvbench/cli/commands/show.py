"""``kvbench show RUN [--ids | --sample ID]``: a run's record, its questions, the texts of one question. No torch.

Control characters in model-written text are always escaped. Of a conversation, a run stores the first prompt and every
answer. The later questions come from the task's data, if these are on this machine.
"""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvbench.cli.options import Document, Out, Run, plain
from kvbench.console import terminal
from kvbench.console.redact import redact_argv, redact_config
from kvbench.errors import UserError, quote
from kvbench.eviction import choose
from kvbench.eviction.budget import label
from kvbench.registry import did_you_mean
from kvbench.report.load import find_runs
from kvbench.sources import hub
from kvbench.sources.data import Data
from kvbench.store import again, manifest, read_run, read_texts
from kvbench.store.strict_json import parse
from kvbench.task import IMAGE
from kvbench.taskkit.names import get_task

if TYPE_CHECKING:
    import pandas as pd

EPILOG = """Examples:
  kvbench show demo
  kvbench show demo --ids
  kvbench show results/demo --sample orbit-300-1000000000 --method gkv
"""
COPIED = ("run", "command")  # lines that a user copies, which are therefore not broken


def show_(
    run: Run,
    sample: Annotated[str | None, plain("--sample", "Show one question: its id, TASK/ID, or a row key.", "ID")] = None,
    method: Annotated[str | None, plain("--method", "With --sample: only the answers of this method.", "NAME")] = None,
    ids: Annotated[
        bool, plain("--ids", "List the questions with their ids (for --sample), samples and scores.")
    ] = False,
    out: Out = "results",
    json: Document = False,
) -> None:
    """Show a run: its settings, how complete it is, and with --sample the prompt, output and scores of a question."""
    if method is not None and sample is None:
        raise UserError(f"--method {quote(method)} picks among the answers to one question; give --sample ID with it.")
    if ids and sample is not None:
        raise UserError(f"--ids lists all questions and --sample {quote(sample)} shows one; give one of them.")
    folder = one_run(run, Path(out))
    if ids:
        document: dict[str, Any] = {"questions": _questions(folder)}
    else:
        document = _summary(folder) if sample is None else {"samples": _samples(folder, sample, method)}
    if json:
        terminal.data(document)
    elif ids:
        _print_questions(document["questions"])
    elif sample is None:
        _print_summary(document)
    else:
        _print_samples(document["samples"])


def one_run(name: str, out: Path) -> Path:
    """Return the folder of one run. name: a path, or the name of a run in the results folder `out`.

    Raises UserError if the name stands for no run, for several runs, or for a table.
    """
    runs = find_runs([name], out)
    if len(runs) > 1 or not runs[0].is_dir():
        listed = ", ".join(path.name for path in runs)
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
    """Return a line of the summary, broken at the terminal's width. Lines in `COPIED` are not broken."""
    width = terminal.console().width if key not in COPIED else sys.maxsize
    indent = " " * 10
    return textwrap.fill(
        f"{key:<9} {value}", width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _questions(folder: Path) -> list[dict[str, Any]]:
    """Return every question of a run, with the number of its rows and with their mean, lowest and highest score."""
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
    table = terminal.grid("task", "id", "category", *numbers, right=numbers)
    for one in questions:
        names = (terminal.clean(one[key] or "-") for key in ("task", "id", "category"))
        scores = ("-" if one[key] is None else f"{one[key]:.3f}" for key in numbers[1:])
        table.add_row(*names, str(one["rows"]), *scores)
    terminal.console().print(table)


def _samples(folder: Path, wanted: str, method: str | None) -> list[dict[str, Any]]:
    rows = read_run(folder).rows
    if method is not None:
        method = _method(folder, method, sorted(rows["method"].dropna().unique()))
    chosen = rows[
        (rows["doc_id"] == wanted) | (rows["row_key"] == wanted) | (rows["task"] + "/" + rows["doc_id"] == wanted)
    ]
    if method is not None:
        chosen = chosen[chosen["method"] == method]
    if chosen.empty:
        known = list(rows["doc_id"].dropna().unique())
        hint = did_you_mean(wanted, known) or f" 'kvbench show {folder.name} --ids' lists its {len(known)} questions."
        raise UserError(
            f"run {quote(folder.name)} has no sample {quote(wanted)}{f' of {quote(method)}' if method else ''}.{hint}"
        )
    texts = read_texts(folder).set_index("row_key")
    entries = [_plain(row) | _texts(texts, row["row_key"]) for _, row in chosen.iterrows()]
    asked: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        if (answers := entry.pop("turns")) is None:
            continue
        question = (entry["task"], entry["doc_id"])
        if question not in asked:
            asked[question] = _later_questions(manifest.read(folder), entry)
        later: list[str | None] = [*asked[question]]
        if len(later) != len(answers) - 1:  # not the recorded conversation
            later = [None] * (len(answers) - 1)
        entry["turns"] = [{"question": q, "output": a} for q, a in zip((entry["prompt"], *later), answers, strict=True)]
    return entries


def _later_questions(info: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    """Return the questions of a conversation after its first turn, read from the task's data.

    The list is empty if the task or its data are not on this machine, or if the data do not have the recorded hash.
    """
    environment = info["environment"]
    path = environment.get("data")
    variable = {"KVBENCH_DATA": os.environ.get("KVBENCH_DATA") or environment.get("data_variable") or ""}
    recorded = environment.get("tasks", {}).get(entry["task"], {}).get("data", {})
    try:
        task = get_task(entry["task"])
        source = Data(path, revision=environment.get("data_revision"), allow_mismatch=True, env=variable)
        with hub.only(()):
            docs = {doc.doc_id: doc for doc in task.docs(source, style=entry.get("prompt_style", "default"))}
        if (used := source.used.get(task.name)) and used.sha256 != recorded.get("sha256"):
            return []
    except Exception:  # from the task's own code, which may need the model's tokenizer
        return []
    doc, prompt = docs.get(entry["doc_id"]), entry["prompt"] or ""
    if doc is None:
        return []
    parts = doc.turns[0].question.split(IMAGE) if doc.turns[0].images else [doc.turns[0].question]
    if not all(part in prompt for part in parts):  # other data, or a prompt that may not be stored
        return []
    return [turn.user.replace(IMAGE, "[image]") if turn.images else turn.user for turn in doc.turns[1:]]


def _method(folder: Path, name: str, there: list[str]) -> str:
    """Return the name that a method has in the run's rows. name: the name that the user typed. there: the names in the
    rows. The method need not be installed here."""
    plain = name.strip().lower()
    if plain in there:
        return plain
    if hint := did_you_mean(name, there):
        raise UserError(f"run {quote(folder.name)} has no method {quote(name)}.{hint}")
    canonical = choose.canonical(name)
    if canonical not in there:
        raise UserError(f"run {quote(folder.name)} has no method {quote(name)}. It has {', '.join(there)}.")
    return canonical


def _plain(row: pd.Series) -> dict[str, Any]:
    """Return a row as a dictionary of JSON types, without columns that are empty."""
    kept = row.dropna()
    return {
        k: v.isoformat() if hasattr(v, "isoformat") else getattr(v, "item", lambda v=v: v)() for k, v in kept.items()
    }


def _texts(texts: pd.DataFrame, key: str) -> dict[str, Any]:
    names = ("prompt", "output", "turns")
    if key not in texts.index:
        return dict.fromkeys(names)
    row: dict[str, Any] = {n: value if isinstance(value := texts.at[key, n], str) else None for n in names}
    return row | {"turns": row["turns"] and _turns(row["turns"])}


def _turns(text: str) -> list[str] | None:
    """Parse a stored conversation into the answers of its turns; None if the text is not a list of texts."""
    try:
        turns = parse(text)
    except ValueError:
        return None
    return turns if turns and isinstance(turns, list) and all(isinstance(turn, str) for turn in turns) else None


def _print_samples(entries: list[dict[str, Any]]) -> None:
    """Print the samples of a question. If successive samples have the same prompt, it is printed only with the first of
    them."""
    former: tuple[Any, Any] | None = None
    for entry in entries:
        prompt = entry["doc_id"], entry["prompt"]
        _print_sample(entry, known=prompt == former)
        former = prompt


def _print_sample(entry: dict[str, Any], *, known: bool) -> None:
    """Print one sample. known: leave out the prompt, because it was printed with the previous sample."""
    budget = f" at {entry['budget']}" if "budget" in entry else ""
    budget += f" ({label(entry['budget_share'])})" if "budget_share" in entry else ""
    title = f"{entry['task']} {entry['doc_id']} sample {entry.get('sample', 0)}: {entry['method']}{budget}"
    scores = [f"{k} {entry[k]:.3g}" for k in ("score", "score_strict", "score_partial") if k in entry]
    facts = [entry["status"], *scores, f"{entry.get('output_tokens', 0)} tokens", str(entry.get("stop_reason", ""))]
    print(f"== {terminal.clean(title)}\n{terminal.clean(', '.join(facts))}")
    if not known:
        _print_text("prompt", entry["prompt"])
        _print_images(entry.get("image_list"))
    if "turns" not in entry:
        _print_text("output", entry["output"])
    for number, turn in enumerate(entry.get("turns", ()), 1):
        if number > 1:
            _print_text(f"question {number}", turn["question"] or "(in the task's data, which are not here)")
        _print_text(f"output {number}", turn["output"])
    if entry.get("extracted"):
        print(f"-- extracted: {terminal.clean(entry['extracted'])}")


def _print_images(stored: str | None) -> None:
    """Print name, size, tokens and turn of each image of a question, in the order of their places in its prompts."""
    try:
        images = parse(stored) if isinstance(stored, str) else []
    except ValueError:
        images = []
    for number, image in enumerate(images if isinstance(images, list) else [], 1):
        name, width, height, tokens, turn = (
            terminal.clean(str(image.get(key, "?")) if isinstance(image, dict) else "?")
            for key in ("name", "width", "height", "tokens", "turn")
        )
        print(f"-- image {number}: {name}, {width}x{height} pixels, {tokens} tokens, turn {turn}")


def _print_text(title: str, content: str | None) -> None:
    print(f"-- {title}")
    for line in (content or "").split("\n"):
        print(terminal.clean(line))
