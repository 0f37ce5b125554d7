"""sepllm: which tokens are separators, and that the newest of them stay."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvbench import tiny
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import load
from kvbench.engine.model.marks import marks
from kvbench.engine.rules import Rules
from kvbench.errors import UserError
from kvbench.eviction.choose import from_label
from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.integrations.transformers_cache import EvictionCache
from kvbench.records import Request
from kvbench.registry import methods


@pytest.fixture(scope="module")
def loaded():
    return load(str(tiny.path()), device="cpu")


def test_marks_are_tokens_of_these_characters_and_white_space(loaded):
    table, tokenizer = marks(loaded, ",:"), loaded.tokenizer
    assert table.shape == (loaded.model.config.vocab_size,)
    texts = {tokenizer.decode([i]) for i in table.nonzero()[:, 0].tolist()}
    assert {",", ":", "\n"} <= texts
    assert all(not "".join(text.split()).strip(",:") for text in texts)
    assert not table[tokenizer.all_special_ids].any()


def test_characters_without_a_token_are_refused(loaded):
    with pytest.raises(UserError, match="no token of the model's tokenizer consists of the characters"):
        marks(loaded, "\u2603")
    with pytest.raises(UserError, match="must have a character that is not white space"):
        methods.get("sepllm")(marks="  ")


def test_the_newest_separators_stay_then_the_newest_tokens():
    separator = torch.zeros(1, 1, 12)
    separator[..., [2, 4, 6]] = 1
    view = make_view(torch.zeros(1, 1, 12, 4), budget=5, columns={"separator": separator})
    for sinks, recent, kept in ((1, 2, [0, 4, 6, 10, 11]), (0, 0, [2, 4, 6, 10, 11]), (1, 3, [0, 6, 9, 10, 11])):
        [decision] = decide(methods.get("sepllm")(sinks=sinks, recent=recent), [view])
        assert decision.keep[0, 0].nonzero()[:, 0].tolist() == kept


def request(loaded, count=60):
    table = marks(loaded, methods.get("sepllm")().marks)
    words = (~table).nonzero()[20:400, 0].tolist()
    ids = words[:count]
    ids[5::7] = [int(table.nonzero()[0])] * len(ids[5::7])
    return tuple(ids)


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_the_engine_tells_the_method_which_tokens_are_separators(loaded, layout):
    ids, events = request(loaded), []
    forced = (*request(loaded)[:20],)
    method = methods.get("sepllm")(sinks=2, recent=4)
    sizes = {"budget": 12, "interval": 8, "slots": 1, "max_tokens": 100, "layout": layout, "prefill_chunk": 16}
    engine = Engine(loaded, method, **sizes, log=lambda *event: events.append(event))
    list(engine.generate([Request(task="t", doc_id="d", prompt_ids=ids, max_new_tokens=20, forced=forced)]))
    read, table = [*ids, *forced], marks(loaded, method.marks)
    assert {seen for _, seen, _, _ in events} == {60, 68, 76}
    for _, seen, _, heads in events:
        among = [p for p in range(2, seen - 4) if table[read[p]]][-6:]
        wanted = sorted([0, 1, *among, *range(seen - 4, seen)])
        assert all(head.tolist() == wanted for head in heads)


def test_padded_prompts_of_a_batch_have_their_own_separators(loaded):
    rows = [request(loaded), request(loaded, 40)]
    method, alone = methods.get("sepllm")(sinks=2, recent=4), []
    sizes = {"budget": 12, "interval": 8, "max_tokens": 100}
    more = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    for ids in rows:
        with EvictionCache(loaded.model, method, **sizes, tokenizer=loaded.tokenizer) as cache:
            out = loaded.model.generate(torch.tensor([ids]), past_key_values=cache, **more)
        alone.append(out[0, len(ids) :].tolist())
    padded = torch.tensor([rows[0], (*[0] * 20, *rows[1])])
    mask = torch.ones_like(padded)
    mask[1, :20] = 0
    with EvictionCache(loaded.model, method, **sizes, tokenizer=loaded.tokenizer) as cache:
        out = loaded.model.generate(padded, attention_mask=mask, past_key_values=cache, **more)
    for row, ids in zip(out[:, 60:].tolist(), alone, strict=True):
        assert row[: len(ids)] == ids


def test_marks_are_what_a_label_can_show():
    assert from_label("sepllm(marks=+=;)").marks == "+=;"
    for given in (".,", "()", ".)"):
        with pytest.raises(UserError, match="unless it is the default value, no comma"):
            methods.get("sepllm")(marks=given)
    with pytest.raises(UserError, match="options are NAME=VALUE; got ''"):
        from_label("sepllm(marks=.,)")


class Operations(TorchDispatchMode):
    """Notes the names of all operations in its block."""

    def __torch_dispatch__(self, operation, types, given=(), named=None):
        self.names = [*getattr(self, "names", []), operation.__name__]
        return operation(*given, **(named or {}))


def test_embeddings_are_no_marks_and_nothing_is_copied_from_the_host():
    method = methods.get("sepllm")()
    rules = Rules(method=method, budget=8, interval=4, marks=torch.ones(9, dtype=torch.bool, device="meta"))
    with Operations() as ran:
        found = rules._marks_of(SimpleNamespace(query=torch.empty(2, 3, 5, 4, device="meta"), tokens=None))
    assert (found.shape, found.dtype, found.device.type) == ((2, 5), torch.bool, "meta")
    assert not [name for name in ran.names if "copy" in name]
