"""Whole runs: rows, interruption, real tasks on several architectures."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.folders import DATA
from support.runs import CONFIGS, configuration, model_folder

from kvbench import registry
from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.errors import Interrupted, SetupError, UserError
from kvbench.report.load import load
from kvbench.runner.execute import execute
from kvbench.scoring import pool
from kvbench.store import read_run, table_hash
from kvbench.task import Score

TASK_DATA = DATA / "tasks"
ROWS = 3 * 12 * 2


class Silent:
    """A progress that shows nothing."""

    def prepare(self, text: str) -> None: ...
    def begin(self, total: int, done: int) -> None: ...
    def cell(self, text: str) -> None: ...
    def end(self) -> None: ...

    def update(self, rows_done: int, *_: object) -> None: ...


class Impatient(Silent):
    """Sends this process one signal as soon as so many rows are saved; a second one would end it at once."""

    def __init__(self, number: int, rows: int) -> None:
        self.number, self.rows, self.sent = number, rows, False

    def update(self, rows_done: int, *_: object) -> None:
        if rows_done > self.rows and not self.sent:
            self.sent = True
            os.kill(os.getpid(), self.number)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    return execute(configuration(model), out=out, run_name="r")


def test_steps_run_as_a_program_if_the_run_says_so(model, tmp_path, monkeypatch):
    """The compiler is replaced by the recorded operations themselves, which takes no time to compile."""
    compiled = []
    unchanged = lambda module, examples, options: compiled.append(module) or module  # noqa: E731
    monkeypatch.setattr("kvbench.engine.program._inductor.compile", unchanged)
    setting = configuration(model, limit=3, samples=1, compile_cpu=True)
    rows = read_run(execute(setting, out=tmp_path, run_name="program").run_dir).rows
    assert set(rows.decoding) == {"torch compiled"}
    assert len(compiled) == 3  # the full cache is longer, and steps of h2o sum attention
    plain = read_run(execute(configuration(model, limit=3, samples=1), out=tmp_path, run_name="plain").run_dir).rows
    assert set(plain.decoding) == {"torch"}
    assert list(rows.status) == list(plain.status)


def hashes(folder: Path) -> str:
    return table_hash(read_run(folder).rows)


def test_rows_say_what_was_measured(undisturbed):
    rows = read_run(undisturbed.run_dir).rows
    assert len(rows) == undisturbed.done == undisturbed.planned == ROWS
    assert set(rows.status) == {"ok"}
    assert rows.score.notna().all()
    evicting = rows[rows.method != "full"]
    assert (evicting.entries_after_evict == 32).all()
    assert (evicting.entries_peak <= 48).all()
    full = rows[rows.method == "full"]
    assert (full.entries_peak == full.prompt_tokens + full.output_tokens - 1).all()  # the last token is never cached
    assert full.budget.isna().all()
    for column in (
        "roofline_share",
        "tokens_per_second",
        "machine_load",
        "kv_bytes_peak",
        "prompt_sha256",
        "model_revision",
    ):
        assert rows[column].notna().all(), column


def test_running_again_does_nothing(undisturbed):
    before = hashes(undisturbed.run_dir)
    result = execute(
        configuration(Path(read_run(undisturbed.run_dir).rows.model[0])), out=undisturbed.run_dir.parent, run_name="r"
    )
    assert (result.done, result.planned) == (ROWS, ROWS)
    assert hashes(result.run_dir) == before


def test_another_configuration_is_refused(model, undisturbed):
    with pytest.raises(UserError, match="holds a run with"):
        execute(configuration(model, seed=2), out=undisturbed.run_dir.parent, run_name="r")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_with_its_rows_saved(model, tmp_path, number, code):
    with pytest.raises(Interrupted, match=r"of 72 rows saved; continue with kvbench run --resume r") as caught:
        execute(configuration(model), out=tmp_path, run_name="r", progress=Impatient(number, 3))
    assert caught.value.exit_code == code
    assert 3 < read_run(tmp_path / "r").saved < ROWS
    result = execute(configuration(model), out=tmp_path, run_name="r", resume=True)
    assert result.done == ROWS


def test_a_dry_run_writes_nothing(model, tmp_path):
    result = execute(configuration(model), out=tmp_path, dry_run=True)
    assert (result.run_dir, result.planned, len(result.plans)) == (None, ROWS, 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("architecture", CONFIGS)
def test_real_problems_on_every_architecture(architecture, tmp_path):
    """aime24 problems longer than the budget, on a folder with random weights."""
    folder = model_folder(tmp_path / "model", architecture)
    problems = tmp_path / "aime.jsonl"
    problems.write_text((TASK_DATA / "aime24" / "aime24.jsonl").read_text())
    grid = Grid(methods=(MethodChoice(name="gkv"),), budgets=(128,), tasks=("file/aime",))
    config = RunConfig(
        grids=(grid,), model=str(folder), samples=2, max_new_tokens=80, interval=32, task_file=str(problems)
    )
    result = execute(config, out=tmp_path / "out", run_name="r")
    rows = read_run(result.run_dir).rows
    assert set(rows.status) == {"ok"}
    assert (rows.entries_after_evict <= 128).all()
    assert (rows.entries_peak <= 160).all()
    assert (rows.prompt_tokens > 128).all()


def test_odd_scores_cost_neither_their_answers_nor_other_rows(model, tmp_path, monkeypatch):
    results = iter([None, 0.5, Score(value=1.0, extracted=42), Score(value=1.0, facts={"colour": "red"})])
    right = Score(value=1.0)
    grid = Grid(methods=(MethodChoice(name="full"),), tasks=("lookup",))
    config = RunConfig(grids=(grid,), model=str(model), limit=6, max_new_tokens=4)
    with monkeypatch.context() as patch:
        patch.setattr(registry.tasks.get("lookup"), "score", lambda task, doc, output: next(results, right))
        result = execute(config, out=tmp_path, run_name="r")
    assert (result.done, dict(result.failed)) == (6, {"grader_error": 4})
    rows = read_run(result.run_dir).rows
    assert sorted(rows.score.dropna()) == [1.0, 1.0]
    assert rows.output_sha256.notna().all()
    assert (rows.status == "ok").equals(rows.score.notna())
    execute(config, out=tmp_path, run_name="r")  # scores them again
    assert set(read_run(result.run_dir).rows.status) == {"ok"}


def question_file(path: Path, answers: tuple[str, ...]) -> str:
    rows = [{"id": f"q{i}", "question": f"{i} + 1 = ?", "answer": a} for i, a in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_answers_are_kept_if_no_scoring_process_can_be_started(model, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    grid = Grid(methods=(MethodChoice(name="full"),), tasks=("file/q",))
    questions = question_file(tmp_path / "q.jsonl", ("1", "2"))
    config = RunConfig(grids=(grid,), model=str(model), max_new_tokens=8, task_file=questions)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "subprocess", SimpleNamespace(Popen=refuse, PIPE=-1, DEVNULL=-3))
        with pytest.raises(SetupError, match=r"does not start \(Resource temporarily unavailable\)"):
            execute(config, out=tmp_path, run_name="r")
    assert list(read_run(tmp_path / "r").rows.status) == ["unscored"] * 2
    answers = list(read_run(tmp_path / "r").rows.output_sha256)
    rows = read_run(execute(config, out=tmp_path, run_name="r").run_dir).rows
    assert (set(rows.status), list(rows.output_sha256)) == ({"ok"}, answers)


def test_changed_data_do_not_mix_with_saved_rows(model, tmp_path):
    grid = Grid(methods=(MethodChoice(name="full"),), tasks=("file/q",))
    config = RunConfig(
        grids=(grid,), model=str(model), max_new_tokens=8, task_file=question_file(tmp_path / "q.jsonl", ("1", "2"))
    )
    execute(config, out=tmp_path / "out", run_name="r")
    question_file(tmp_path / "q.jsonl", ("1", "3"))
    with pytest.raises(UserError, match="changed since run 'r' began"):
        execute(config, out=tmp_path / "out", run_name="r")


def test_a_prompt_beyond_the_context_is_a_row_and_sizes_nothing(model, tmp_path):
    path = tmp_path / "q.jsonl"
    rows = [
        {"id": "long", "question": "x" * 40_000, "answer": "1"},
        {"id": "short", "question": "2 + 2 = ?", "answer": "4"},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    grid = Grid(methods=(MethodChoice(name="full"),), tasks=("file/q",))
    config = RunConfig(grids=(grid,), model=str(model), max_new_tokens=8, task_file=str(path))
    said = []
    execute(config, out=tmp_path / "out", dry_run=True, notice=said.append)
    assert any("1 of 2 prompts leave no room for an answer in the model's context of" in text for text in said)
    result = execute(config, out=tmp_path / "out", run_name="r")
    assert result.plans[0].max_tokens < 200
    assert dict(result.failed) == {"prompt_too_long": 1}
    segments = sorted((tmp_path / "out" / "r" / "journal").iterdir())
    again = execute(config, out=tmp_path / "out", run_name="r", resume=True)
    assert again.repeated
    assert dict(again.failed) == {"prompt_too_long": 1}
    assert sorted((tmp_path / "out" / "r" / "journal").iterdir()) == segments  # it was not tried again
    assert not load([result.run_dir]).unfinished
    rows = read_run(result.run_dir).rows
    assert rows.set_index("doc_id").loc["long", "score"] != rows.set_index("doc_id").loc["long", "score"]  # null


@pytest.mark.parametrize(
    ("method", "options", "least"),
    [
        ("snapkv", (("heads", "query"), ("window", 8)), 18),  # 9 for each of two query heads
        ("snapkv-decode", (("window", 8),), 9),
    ],
)
def test_a_row_says_the_budget_in_force_for_a_small_share(model, tmp_path, method, options, least):
    grid = Grid(methods=(MethodChoice(name=method, options=options),), budgets=(0.001, 0.25), tasks=("lookup",))
    config = RunConfig(grids=(grid,), model=str(model), limit=2, max_new_tokens=4)
    rows = read_run(execute(config, out=tmp_path, run_name="r").run_dir).rows
    assert set(rows[rows["budget_share"] < 0.01]["budget"]) == {least}
    assert (rows["entries_after_evict"] == rows["budget"]).all()
    assert len(set(rows["budget"])) > 1
