"""kvbench as a model of lm-eval: samples, stop rules, likelihoods, templates, its file of answers."""

from __future__ import annotations

import pytest
import torch
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model
from safetensors.torch import load_file

from kvbench import tiny
from kvbench.engine.model.weights import Base, read_card, save_weights
from kvbench.errors import UserError
from kvbench.integrations import yaml_tasks
from kvbench.integrations.lm_eval import KVBenchLM
from kvbench.runner import cell
from kvbench.runner.method_source import Source
from kvbench.sources.data import Data
from kvbench.taskkit.names import get_task

GREEDY = {"until": [], "max_gen_toks": 12, "do_sample": False}
SAMPLED = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 3.0}


@pytest.fixture(scope="module")
def prompts():
    return [doc.turns[0].user for doc in get_task("chain").docs(Data(env={}), limit=3)]


@pytest.fixture(scope="module")
def full():
    return KVBenchLM(model="tiny")


@pytest.fixture(scope="module")
def evicting():
    return KVBenchLM(model="tiny", method="streaming-llm", budget=40, interval=8)


def test_registered_beside_lm_evals_own_models():
    assert get_model("kvbench") is KVBenchLM
    assert get_model("dummy").__module__.startswith("lm_eval.")


def test_repeats_are_samples_in_order(full, prompts, instance):
    """lm-eval hands over the same object k times."""
    one, two = (instance("generate_until", (p, SAMPLED), doc=i, repeats=3) for i, p in enumerate(prompts[:2]))
    texts = full.generate_until([one, one, one, two, two, two], disable_tqdm=True)
    assert len(set(texts[:3])) > 1
    assert full.generate_until([two, two, two, one, one, one], disable_tqdm=True) == texts[3:] + texts[:3]
    assert full.generate_until([one], disable_tqdm=True) == texts[:1]


def test_requests_with_other_ways_of_drawing_keep_their_places(full, prompts, instance):
    made = [instance("generate_until", (p, g), doc=i) for i, p in enumerate(prompts[:2]) for g in (GREEDY, SAMPLED)]
    together = full.generate_until(made, disable_tqdm=True)
    assert together == [full.generate_until([each], disable_tqdm=True)[0] for each in made]


def test_stop_strings_and_length(full, prompts, instance):
    def text(**changes):
        return full.generate_until([instance("generate_until", (prompts[0], GREEDY | changes))], disable_tqdm=True)[0]

    whole = text(max_gen_toks=40)
    stop = whole[7:10]
    assert text(max_gen_toks=40, until=[stop]) == whole[: whole.index(stop)]
    assert len(full.tok_encode(text(max_gen_toks=5))) == 5
    assert text(max_gen_toks=40, until=["<|end|>", ""]) == whole  # the end token, which is no text


def test_unknown_ways_of_drawing_are_refused(full, instance):
    with pytest.raises(UserError, match="needs the generation settings 'num_beams', which kvbench does not"):
        full.generate_until([instance("generate_until", ("a", GREEDY | {"num_beams": 4}))], disable_tqdm=True)


def likelihood(model, context, continuation):
    """A plain forward pass of transformers over the whole text."""
    ids = model.tok_encode(context + continuation)
    length = len(model.tok_encode(context))
    with torch.no_grad():
        logits = model.loaded.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    rows, tokens = logits[length - 1 : -1], torch.tensor(ids[length:])
    return float(rows.gather(1, tokens[:, None]).sum()), bool((rows.argmax(-1) == tokens).all())


def test_likelihoods_of_the_full_cache_are_those_of_a_forward_pass(full, prompts, instance):
    pairs = [(p, c) for p in prompts for c in ("a", "b 12.", "\n")] + [("x", "yz")]
    # What the model itself would say counts as greedy.
    pairs.append((prompts[0], full.generate_until([instance("generate_until", (prompts[0], GREEDY))])[0]))
    answers = full.loglikelihood([instance("loglikelihood", p, doc=i) for i, p in enumerate(pairs)], disable_tqdm=True)
    expected = [likelihood(full, *pair) for pair in pairs]
    assert [a[0] for a in answers] == pytest.approx([e[0] for e in expected], abs=1e-3)
    assert [a[1] for a in answers] == [e[1] for e in expected]
    assert answers[-1][1]
    assert not all(a[1] for a in answers)


