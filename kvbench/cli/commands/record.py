"""``kvbench record RUN``: records which tokens each method kept at each eviction, for the page of a report."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvbench.cli.commands.show import one_run
from kvbench.cli.continued import TO_ASK, asked, continued
from kvbench.cli.options import Run, Text, plain, takes
from kvbench.cli.replayed_run import inputs_of
from kvbench.config.layers import gather
from kvbench.config.parsers import parse
from kvbench.config.settings import PARSERS
from kvbench.console import terminal
from kvbench.errors import UserError, counted, quote
from kvbench.replay.work import Readings, check_evictions
from kvbench.sources import hub
from kvbench.taskkit.names import is_gated

if TYPE_CHECKING:
    from kvbench.config.run_config import RunConfig
    from kvbench.store.decisions import Decisions

QUESTIONS = "1"  # of each task
EPILOG = """Examples:
  kvbench record results/demo
  kvbench record demo --limit 3
  kvbench record demo --sample orbit-300-1000000000
"""


@takes("task", "plugin", "task_file", "chat_template", "model", "data", "device", "out", "quiet")
def record(
    typed: Mapping[str, Any],
    run: Run,
    limit: Annotated[str, plain("--limit", f"Number of questions per task. Default: {QUESTIONS}.", "N")] = QUESTIONS,
    sample: Annotated[
        Text, plain("--sample", "Record only the question with this id, not the first questions.", "ID")
    ] = None,
) -> None:
    """Record which tokens each method kept at each eviction, for the first questions of a run.

    The model reads the stored answers again, each under the method and budget that generated it. This takes a fraction
    of the time that generating the answers took. For each cell, the decisions on the first answer to each of these
    questions go to decisions.parquet in the run's folder; 'kvbench report --html' shows them token by token.
    """
    count = parse("--limit", PARSERS["limit"], limit)
    folder = one_run(run, Path(typed["out"]))
    gathered = gather(typed, os.environ)
    config = continued(folder.parent, folder.name, gathered, needed=TO_ASK)
    progress = Readings(quiet=typed["quiet"])
    progress.prepare("loading the model and reading the prompts")
    try:
        with hub.only(asked(config, gathered)):
            rows = _record(config, folder, sample, count, progress)
    finally:
        progress.end()
    if not rows:
        raise UserError(
            f"run {quote(folder.name)} has no eviction to record. No method dropped an entry on the questions "
            "that were read. Read other questions (--limit, --sample), or give a run with a smaller budget."
        )

    from kvbench.store import decisions

    path = decisions.write(folder, rows)
    answers = len({row.row_key for row in rows})
    recorded = f"decisions on {counted(answers, 'answer')} are in {path}"
    terminal.note(f"{recorded}; 'kvbench report {folder} --html FILE' shows them.")


def _record(
    config: RunConfig, folder: Path, sample: str | None, count: int | None, progress: Readings
) -> list[Decisions]:
    from kvbench.replay.decisions import Recorder, answers

    check_evictions(config, folder.name)
    inputs = inputs_of(config, folder)
    if sample is not None and all(sample != p.doc_id for work in inputs.works.values() for p in work.prompts):
        raise _nothing(folder, sample, "the run has no question with this id.")
    loaded = inputs.load_model(config)
    recorder = Recorder(loaded=loaded, config=config, inputs=inputs, say=terminal.warning, on_read=progress.next)
    found: list[Decisions] = []
    for name, work in inputs.works.items():
        ids = [prompt.doc_id for prompt in work.prompts]
        chosen = [sample] * (sample in ids) if sample is not None else ids[:count]
        if is_gated(name):
            terminal.note(f"task {quote(name)} is gated: its texts are not recorded.")
        elif chosen:
            rows = answers(folder, name, chosen)
            progress.task(name, len(rows), "answers")
            found += recorder.record(work, rows)
            progress.end()
    if sample is not None and not found:
        why = "no method evicted entries on this question, or its answers failed or were left out."
        raise _nothing(folder, sample, why)
    return found


def _nothing(folder: Path, sample: str, why: str) -> UserError:
    list_ids = f"kvbench show {shlex.quote(str(folder))} --ids"
    return UserError(f"nothing to record for --sample {quote(sample)}, because {why} '{list_ids}' lists the questions.")
