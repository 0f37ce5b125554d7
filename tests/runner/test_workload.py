"""What a run is going to do, row by row: budgets that shares mean, keys, and where the context ends."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.chat_templates import OPEN, OTHER, PLAIN, SEED, SWITCH, SWITCHED_CHANNELS
from support.folders import DATA
from tokenizers import AddedToken

from kvbench import registry, tiny
from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.errors import UserError
from kvbench.eviction.options import budget_in_force
from kvbench.runner.spool import Spool
from kvbench.runner.workload import TaskWork, make_method, version
from kvbench.sources.data import Data
from kvbench.store import row_key

GROUP = 4
MODEL = {"model": "tiny", "model_revision": "r"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny.path())


def config(method: str = "gkv", *budgets: float, task: str = "lookup", **settings: Any) -> RunConfig:
    grid = Grid(methods=(MethodChoice(name=method),), budgets=budgets, tasks=(task,))
    return RunConfig(grids=(grid,), limit=3, **settings)


def no_images() -> Any:
    raise AssertionError("these tasks have text only")


def planned(tokenizer: Any, made: RunConfig) -> tuple[TaskWork, list[dict[str, Any]], list[str]]:
    (name,) = made.tasks
    work = TaskWork.load(name, made, Data(env={}), tokenizer, "qwen3", 32768, spool=Spool(), vision=no_images)
    rows = [row for cell in made.cells() for row in work.rows(cell, made, MODEL, "float32", GROUP)]
    return work, [dict(row.identity) for row in rows], [row.key for row in rows]


def test_a_share_means_entries_of_each_prompt_and_never_too_few(tokenizer: Any) -> None:
    work, rows, _ = planned(tokenizer, config("gkv", 0.25))
    assert [row["budget"] for row in rows] == [round(len(p.ids) * 0.25) for p in work.prompts]
    assert {row["budget_share"] for row in rows} == {0.25}
    (cell,) = config("gkv", 0.01).cells()
    assert budget_in_force(make_method(cell), 0.01, 168, GROUP) == make_method(cell).min_budget() == 17
    assert budget_in_force(make_method(cell), 5, 168, GROUP) == 5  # refused before, never raised in silence


def test_a_share_and_the_number_it_means_are_different_rows(tokenizer: Any) -> None:
    _, rows, share = planned(tokenizer, config("gkv", 0.25))
    _, _, number = planned(tokenizer, config("gkv", rows[0]["budget"]))
    assert not set(share) & set(number)


def test_a_key_is_the_hash_of_what_names_the_row(tokenizer: Any) -> None:
    _, (row, *_), (key, *_) = planned(tokenizer, config("gkv", 48))
    assert key == row_key(row)


def test_compression_and_chunks_are_part_of_what_a_row_is(tokenizer: Any) -> None:
    variants = (
        {},
        {"compress": "query-agnostic"},
        {"prefill": "chunked"},
        {"prefill": "chunked", "prefill_chunk": 64},
    )
    keys = [planned(tokenizer, config("gkv", 48, **v))[2][0] for v in variants]
    assert len(set(keys)) == 4
    # Nothing is compressed in the full cache: its rows serve all of them.
    assert len({planned(tokenizer, config("full", **v))[2][0] for v in variants}) == 1
    assert planned(tokenizer, config("gkv", 48, prefill_chunk=64))[2][0] == keys[0]


@pytest.mark.parametrize("task", ["lookup", "chain", "walk"])
def test_a_query_agnostic_run_knows_where_the_context_ends(tokenizer: Any, task: str) -> None:
    made = config("gkv", 48, task=task, compress="query-agnostic")
    work, _, _ = planned(tokenizer, made)
    aware, _, _ = planned(tokenizer, dataclasses.replace(made, compress="query-aware"))
    assert [tuple(p.ids) for p in work.prompts] == [tuple(p.ids) for p in aware.prompts]
    (cell,) = made.cells()
    (requests,) = work.batches(work.rows(cell, made, MODEL, "float32", GROUP), 0)
    for request, prompt in zip(requests, work.prompts):
        at = request.compress_at
        assert at is not None
        assert tokenizer.decode(request.prompt_ids[:at]) == prompt.doc.turns[0].context
        assert tokenizer.decode(request.prompt_ids[at:]) == prompt.doc.turns[0].question
    (requests,) = aware.batches(aware.rows(cell, made, MODEL, "float32", GROUP), 0)
    assert {r.compress_at for r in requests} == {None}


def test_a_task_without_context_cannot_be_query_agnostic(tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    items = [
        {"id": "a", "context": "Facts.", "question": "1 + 1?", "answer": 2},
        {"id": "b", "question": "?", "answer": 1},
    ]
    path.write_text("\n".join(map(json.dumps, items)))
    made = config("gkv", 48, task="file/q", compress="query-agnostic", task_file=str(path), no_chat_template=True)
    with pytest.raises(UserError, match=r"question 'b' of task 'file/q' has no context"):
        planned(tokenizer, made)
    path.write_text(json.dumps(items[0]))
    work, _, _ = planned(tokenizer, made)
    assert tokenizer.decode(work.prompts[0].ids[: work.prompts[0].compress_at]) == "Facts.\n\n"
    path.write_text(json.dumps(items[1] | {"system": "Be brief."}))
    work, _, _ = planned(tokenizer, made)
    assert tokenizer.decode(work.prompts[0].ids[: work.prompts[0].compress_at]) == "Be brief.\n\n"


def test_two_questions_with_one_id_are_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = registry.tasks.get("lookup")
    docs = lookup.docs

    def same(self: Any, source: Any, **how: Any) -> list[Any]:
        first, *others = docs(self, source, **how)
        return [first, *(dataclasses.replace(doc, doc_id="same") for doc in others)]

    monkeypatch.setattr(lookup, "docs", same)
    with pytest.raises(UserError, match=r"^task 'lookup' gives 2 questions the id 'same'\. Give each question its own"):
        planned(tokenizer, config("full"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"doc_id": 7}, "question '7' the doc_id 7"),
        ({"doc_id": ""}, "question '' the doc_id ''"),
        ({"cluster_id": 0}, "question 'a' the cluster_id 0"),
        ({"meta": {"category": 3}}, "question 'a' the meta['category'] 3"),
    ],
)
def test_names_of_questions_that_are_not_text_are_refused(
    change: dict[str, Any], named: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = registry.tasks.get("lookup")
    docs = lookup.docs

    def odd(self: Any, source: Any, **how: Any) -> list[Any]:
        first, *others = docs(self, source, **how)
        return [*others, dataclasses.replace(first, **{"doc_id": "a"} | change)]

    monkeypatch.setattr(lookup, "docs", odd)
    with pytest.raises(UserError) as caught:
        planned(tokenizer, config("full"))
    name = named.rpartition(" ")[0].rpartition("the ")[2]
    assert str(caught.value) == f"task 'lookup' gives {named}. Give a text that is not empty as {name}."


def test_a_stop_string_that_is_a_special_token_ends_answers_as_a_token(tokenizer: Any) -> None:
    """Decoded text never shows it. A tokenizer does not list every special token that a model's author has added."""
    added = copy.deepcopy(tokenizer)
    added.add_tokens([AddedToken("<|turn|>", special=True)], special_tokens=True)
    assert "<|turn|>" not in added.all_special_tokens
    stop = ("<|turn|>", "\n\n", tokenizer.eos_token)
    work, rows, _ = planned(added, config("full", stop=stop))
    request = work.request(work.prompts[0], (0,), seed=0)
    assert request.stop_strings == ("\n\n",)
    assert request.stop_ids == tuple(added.convert_tokens_to_ids(["<|turn|>", tokenizer.eos_token]))
    assert rows[0]["stop"] == list(stop)