def test_an_empty_context_is_the_end_token(full, instance):
    (answer,) = full.loglikelihood([instance("loglikelihood", ("", "ab"))], disable_tqdm=True)
    ids = [full.prefix_token_id, *full.tok_encode("ab")]
    with torch.no_grad():
        logits = full.loaded.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    assert answer[0] == pytest.approx(sum(float(logits[i, t]) for i, t in enumerate(ids[1:])), abs=1e-3)


def test_one_token_is_scored_with_the_evicted_cache(full, evicting, prompts, instance):
    """By a forward pass over what StreamingLLM leaves: the first tokens and the last ones, at their own positions."""
    requests = [instance("loglikelihood", (prompts[0], c), idx=i) for i, c in enumerate("ab")]
    answers = evicting.loglikelihood(requests, disable_tqdm=True)
    with_all = full.loglikelihood(requests, disable_tqdm=True)
    assert [a[0] for a in answers] != pytest.approx([a[0] for a in with_all], abs=0.1)
    ids = full.tok_encode(prompts[0])
    sinks = evicting.args.method().options()["sinks"]
    seen = [*range(sinks), *range(len(ids) - 1 - (40 - sinks), len(ids))]
    allowed = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    allowed[-1] = torch.tensor([i in seen for i in range(len(ids))])
    with torch.no_grad():
        mask = torch.zeros(len(ids), len(ids)).masked_fill(~allowed, float("-inf"))[None, None]
        logits = full.loaded.model(torch.tensor([ids]), attention_mask=mask).logits[0, -1].log_softmax(-1)
    expected = [float(logits[full.tok_encode(c)[0]]) for c in "ab"]
    assert [a[0] for a in answers] == pytest.approx(expected, abs=1e-3)
    assert evicting.get_model_info()["kvbench"]["entries_after_evict"] == 40


def test_choices_of_a_question_meet_the_same_cache(prompts, instance):
    model = KVBenchLM(model="tiny", method="random", budget=40)
    same, other = (instance("loglikelihood", (p, "a"), doc=i) for i, p in enumerate(prompts[:2]))
    first = model.loglikelihood([same, other, instance("loglikelihood", (prompts[0], "a"), doc=0, idx=1)])
    assert first[0] == first[2] == model.loglikelihood([other, same])[1]


def test_perplexity_of_whole_texts_is_refused(full, instance):
    with pytest.raises(UserError, match="does not measure the perplexity of whole texts"):
        full.loglikelihood_rolling([instance("loglikelihood_rolling", ("text",))])


def test_a_prompt_that_is_too_long(full, instance):
    long = instance("generate_until", ("a b c d " * 9000, GREEDY))
    with pytest.raises(UserError, match=r"exceed the model's context of 32768 tokens\. Give truncate=left"):
        full.generate_until([long], disable_tqdm=True)
    cut = KVBenchLM(model="tiny", truncate="left")._fit(range(40000), 100, least=1)
    assert (len(cut), cut[-1]) == (32668, 39999)


def test_a_token_without_embedding_is_refused(full, instance, monkeypatch):
    embeddings = full.loaded.model.get_input_embeddings().weight.shape[0]
    monkeypatch.setattr(full, "tok_encode", lambda *_, **__: [5, embeddings])
    with pytest.raises(UserError, match="for which the model has no embedding"):
        full.generate_until([instance("generate_until", ("a", GREEDY))], disable_tqdm=True)


def test_chat_template(full, monkeypatch):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]
    monkeypatch.setattr(full, "_templated", False)
    assert full.apply_chat_template(messages[:1]) == "Hi\n"
    assert full.apply_chat_template(messages, add_generation_prompt=False).startswith("Hi\nSo")
    assert full.chat_template(True) == full.tokenizer.chat_template
    assert full.tokenizer_name.endswith("__tiny")


def test_a_template_that_is_missing_or_refuses(full, monkeypatch):
    monkeypatch.setattr(full, "_templated", False)
    monkeypatch.setattr(full.tokenizer, "chat_template", "{{ raise_exception('no system message') }}")
    with pytest.raises(UserError, match="no system message"):
        full.apply_chat_template([{"role": "system", "content": "x"}])
    monkeypatch.setattr(full.tokenizer, "chat_template", None)
    with pytest.raises(UserError, match="has no chat template"):
        full.chat_template(True)


