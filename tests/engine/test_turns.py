"""Several turns in one cache, continuations whose tokens are given, end tokens, and tokens without an embedding."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from support.methods import small, with_tables
from support.models import VOCABULARY, build, requests

from kvbench.engine import sampler
from kvbench.engine.loop import Engine
from kvbench.errors import UserError
from kvbench.records import FollowUp, Request, Sampling

BUDGET, INTERVAL = 24, 8
NEXT = tuple(range(5, 24))  # what a user says in the second turn, 19 tokens


@pytest.fixture(scope="module")
def loaded():
    return with_tables(build("qwen3"))


@dataclasses.dataclass(frozen=True)
class Talk:
    """One more turn; fresh: as a new prompt."""

    fresh: bool = False
    turns: int = 2
    ids: tuple[int, ...] = NEXT

    def follow(self, answers):
        return FollowUp(ids=self.ids, fresh=self.fresh) if len(answers) < self.turns else None


def prompt(loaded, length=40, new_tokens=30, temperature=0.0) -> Request:
    (request,) = requests(lengths=(length,), new_tokens=(new_tokens,), samples=1)
    return dataclasses.replace(request, sampling=Sampling(temperature=temperature))


def run(loaded, todo, method="full", slots=3, **more):
    made = small(method)
    budget = BUDGET if made.takes_budget else None
    engine = Engine(loaded, made, budget=budget, interval=INTERVAL, slots=slots, max_tokens=300, **more)
    return list(engine.generate(todo))


def recorded(monkeypatch):
    """Logits of every draw of the first row, step by step."""
    seen = []
    real = sampler.draw
    monkeypatch.setattr(sampler, "draw", lambda logits, *rest: (seen.append(logits[0].clone()), real(logits, *rest))[1])
    return seen


@pytest.mark.parametrize("method", ["full", "gkv", "h2o", "ada-kv while decoding", "snapkv"])
def test_a_second_turn_reads_the_cache_that_the_first_one_left(loaded, method, monkeypatch):
    """The same tokens forced in one go give the same logits and the same cache."""
    logits = recorded(monkeypatch)
    talk = dataclasses.replace(prompt(loaded), conversation=Talk(), max_tokens=300)
    log, again = [], []
    (two,) = run(loaded, [talk], method, slots=1, log=lambda *event: log.append(event))
    first = list(logits)
    logits.clear()
    answer = loaded_ids(first[:30])
    assert len(two.turns) == 2
    assert two.token_ids == tuple(loaded_ids(first[30 + len(NEXT) :]))
    forced = (*answer, *NEXT, *two.token_ids)
    (flat,) = run(
        loaded,
        [dataclasses.replace(prompt(loaded), forced=forced, max_new_tokens=len(forced))],
        method,
        slots=1,
        log=lambda *event: again.append(event),
    )
    assert len(first) == len(logits) == len(forced)
    for one, other in zip(first, logits):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert str(log) == str(again)
    assert flat.usage.evictions == two.usage.evictions
    assert two.usage.output_tokens == 60
    if method == "gkv":
        assert two.usage.entries_after_evict <= BUDGET


def test_steps_that_read_a_turn_count_as_reading_a_prompt(loaded, monkeypatch):
    """Every block of one step takes one second here. Speeds follow from the steps that drew the answers' tokens."""
    clock = itertools.count()
    monkeypatch.setattr("kvbench.engine.loop.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr("kvbench.engine.loop.Timer.seconds", lambda timer: 0.0)
    talk = dataclasses.replace(prompt(loaded), conversation=Talk(), max_tokens=300)
    (one,) = run(loaded, [talk], slots=1, look=1)
    assert one.usage.decode_seconds == one.usage.output_tokens - 1 == 59
    assert one.usage.prefill_seconds == len(NEXT)  # 20 tokens are read, and the last one's step draws a token


def loaded_ids(logits) -> list[int]:
    return [int(row.argmax()) for row in logits]


@pytest.mark.parametrize("slots", [1, 3])
def test_a_fresh_turn_is_a_new_prompt(loaded, slots):
    talks = [
        dataclasses.replace(
            prompt(loaded, length, 12), doc_id=str(length), conversation=Talk(fresh=True), max_tokens=200
        )
        for length in (20, 40, 60)
    ]
    second = dataclasses.replace(prompt(loaded, 20, 12), prompt_ids=NEXT)
    (alone,) = run(loaded, [second], "gkv")
    answers = run(loaded, talks, "gkv", slots=slots)
    assert sorted(a.request.doc_id for a in answers) == ["20", "40", "60"]
    for one in answers:
        assert one.token_ids == alone.token_ids
        assert len(one.turns) == 2
        assert one.turns[1] == one.text
        assert one.usage.output_tokens == 24


def test_noise_goes_on_over_turns(loaded):
    """Sampled answers to the same new prompt differ from turn to turn: noise is not used twice."""
    talk = dataclasses.replace(
        prompt(loaded, 20, 12, temperature=1.0), prompt_ids=NEXT, conversation=Talk(fresh=True, turns=3), max_tokens=200
    )
    (one,) = run(loaded, [talk])
    assert len(set(one.turns)) == 3


def test_nan_in_the_tokens_of_a_turn_is_a_failed_row(loaded):
    """It shows before a token of the answer is drawn, and before the method evicts."""
    asked = prompt(loaded)
    bad = min(set(range(NEXT[-1] + 1, 100)) - {*asked.prompt_ids, *run(loaded, [asked], "gkv")[0].token_ids})
    talk = dataclasses.replace(asked, conversation=Talk(ids=(*NEXT, bad, *NEXT)), max_tokens=300)

    def poison(module, inputs, out):
        return torch.where(inputs[0][..., None] == bad, float("nan"), out)

    hook = loaded.model.get_input_embeddings().register_forward_hook(poison)
    try:
        (done,) = run(loaded, [talk], "gkv", slots=1)
    finally:
        hook.remove()
    assert (done.status, len(done.turns), done.token_ids) == ("nan_logits", 2, ())


def test_a_turn_without_room_is_a_failed_row(loaded):
    talk = dataclasses.replace(prompt(loaded, 40, 30), conversation=Talk(), max_tokens=40 + 30 + 10)
    (one,) = run(loaded, [talk])
    assert one.status == "prompt_too_long"
    assert "turn 2" in one.note
    short = dataclasses.replace(talk, max_tokens=40 + 30 + len(NEXT) + 5)
    (one,) = run(loaded, [short])
    assert (one.status, one.stop_reason, len(one.token_ids)) == ("ok", "length", 5)


def test_an_answer_of_which_an_earlier_turn_was_cut_is_truncated(loaded):
    talk = dataclasses.replace(prompt(loaded), conversation=Talk(), max_tokens=300)
    (first,), (free,) = run(loaded, [prompt(loaded)]), run(loaded, [talk])
    end = next(token for token in free.token_ids if token not in first.token_ids)
    (one,) = run(loaded, [dataclasses.replace(talk, stop_ids=(end,))])
    assert (one.stop_reason, one.token_ids[-1], len(one.turns)) == ("length", end, 2)
    (both,) = run(loaded, [dataclasses.replace(talk, stop_ids=(end, first.token_ids[0]))])
    assert (both.stop_reason, both.token_ids[-1] in (end, first.token_ids[0])) == ("stop", True)


BEYOND = (5, VOCABULARY, 6)  # the second token has no embedding


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prompt_ids": BEYOND}, "a text of task 't'"),
        ({"forced": BEYOND}, "a text of task 't'"),
        ({"conversation": Talk(ids=BEYOND), "max_tokens": 300}, "turn 2 of question '0'"),
        ({"conversation": Talk(ids=BEYOND, fresh=True), "max_tokens": 300}, "turn 2 of question '0'"),
    ],
)
def test_a_token_without_embedding_is_refused(loaded, change, text):
    odd = dataclasses.replace(prompt(loaded, 20, 4), **change)
    with pytest.raises(
        UserError, match=f"^{text} holds the token '{VOCABULARY}', for which the model has no embedding"
    ):
        run(loaded, [odd])


