"""An engine, or a cache for `generate`, that reads images wrongly must be found on the vision model of the audit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.audits import Good, verdicts

from kvbench.audit.invariants.exam import Exam
from kvbench.audit.invariants.subject import Subject, random_subject
from kvbench.engine import prefill
from kvbench.engine.attention.interface import RoutedModel
from kvbench.engine.images import PromptImages
from kvbench.engine.loop import Engine
from kvbench.eviction.choose import make
from kvbench.integrations.batch_images import BatchImages

EVERY_WAY = {"dense", "paged", "chunked", "tail", "share"}


@pytest.fixture
def vision(tmp_path: Path) -> Subject:
    torch.set_num_threads(1)
    return random_subject("vision", tmp_path)


def ways(failed: list[Any], invariant: str) -> set[str]:
    return {check.layout for check in failed if check.invariant == invariant}


def test_evictions_drop_some_of_each_prompt_s_images_and_keep_some(vision: Subject) -> None:
    exam = Exam(Good(), vision)
    long, short, _ = exam.requests
    assert [request.images and len(request.images.spans) for request in exam.requests] == [4, 1, None]
    read = [PromptImages.of(vision.loaded.model, r.prompt_ids, r.images) for r in (long, short)]  # type: ignore[arg-type]
    assert len({0, *(images.delta(len(images.modality)) for images in read)}) == 3
    trial = exam.main("dense")
    for request in (long, short):
        usage: Any = trial.done[request.doc_id, 0].usage
        assert 0 < usage.kept_images < 1


@pytest.mark.parametrize("name", ["laq", "text-first"])
def test_an_engine_that_is_right(vision: Subject, name: str) -> None:
    assert verdicts(make(name, {}), vision) == (set(), [])


def test_methods_that_images_would_mislead_do_not_apply(vision: Subject) -> None:
    from kvbench.audit.invariants.checks import audit

    checks = audit([(name, make(name, {})) for name in ("kvzip", "expected-attention")], [vision])
    assert {check.verdict for check in checks} == {"n/a"}
    assert all(check.reason.endswith("another method for prompts with images.") for check in checks)


def test_a_model_that_draws_its_image_token(vision: Subject) -> None:
    """The token after a prompt is text, whatever its number."""
    with torch.no_grad():
        vision.loaded.model.lm_head.weight[511] *= 40
    assert verdicts(Good(), vision) == (set(), [])
    done = Exam(Good(), vision).main("dense").done.values()
    assert sum(sample.token_ids.count(511) for sample in done) > 10


def test_an_engine_with_one_rope_delta_for_all_slots(vision: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    install = Engine._install

    def everywhere(self, prompt, slots):  # type: ignore[no-untyped-def]
        install(self, prompt, slots)
        for _, sequence in self.slots.live():
            sequence.delta = prompt.delta

    monkeypatch.setattr(Engine, "_install", everywhere)
    names, failed = verdicts(Good(), vision)
    assert {"oracle", "batch"} <= names
    assert ways(failed, "oracle") == EVERY_WAY


def test_an_engine_whose_slots_keep_the_rope_delta_of_their_first_sequence(
    vision: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = Engine._install

    def kept(self, prompt, slots):  # type: ignore[no-untyped-def]
        install(self, prompt, slots)
        first = self.__dict__.setdefault("first", {})
        for slot, sequence in self.slots.of(slots):
            sequence.delta = first.setdefault(slot, prompt.delta)

    monkeypatch.setattr(Engine, "_install", kept)
    names, failed = verdicts(Good(), vision)
    assert {"oracle", "batch"} <= names
    assert ways(failed, "oracle") == {"dense", "paged"}  # in the others no slot is refilled


class Shifted(PromptImages):
    """Columns that say of each token what holds of the token before."""

    __slots__ = ()

    def modality_of(self, first: int, last: int) -> torch.Tensor:
        return super().modality_of(first, last).roll(1)


class AllText(PromptImages):
    __slots__ = ()

    def modality_of(self, first: int, last: int) -> torch.Tensor:
        return torch.zeros_like(super().modality_of(first, last))


@pytest.mark.parametrize("wrong", [Shifted, AllText])
def test_an_engine_whose_modality_column_is_off(
    vision: Subject, monkeypatch: pytest.MonkeyPatch, wrong: type[PromptImages]
) -> None:
    monkeypatch.setattr(prefill, "PromptImages", wrong)
    names, failed = verdicts(make("text-first", {}), vision)
    assert "protect" in names
    assert "oracle" not in names  # the masks say what happened
    assert ways(failed, "protect") == EVERY_WAY
    assert any("entries of text evicted while" in c.reason for c in failed)


class EveryChunkFromTheStart(PromptImages):
    __slots__ = ()

    def _rotary(self, axes: torch.Tensor, first: int, last: int) -> torch.Tensor:
        return super()._rotary(axes, 0, last - first)


class Flat(PromptImages):
    """Prompts with the right positions, and sequences that go on as if an image were as long as its tokens."""

    __slots__ = ()

    def delta(self, tokens: int) -> int:
        return 0


@pytest.mark.parametrize(("wrong", "where"), [(EveryChunkFromTheStart, {"chunked", "tail"}), (Flat, EVERY_WAY)])
def test_an_engine_with_wrong_rotary_positions(
    vision: Subject, monkeypatch: pytest.MonkeyPatch, wrong: type[PromptImages], where: set[str]
) -> None:
    monkeypatch.setattr(prefill, "PromptImages", wrong)
    _, failed = verdicts(Good(), vision)
    assert ways(failed, "oracle") == where


def while_the_engine_reads(monkeypatch: pytest.MonkeyPatch, part: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Replace a function of the model in the engine's passes only, not in those of the oracle."""
    run = RoutedModel.run

    def with_fault(self, *args, **inputs):  # type: ignore[no-untyped-def]
        with patch.object(part, name, wrong):
            return run(self, *args, **inputs)

    monkeypatch.setattr(RoutedModel, "run", with_fault)