def test_a_template_file_and_the_thinking_switch(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0].content }} {{ enable_thinking }}")
    for thinking in (True, False):
        model = KVBenchLM(model="tiny", method="laq", budget=64, chat_template=str(file), thinking=thinking)
        assert model._reply_header() == ()  # prompts are raw until lm-eval asks for the template
        assert model.apply_chat_template([{"role": "user", "content": "Hi"}]) == f"Hi {thinking}"
        assert model._reply_header() == tuple(model.tok_encode(f" {thinking}"))


def test_a_template_that_takes_lists_of_parts(tmp_path):
    """As LLaVA's does: it would drop a message that is plain text."""
    file = tmp_path / "t.jinja"
    file.write_text(
        "{% for m in messages %}{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    model = KVBenchLM(model="tiny", chat_template=str(file), thinking=True)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So"}]
    assert model.apply_chat_template(messages[:1]) == "Hi:"
    assert model.apply_chat_template(messages, add_generation_prompt=False) == "HiSo"
    assert yaml_tasks._of_model["thinking"] is True


def test_a_variable_of_the_template(tmp_path):
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0].content }} {{ reasoning_effort }}")
    model = KVBenchLM(model="tiny", chat_template=str(file), template_option="reasoning_effort=high")
    assert model.apply_chat_template([{"role": "user", "content": "Hi"}]) == "Hi high"
    with pytest.raises(UserError, match="does not read this variable"):
        KVBenchLM(model="tiny", chat_template=str(file), template_option="x=1").chat_template(True)


def test_rendered_prompts_get_no_start_token_of_the_tokenizers(full, monkeypatch):
    asked = []
    monkeypatch.setattr(full, "_templated", False)
    monkeypatch.setattr("kvbench.taskkit.prompts.encode", lambda _, text, chat: asked.append(chat) or [1])
    full.tok_encode("raw")
    full.apply_chat_template([{"role": "user", "content": "x"}])
    full.tok_encode("rendered")
    assert asked == [False, True]


def test_stored_answers_are_found_again(tmp_path, prompts, instance):
    greedy = instance("generate_until", (prompts[0], GREEDY), doc=0)
    scored = instance("loglikelihood", (prompts[0], "ab"), doc=0)
    file = str(tmp_path / "answers.db")

    def ask(**changes):
        model = KVBenchLM(model="tiny", method="gkv", **{"budget": 40, "interval": 8} | changes)
        lm = CachingLM(model, file)
        found = lm.generate_until([greedy]), lm.loglikelihood([scored])
        return found, model.get_model_info()["kvbench"]["output_tokens"]

    first, tokens = ask()
    assert tokens > 0
    assert ask() == (first, 0)
    with pytest.raises(UserError, match=r"holds answers of other settings \(budget 40, now 48\)"):
        ask(budget=48)


def test_stored_answers_of_other_weights_or_other_code_are_refused(tmp_path, full, monkeypatch):
    gates, file = tmp_path / "retention.safetensors", str(tmp_path / "answers.db")
    tensors, card = load_file(tiny.path() / gates.name), read_card(tiny.path() / gates.name)

    def ask(scale=1):
        base = Base(name="tiny", config=full.loaded.model.config, fingerprint=card["fingerprint"])
        save_weights(gates, "retention", {name: scale * t for name, t in tensors.items()}, base, made={})
        model = KVBenchLM(model="tiny", method="retention", budget=40, **{"retention.gates": str(gates)})
        CachingLM(model, file)

    ask()
    ask()
    with pytest.raises(UserError, match=r"answers of other settings \(artefacts \{'retention': '\w+'\}, now \{"):
        ask(scale=2)
    monkeypatch.setattr(cell, "source_of", lambda method: Source("edited", {}))
    with pytest.raises(UserError, match=r"answers of other settings \(source \w+, now edited\)"):
        ask()


def test_an_answers_file_of_unknown_origin_is_refused(tmp_path, full, monkeypatch):
    class Other(type(full)):
        def set_cache_hook(self, cache_hook):
            cache_hook.dbdict["key"] = "an answer"

    monkeypatch.setattr(full, "__class__", Other)
    CachingLM(full, str(tmp_path / "answers.db"))
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"holds answers, but not the settings that made them\. Give another file"):
        CachingLM(full, str(tmp_path / "answers.db"))


def test_results_say_what_answered(evicting):
    info = evicting.get_model_info()
    assert info["model_num_parameters"] == evicting.shape.parameters
    assert info["kvbench"]["method"] == "streaming-llm"
    assert (info["kvbench"]["budget"], info["kvbench"]["interval"]) == (40, 8)
    assert info["kvbench"]["options"] == evicting.args.method().options()