@pytest.mark.parametrize(("asked", "stated"), [(None, [False, True]), (True, [True, True]), (False, [False, False])])
def test_a_row_states_the_thinking_of_its_question(
    tokenizer: Any, tmp_path: Path, asked: bool | None, stated: list[bool]
) -> None:
    """A question with a prefix is asked without thinking, unless the user asks for thinking."""
    template, data = tmp_path / "t.jinja", tmp_path / "q.jsonl"
    template.write_text(SWITCH)
    lines = ({"question": "k1 k2", "answer": 1, "answer_prefix": prefix} for prefix in ("It is", ""))
    data.write_text("\n".join(map(json.dumps, lines)))
    made = config("full", task="file/q", task_file=str(data), chat_template=str(template), thinking=asked)
    work, rows, _ = planned(tokenizer, made)
    assert [row["thinking"] for row in rows[:: work.spec.n]] == stated


@pytest.mark.parametrize("raw", [False, True])
def test_a_request_has_the_reply_header_of_its_prompt(tokenizer: Any, tmp_path: Path, raw: bool) -> None:
    template, data = tmp_path / "t.jinja", tmp_path / "q.jsonl"
    template.write_text("{{ messages[0].content }} [{{ enable_thinking }}, {{ effort }}]")
    data.write_text(json.dumps({"id": "a", "question": "k1 k2", "answer": 1}))
    rendering: dict[str, Any] = {"chat_template": str(template), "template_option": ("effort=high",), "thinking": False}
    rendering = {"no_chat_template": True} if raw else rendering
    work, _, _ = planned(tokenizer, config("kvzip", 48, task="file/q", task_file=str(data), **rendering))
    header = work.request(work.prompts[0], (0,), seed=0).reply_header
    assert header == (() if raw else tuple(tokenizer(" [False, high]", add_special_tokens=False)["input_ids"]))


