"""What a run keeps of its prompts lies in a file without a name; memory holds a few numbers per prompt."""

from __future__ import annotations

import errno
import gc
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvbench import tiny
from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.errors import SetupError, UserError
from kvbench.runner.spool import Spool
from kvbench.runner.workload import TaskWork
from kvbench.sources.data import Data

QUESTIONS = 8
TOKENS = 2000  # of the longer questions, at least


def load(folder: Path, words: int) -> TaskWork:
    """Load questions of so many words."""
    file = folder / f"q{words}.jsonl"
    lines = [{"question": f"{number} " + "fox " * words, "answer": "1"} for number in range(QUESTIONS)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    grid = Grid(methods=(MethodChoice(name="full"),), budgets=(), tasks=("file",))
    config = RunConfig(grids=(grid,), task_file=str(file), prompt_style="plain")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.path())
    none: Any = None
    return TaskWork.load("file", config, Data(env={}), tokenizer, "qwen3", 32768, spool=Spool(), vision=none)


def held(folder: Path, words: int) -> tuple[int, TaskWork]:
    """Return the bytes that Python objects hold for a task once it is loaded."""
    gc.collect()
    tracemalloc.start()
    try:
        work = load(folder, words)
        gc.collect()
        return tracemalloc.get_traced_memory()[0], work
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_tokens_of_prompts(tmp_path: Path) -> None:
    load(tmp_path, 1)  # imports
    short, _ = held(tmp_path, 4)
    long, work = held(tmp_path, TOKENS)
    assert min(len(prompt.ids) for prompt in work.prompts) > TOKENS
    assert long - short < QUESTIONS * TOKENS  # bytes; the texts alone have 4 bytes per token
    prompt = work.prompts[3]
    assert work.task.reader is not None
    assert list(prompt.ids) == work.task.reader.ids(prompt.text)
    assert prompt.doc.turns[0].user in prompt.text
    assert prompt.text.startswith("3 " + "fox " * TOKENS)


def test_ids_are_a_sequence(tmp_path: Path) -> None:
    spool = Spool()
    spool.put("before", "a text")
    ids = spool.ids([5, 2**31 - 1, 0, 7])
    assert (len(ids), list(ids), ids[-1], ids[1:3], 7 in ids) == (4, [5, 2**31 - 1, 0, 7], 7, (2**31 - 1, 0), True)
    assert not spool.ids([])
    assert (ids, repr(ids), hash(ids)) == (
        tuple(ids),
        repr(tuple(ids)),
        hash(tuple(ids)),
    )  # texts that are hashed hold them


def test_the_file_has_no_name_and_goes_with_its_last_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ids = Spool().ids([1, 2])
    fd = ids.spool._fd
    assert (list(tmp_path.iterdir()), os.fstat(fd).st_nlink, list(ids)) == ([], 0, [1, 2])
    del ids
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_full_disk_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spool = Spool()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SetupError) as caught:
        spool.ids([1])
    assert str(caught.value) == (
        f"cannot store the run's prompts in '{tmp_path}' (no space left on device). Free space, or set the variable "
        "TMPDIR to another folder."
    )
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(SetupError, match="no such file or directory"):
        Spool()


def test_a_document_that_pickle_refuses_is_an_error() -> None:
    with pytest.raises(UserError, match=r"^question 'q1' cannot be stored with pickle \(.*\)\. Build it from texts"):
        Spool().put({"reference": lambda: 1}, "question 'q1'")
