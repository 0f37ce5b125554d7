"""Defaults, presets and schedules of recipes: which value counts, and what each preset may set."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbench.errors import UserError
from kvbench.train.catalogue import BUILT_IN
from kvbench.train.collection import DEFAULTS
from kvbench.train.entry import OPTIMISER, PROMPTING, Entry, Preset, check_optimiser
from kvbench.train.loop import rate
from kvbench.train.recipe import Settings

PAPER = Preset(about="as in the paper", values={"steps": 7, "kl": 0.1}, models={"Qwen3-4B": {"kl": 0.01}})
ENTRY = Entry(about="", traces=5, steps=9, lr=0.5, options={"kl": 1.0, "width": 4}, presets={"paper": PAPER})


def test_a_preset_replaces_defaults_and_a_model_replaces_the_preset() -> None:
    numbers = {"samples": 5, "steps": 9, "lr": 0.5, "batch": 8}
    assert ENTRY.settings("any") == {**numbers, **PROMPTING, **OPTIMISER, **DEFAULTS, "kl": 1.0, "width": 4}
    assert replace(ENTRY, learns_from="examples").settings("any") == {**numbers, **OPTIMISER, "kl": 1.0, "width": 4}
    assert ENTRY.settings("any", "paper") == ENTRY.settings("any") | {"steps": 7, "kl": 0.1}
    for model in ("Qwen/Qwen3-4B", "models/qwen3-4b/", "Qwen3-4B"):
        assert ENTRY.settings(model, "paper")["kl"] == 0.01
    assert ENTRY.settings("Qwen/Qwen3-14B", "paper")["kl"] == 0.1


def test_the_built_in_model_has_its_own_preset_unless_another_is_named() -> None:
    entry = replace(ENTRY, presets={"tiny": Preset(about="", values={"width": 1}), "paper": PAPER})
    assert [entry.settings(*of)["width"] for of in (("tiny",), ("tiny", "paper"), ("other",), ("other", "tiny"))] == [
        *(1, 4, 4, 1)
    ]
    assert entry.preset_for("tiny", None) == "tiny"
    with pytest.raises(UserError, match=r"the recipe has no preset 'papr'. Did you mean 'paper'"):
        entry.settings("tiny", "papr")
    with pytest.raises(UserError, match=r"no preset 'paper'\. It has none."):
        replace(entry, presets={}).settings("tiny", "paper")


@pytest.mark.parametrize("name", BUILT_IN)
def test_values_of_presets_have_the_type_of_the_default(name: str) -> None:
    entry = BUILT_IN[name]
    for preset in entry.presets.values():
        for model in ("", *preset.models):
            values, defaults = preset.of(model), entry.defaults()
            assert all(defaults[key] is None or type(value) is type(defaults[key]) for key, value in values.items())
            check_optimiser(defaults | values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schedule": "linear"}, "--opt schedule must be one of cosine, constant, trapezoid; got 'linear'."),
        ({"warmup": -1}, "--opt warmup must be 0 or more; got -1."),
        ({"floor": 2.0}, "--opt floor must lie between 0 and 1; got 2."),
        ({"beta2": 1.0}, "--opt beta2 must be below 1"),
    ],
)
def test_settings_of_the_optimiser_are_checked(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_optimiser({**OPTIMISER, **values})
    assert message in str(caught.value)


def rates(**own: object) -> list[float]:
    settings = Settings.of(own, steps=10, lr=2.0)
    return [round(rate(settings, step), 6) for step in range(10)]


def test_schedules() -> None:
    assert rates(schedule="constant", warmup=4) == [0.5, 1.0, 1.5, *[2.0] * 7]
    assert rates(schedule="constant", warmup=0) == [2.0] * 10
    # DuoAttention: min(1, max((step + 1) / warm, 0.1), max((steps - step) / warm, 0.1))
    wanted = [2 * min(1, max((s + 1) / 4, 0.3), max((10 - s) / 4, 0.3)) for s in range(10)]
    assert rates(schedule="trapezoid", warmup=4, floor=0.3) == pytest.approx(wanted)
    cosine = rates(schedule="cosine", warmup=2, floor=0.0)
    assert cosine[:3] == [1.0, 2.0, 2.0]
    assert cosine[6] == pytest.approx(1.0)
    assert cosine == sorted(cosine[:2]) + sorted(cosine[2:], reverse=True)
    assert 0 < cosine[-1] < 0.1


def test_settings_are_sorted_into_the_optimisers_and_the_recipes() -> None:
    made = Settings.of({"warmup": 3, "beta2": 0.5, "clip": 0.2, "kl": 1.0}, steps=1, lr=1.0)
    assert (made.warmup, made.beta2, made.schedule, made.clip) == (3, 0.5, "cosine", 1.0)
    assert made.more == {"clip": 0.2, "kl": 1.0}