def test_log_probabilities_equal_a_plain_forward_pass(loaded):
    ids, forced = prompt(loaded).prompt_ids, (7, 130, 12, 9, 44)
    (one,) = run(loaded, [dataclasses.replace(prompt(loaded), forced=forced, max_new_tokens=5)])
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([[*ids, *forced]])).logits[0, len(ids) - 1 : -1].float()
    wanted = torch.log_softmax(logits, dim=-1)[torch.arange(5), torch.tensor(forced)]
    torch.testing.assert_close(torch.tensor(one.log_probs), wanted, rtol=1e-4, atol=1e-4)
    assert one.greedy == bool((logits.argmax(-1) == torch.tensor(forced)).all())
    assert one.token_ids == forced
    (own,) = run(loaded, [prompt(loaded, 40, 5)])
    (sure,) = run(loaded, [dataclasses.replace(prompt(loaded), forced=own.token_ids, max_new_tokens=5)])
    assert sure.greedy is True
    assert own.greedy is None


def test_no_end_token_before_the_least_number(loaded):
    (free,) = run(loaded, [prompt(loaded, 40, 20)])
    end = free.token_ids[0]
    (one,) = run(loaded, [dataclasses.replace(prompt(loaded, 40, 20), stop_ids=(end,))])
    assert (one.token_ids, one.stop_reason) == ((end,), "stop")
    (one,) = run(loaded, [dataclasses.replace(prompt(loaded, 40, 20), stop_ids=(end,), min_new_tokens=3)])
    assert end not in one.token_ids[:3]
    assert len(one.token_ids) >= 3