def test_an_engine_that_merges_the_features_of_images_twice(vision: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    features = vision.loaded.model.model.get_image_features

    def twice(*args, **more):  # type: ignore[no-untyped-def]
        out = features(*args, **more)
        out.pooler_output = tuple(2 * image for image in out.pooler_output)
        return out

    while_the_engine_reads(monkeypatch, vision.loaded.model.model, "get_image_features", twice)
    names, failed = verdicts(Good(), vision)
    assert {"oracle", "past", "generate"} <= names
    assert ways(failed, "oracle") == EVERY_WAY


def test_an_engine_that_drops_the_features_of_deeper_layers(vision: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    text = vision.loaded.model.model.language_model
    while_the_engine_reads(monkeypatch, text, "_deepstack_process", lambda hidden, *more: hidden)
    names, failed = verdicts(Good(), vision)
    assert {"oracle", "past", "generate"} <= names
    assert ways(failed, "oracle") == EVERY_WAY


def test_a_bridge_that_forgets_the_rope_deltas(vision: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = BatchImages.positions
    monkeypatch.setattr(
        BatchImages, "positions", lambda self, index, seen: index if seen else positions(self, index, seen)
    )
    names, failed = verdicts(Good(), vision)
    assert names == {"generate"}
    assert "the tokens of engine and EvictionCache differ from step" in failed[0].reason


def test_a_bridge_that_gives_every_row_the_images_of_the_first(
    vision: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = vision.loaded.model.model.get_image_features

    def first_row(pixel_values, image_grid_thw, **more):  # type: ignore[no-untyped-def]
        if len(image_grid_thw) == 8:  # two prompts of four images
            pixel_values = pixel_values[: len(pixel_values) // 2].repeat(2, 1)
        return features(pixel_values, image_grid_thw, **more)

    monkeypatch.setattr(vision.loaded.model.model, "get_image_features", first_row)
    names, failed = verdicts(Good(), vision)
    assert names == {"generate"}
    assert failed[0].reason.endswith("for prompt 1 of the batch")
