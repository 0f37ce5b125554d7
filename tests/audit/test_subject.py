"""What methods need beside a model: drawn at random where it is missing, and fitting their options."""

from __future__ import annotations

import pytest
import torch
from support import images, vision
from support.audits import verdicts
from support.models import build
from support.runs import model_folder

from kvbench.audit.invariants.subject import Subject, named_subject
from kvbench.engine.model.load import load
from kvbench.engine.model.random_weights import draw
from kvbench.engine.model.weights import load_weights, model_fields
from kvbench.errors import UserError
from kvbench.eviction.api import Weights
from kvbench.eviction.choose import make
from kvbench.eviction.learned import LearnedWeights
from kvbench.registry import methods


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory):
    return load(str(model_folder(tmp_path_factory.mktemp("model"))), device="cpu", dtype="float32")


NEEDY = [name for name, cls in methods.items() if cls().weights() is not None]
OPTIONS = [
    *((name, {}) for name in NEEDY),
    *(
        ("trimkv", {"gate": gate, "tie": tie})
        for gate in ("rg2", "rg3", "rg10")
        for tie in ("none", "layers_and_heads")
    ),
    ("foresightkv", {"features": "released8"}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_random_weights_fit_the_method_and_the_model(loaded, name, options):
    weights = make(name, options).weights()
    tensors = draw(weights, loaded.model)
    assert all(bool(torch.isfinite(tensor).all()) and tensor.numel() for tensor in tensors.values())
    if isinstance(weights, LearnedWeights):
        assert weights.check(tensors, model_fields(loaded.model.config)) == ""


def test_weights_of_a_kind_that_nobody_knows_are_not_drawn(loaded):
    with pytest.raises(UserError, match="cannot draw random ones"):
        draw(Weights(kind="mine"), loaded.model)


def test_a_method_gets_a_file_of_its_own_options(loaded, tmp_path):
    subject = Subject("x", loaded, None, tmp_path)
    for options, name in (({"beta": 2.0}, "headkv"), ({}, "duo")):
        method, beside = subject.serve(make(name, options))
        assert load_weights(method.weights(), None, loaded.model.config, "cpu")
        assert load_weights(make(name, {}).weights(), beside.folder, loaded.model.config, "cpu")


def test_prompts_of_a_repository_that_sees_hold_images(tmp_path):
    subject = named_subject(str(vision.repository(tmp_path / "model")), tmp_path)
    prompts = subject.prompts([61, 18, 36], seed=1)
    assert [prompt.images and prompt.images.spans for prompt in prompts] == [
        ((3, 7), (10, 18), (21, 37), (40, 44)),
        ((3, 7),),
        None,
    ]
    for prompt in prompts:
        shown = [at for at, token in enumerate(prompt.ids) if token == vision.IMAGE_TOKEN]
        spans = prompt.images.spans if prompt.images else ()
        assert shown == [at for first, last in spans for at in range(first, last)]
    assert verdicts(make("gkv", {}), subject) == (set(), [])


def test_prompts_of_models_that_read_text_or_other_images_are_text(tmp_path):
    for model in (build("qwen3"), images.load("llava")):
        subject = Subject("x", model, None, tmp_path)
        assert [(len(p.ids), p.images) for p in subject.prompts([61, 18], seed=1)] == [(61, None), (18, None)]