@pytest.mark.parametrize(
    ("task", "asked", "scored", "noted"),
    [
        ("leak", None, False, True),
        ("leak", True, True, False),
        ("aime24", None, True, False),
        ("aime24", False, True, True),
    ],
)
def test_a_template_that_always_opens_a_thinking_block(
    tokenizer: Any, tmp_path: Path, task: str, asked: bool | None, scored: bool, noted: bool
) -> None:
    """In a task without thinking, an unfinished block is the answer, whatever the template does."""
    template = tmp_path / "t.jinja"
    template.write_text(OPEN)
    made = config("gkv", 48, task=task, chat_template=str(template), thinking=asked, data=str(DATA / "tasks"))
    source = Data(made.data, env={}, allow_mismatch=True)
    work = TaskWork.load(task, made, source, tokenizer, "qwen3", 32768, spool=Spool(), vision=no_images)
    assert {prompt.thinking for prompt in work.prompts} == {scored}
    assert work.thinking is True  # the column
    assert any("always opens a thinking block" in note for note in work.notes) is noted


@pytest.mark.parametrize("thinking", [True, False])
def test_stop_strings_inside_a_thinking_block_are_noted(tokenizer: Any, tmp_path: Path, thinking: bool) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(SWITCH)
    made = config("gkv", 48, task="leak", chat_template=str(template), thinking=thinking, stop=(".", "Q:"))
    work = TaskWork.load("leak", made, Data(env={}), tokenizer, "qwen3", 32768, spool=Spool(), vision=no_images)
    assert any("stop strings '.', 'Q:' end an output inside its thinking" in note for note in work.notes) is thinking


@pytest.mark.parametrize(
    ("template", "settings", "told"),
    [
        (SWITCH, {"thinking": True}, ()),
        (SWITCHED_CHANNELS, {"thinking": True}, ()),
        (OPEN, {"thinking": True}, ()),
        (PLAIN, {"thinking": True}, ("--thinking",)),
        (OTHER, {"thinking": True}, ("--thinking",)),
        (PLAIN, {"thinking": False}, ()),
        (SEED, {"thinking": False}, ("--no-thinking",)),
        (SWITCH, {"thinking": False, "no_chat_template": True}, ("--chat-template", "--no-thinking")),
        (SWITCH, {"no_chat_template": True}, ("--chat-template",)),
    ],
)
def test_a_setting_without_effect_is_told(
    tokenizer: Any, tmp_path: Path, template: str, settings: dict[str, Any], told: tuple[str, ...]
) -> None:
    (tmp_path / "t.jinja").write_text(template)
    made = config(
        "gkv", 48, task="aime24", chat_template=str(tmp_path / "t.jinja"), data=str(DATA / "tasks"), **settings
    )
    source = Data(made.data, env={}, allow_mismatch=True)
    work = TaskWork.load("aime24", made, source, tokenizer, "qwen3", 32768, spool=Spool(), vision=no_images)
    notes = [note for note in work.notes if note.endswith("has no effect on it.")]
    assert [note.removesuffix(" has no effect on it.").split()[-1] for note in notes] == list(told)


def test_what_reads_prompts_is_part_of_what_a_row_is(tokenizer: Any) -> None:
    _, [usual, *_], keys = planned(tokenizer, config("gkv", 48))
    _, [flash, *_], others = planned(tokenizer, config("gkv", 48, attn="flash"))
    assert (usual["attention"], flash["attention"]) == ("sdpa", "flash")
    assert not set(keys) & set(others)


def test_two_methods_have_both_versions() -> None:
    assert version("gkv") == make_method(config("gkv", 48).cells()[0]).version
    assert version("rkv+gkv") == f"{version('rkv')}+{version('gkv')}"
