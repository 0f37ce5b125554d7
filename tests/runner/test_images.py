"""Questions with images, from the task to the row: places and tokens in the prompt, pixels on request, refusals."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from support.runs import model_folder
from support.vision import FAMILIES, IMAGE_TOKEN, SQUARES, model_reader, picture, repository

from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.engine.images import joined
from kvbench.errors import SetupError, UserError
from kvbench.records import Images
from kvbench.runner import image_processor, workload
from kvbench.runner.execute import execute
from kvbench.runner.prompt import Prompt, PromptMaker
from kvbench.runner.spool import Spool
from kvbench.sources import image_files
from kvbench.store import read_rows, read_texts
from kvbench.task import IMAGE, DataSource, Doc, GenSpec, Image, Output, Score, Task, Turn
from kvbench.taskkit import prompts
from kvbench.taskkit.reader import ModelReader

WIDE, SQUARE, LARGE = picture("wide.png", (48, 32), 1), picture("square.png", (32, 32), 2), picture("l.png", (64, 64))
TOKENS = {WIDE: 6, SQUARE: 4, LARGE: 16}  # 16 by 16 pixels each


class Talks(Task):
    """One question of several turns, which `turns` holds."""

    name = "talks"
    turns: tuple[Turn, ...] = ()
    spec = GenSpec(max_new_tokens=6)
    cheap_score = True

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        return [Doc(doc_id="a", turns=self.turns, reference=None), Doc(doc_id="b", turns=self.turns, reference=None)]

    def gen(self, model_type: str) -> GenSpec:
        return self.spec

    def score(self, doc: Doc, output: Output) -> Score:
        return Score(value=1.0)


def talk(*turns: Turn, **spec: Any) -> Talks:
    task = Talks()
    task.turns, task.spec = turns, dataclasses.replace(Talks.spec, **spec)
    return task


def asked(*images: Image, text: str = "", context: str = "") -> Turn:
    return Turn(context=context, question=text or f"see {IMAGE * len(images)} now", images=images)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reader(model: Path) -> ModelReader:
    return model_reader(model)


def configuration(model: Path | str = "m", *methods: str, **changes: Any) -> RunConfig:
    grid = Grid(methods=tuple(MethodChoice(name=n) for n in methods), budgets=(24,), tasks=("talks",))
    return RunConfig(grids=(grid,), **dict(model=str(model), interval=8, slots=2) | changes)


def prompt(reader: ModelReader, *turns: Turn, spec: dict[str, Any] | None = None, **changes: Any) -> Prompt:
    task = talk(*turns, **spec or {})
    maker = PromptMaker(task, reader, configuration(**changes), Spool())
    return maker.prompt(task.docs(None)[0])  # type: ignore[arg-type]


def spans(made: Images | None) -> list[int]:
    assert made is not None
    return [stop - first for first, stop in made.spans]


# --- a prompt ---------------------------------------------------------------------------------------------------------


def test_an_image_has_as_many_tokens_as_the_image_processor_makes_of_it(reader: ModelReader) -> None:
    made = prompt(reader, asked(WIDE, SQUARE, LARGE, text=f"a {IMAGE} b {IMAGE}{IMAGE} c"))
    images = made.images
    assert images is not None
    assert spans(images) == [TOKENS[i] for i in (WIDE, SQUARE, LARGE)]
    assert [i for i, token in enumerate(made.ids) if token == IMAGE_TOKEN] == [
        i for first, stop in images.spans for i in range(first, stop)
    ]
    inputs = joined(images.read())
    assert (inputs["image_grid_thw"].prod(-1) // 4).tolist() == spans(images)
    assert len(inputs["pixel_values"]) == 4 * sum(spans(images))
    once = [token for i, token in enumerate(made.ids) if not any(first < i < stop for first, stop in images.spans)]
    assert reader.tokenizer.decode(once) == made.text  # all that is new are repeated image tokens


def test_some_images_are_read_as_they_are_among_all(reader: ModelReader) -> None:
    images = prompt(reader, asked(WIDE, SQUARE, LARGE)).images
    assert images is not None
    alone = prompt(reader, asked(SQUARE)).images
    assert alone is not None
    for name, value in alone.read()[0].items():
        assert torch.equal(images.read()[1][name], value)


def test_a_prompt_is_named_by_its_text_and_the_bytes_of_all_images(reader: ModelReader, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(WIDE.data)
    same, other = Image(name="x", path=tmp_path / "x.png"), picture("wide.png", (48, 32), 9)
    key = prompt(reader, asked(WIDE)).sha256
    assert prompt(reader, asked(same)).sha256 == key
    assert prompt(reader, asked(other)).sha256 != key
    later = prompt(reader, asked(WIDE), asked(WIDE)).sha256
    assert prompt(reader, asked(WIDE), asked(other)).sha256 != later


def test_the_mark_of_an_image_is_text_where_a_turn_has_no_images(reader: ModelReader) -> None:
    made = prompt(dataclasses.replace(reader, vision=None), Turn(question=f"a {IMAGE} b"))
    assert f"a {IMAGE} b" in made.text
    assert made.images is None
    mixed = prompt(reader, Turn(question=f"a {IMAGE} b"), asked(WIDE))
    assert f"a {IMAGE} b" in mixed.text
    assert mixed.images is None


def test_pixels_are_made_on_request_and_files_must_stay_as_they_are(reader: ModelReader, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(WIDE.data)
    images = prompt(reader, asked(Image(name="x.png", path=path))).images
    assert images is not None
    first = images.read()[0]["pixel_values"]
    assert torch.equal(images.read()[0]["pixel_values"], first)
    path.write_bytes(picture(size=(48, 32), seed=9).data)
    with pytest.raises(UserError, match=r"image 'x.png' changed during the run"):
        images.read()


def test_the_context_ends_behind_its_images(reader: ModelReader) -> None:
    context = f"look {IMAGE} and {IMAGE} well "
    made = prompt(reader, asked(WIDE, LARGE, context=context, text="what?"), compress="query-agnostic")
    assert made.images is not None
    assert made.compress_at is not None
    assert reader.tokenizer.decode(made.ids[made.images.spans[1][1] : made.compress_at]).rstrip() == (
        "<|vision_end|> well"
    )
    assert reader.tokenizer.decode(made.ids[made.compress_at :]).strip().startswith("what?")
    whole = prompt(reader, asked(WIDE, context=IMAGE, text="what?"), compress="query-agnostic")
    assert reader.tokenizer.decode(whole.ids[whole.compress_at :]).startswith("what?")


# --- conversations ----------------------------------------------------------------------------------------------------


def test_later_turns_with_images_are_new_prompts_with_all_images(reader: ModelReader) -> None:
    made = prompt(reader, asked(WIDE), asked(SQUARE, LARGE), multi_turn="keep")
    assert made.talk is not None
    assert made.talk.mode == "reset (images)"
    follow = made.talk.follow(("Two.",))
    assert follow is not None
    assert follow.fresh
    assert spans(made.images) == [6]
    assert spans(follow.images) == [6, 4, 16]
    assert follow.images is not None
    assert len(joined(follow.images.read())["pixel_values"]) == 4 * 26
    assert [p["turn"] for p in made.pictures] == [1, 2, 2]
    assert made.max_tokens >= len(follow.ids) + 6


def test_a_later_turn_of_text_goes_on_from_the_cache(reader: ModelReader) -> None:
    turns = asked(WIDE), Turn(question="and then?")
    made = prompt(reader, *turns, multi_turn="keep")
    assert made.talk is not None
    assert made.talk.mode == "keep"
    kept = made.talk.follow(("Two.",))
    assert kept is not None
    assert not kept.fresh
    assert kept.images is None
    assert IMAGE_TOKEN not in kept.ids
    reset = prompt(reader, *turns, multi_turn="reset").talk
    assert reset is not None
    again = reset.follow(("Two.",))
    assert again is not None
    assert again.fresh
    assert spans(again.images) == [6]


def test_an_answer_cannot_pass_for_an_image(reader: ModelReader) -> None:
    made = prompt(reader, asked(WIDE), asked(SQUARE), multi_turn="reset")
    assert made.talk is not None
    follow = made.talk.follow(("<|image_pad|><|image_pad|>",))
    assert follow is not None
    assert spans(follow.images) == [6, 4]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (asked(WIDE, text="none"), "'a' has a turn with 1 image, but 0 places for images (U+FFFC) in its text."),
        (asked(WIDE, text=IMAGE * 2), "turn with 1 image, but 2 places for images (U+FFFC) in its text."),
        (asked(WIDE, text=f"{IMAGE} <|image_pad|>"), "holds '<|image_pad|>' 2 times, not once per image (1)."),
        (
            asked(Image(name="n.png", path=Path("/none/n.png"))),
            "image '/none/n.png' does not exist.",
        ),
        (asked(Image(name="n.png", data=WIDE.data[:99])), "image 'n.png' is broken"),
        (asked(picture("thin.png", (4000, 2))), "image 'thin.png' of 4000x2 pixels does not suit the model: absolute"),
    ],
)
def test_wrong_images_get_a_line(reader: ModelReader, turn: Turn, message: str) -> None:
    with pytest.raises(UserError) as caught:
        prompt(reader, turn)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("multi_turn", ["keep", "reset"])
def test_the_image_token_in_a_later_turn_s_text_is_refused_in_the_plan(reader: ModelReader, multi_turn: str) -> None:
    with pytest.raises(UserError, match=r"'a': the prompt made by .* holds '<.image_pad.>' 2 times, not once per"):
        prompt(reader, asked(WIDE), Turn(question="what is <|image_pad|>?"), multi_turn=multi_turn)


def test_prompts_with_images_are_not_cut(reader: ModelReader) -> None:
    spec = {"truncate": "middle"}
    assert prompt(reader, asked(LARGE), spec=spec).cut == 0
    with pytest.raises(UserError, match=r"a prompt with images has \d+ tokens; the limit is 20 "):
        prompt(reader, asked(LARGE), spec=spec, max_prompt_tokens=20)


def test_an_image_behind_the_context_is_read_with_the_context_only(reader: ModelReader) -> None:
    with pytest.raises(UserError, match=r"question 'a' of task '.*' has an image after its context"):
        prompt(reader, asked(WIDE, context="some text. ", text=f"what is {IMAGE}?"), compress="query-agnostic")


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{% for m in messages %}{{ m.role }}{% endfor %}"])
def test_a_template_that_ignores_images_is_refused(reader: ModelReader, template: str) -> None:
    with pytest.raises(UserError, match=r"chat template t.jinja holds '<.image_pad.>' 0 times, not once per image"):
        prompt(dataclasses.replace(reader, template=template, origin="t.jinja"), asked(WIDE))


def load(model: Path, **config: Any) -> Any:
    settings = transformers.AutoConfig.from_pretrained(model)
    for name, value in config.items():
        setattr(settings, name, value)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return image_processor.load("m", str(model), None, settings, tokenizer)


def test_models_that_cannot_see_are_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"model 'm' \(model type 'qwen3'\) reads text only"):
        load(model_folder(tmp_path / "text"))
    bare = repository(tmp_path / "bare")
    (bare / "preprocessor_config.json").unlink()
    with pytest.raises(SetupError, match=r"model 'm' has no preprocessor_config.json"):
        load(bare)
    settings = {"image_processor_type": "CLIPImageProcessor"}
    (bare / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"its processor 'Qwen3VLProcessor' cuts no grid of patches"):
        load(bare)
    (bare / "preprocessor_config.json").write_text("{")
    with pytest.raises(SetupError, match="m"):
        load(bare)
    monkeypatch.setattr(image_processor.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"kvbench\[vision\]"):
        load(model)


def test_the_processor_s_template_is_used_where_it_is_not_the_tokenizer_s(model: Path, tmp_path: Path) -> None:
    assert load(model).template is None
    folder = repository(tmp_path / "m")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "X"}))
    assert load(folder).template == "X"


@pytest.mark.parametrize("own", [None, "{{ raise_exception('no lists') }}"])
def test_a_run_checks_the_template_that_it_uses(run: Any, tmp_path: Path, own: str | None) -> None:
    """The tokenizer has no template, or one that fails, and the processor has another."""
    folder = repository(tmp_path / "m")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | ({"chat_template": own} if own else {})))
    with pytest.raises(UserError, match=r"chat template of the tokenizer fails|has no chat template, which"):
        run("full", turns=(asked(WIDE),), model=folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert set(run("full", turns=(asked(WIDE),), model=folder).status) == {"ok"}
    with pytest.raises(UserError, match="chat template"):  # a prompt of text has the tokenizer's template
        run("full", turns=(Turn(question="so?"),), model=folder, run_name="text")


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a conversation with methods and returns the rows and texts by method."""

    def go(*methods: str, turns: tuple[Turn, ...], run_name: str = "r", **changes: Any) -> pd.DataFrame:
        monkeypatch.setattr(workload, "load_task", lambda name, file: talk(*turns))
        config = configuration(changes.pop("model", model), *methods, **changes)
        result = execute(config, out=tmp_path, run_name=run_name, notice=lambda text: None)
        assert result.run_dir is not None
        rows = read_rows(result.run_dir).merge(read_texts(result.run_dir), on="row_key")
        return rows[rows.doc_id == "a"].set_index("method")

    return go


@pytest.mark.parametrize("family", FAMILIES)
def test_the_full_cache_answers_as_transformers_does(run: Any, family: str, tmp_path: Path) -> None:
    turn, model = asked(WIDE, LARGE), repository(tmp_path / "model", family)
    rows = run("full", "gkv", "h2o", turns=(turn,), model=model)
    assert set(rows.status) == {"ok"}
    reader = model_reader(model)
    made = prompt(reader, turn)
    assert made.images is not None
    whole = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.tensor([tuple(made.ids)])
    options: dict[str, Any] = dict(max_new_tokens=6, do_sample=False)
    if family not in SQUARES:
        options["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int()
    out = whole.generate(ids, attention_mask=torch.ones_like(ids), **joined(made.images.read()), **options)
    expected = reader.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert rows.output["full"] == expected
    assert set(rows.images) == {2}
    assert set(rows.image_tokens) == {sum(spans(made.images))}
    shown = json.loads(rows.image_list["gkv"])
    assert reader.vision is not None
    at = [place.start() for place in re.finditer(re.escape(reader.vision.text), rows.prompt["gkv"])]
    large = dict(name="l.png", width=64, height=64, tokens=spans(made.images)[1], turn=1)
    assert shown[1] == large | {"at": at[1]}
    assert [image["at"] for image in shown] == at
    assert (rows.entries_after_evict[["gkv", "h2o"]] == 24).all()
    assert rows.kept_images["full"] == rows.kept_text["full"] == 1
    assert (rows.kept_images[["gkv", "h2o"]] < 1).all()


@pytest.mark.parametrize("family", SQUARES)
def test_a_prompt_is_what_the_family_s_processor_makes_of_its_text_and_images(family: str, tmp_path: Path) -> None:
    folder = repository(tmp_path / "model", family)
    reader, pictures = model_reader(folder), (WIDE, SQUARE, picture("tall.png", (30, 100)), LARGE)
    made = prompt(reader, asked(*pictures, text=f"a {IMAGE} b {IMAGE} c {IMAGE}{IMAGE} d"))
    assert made.images is not None
    assert reader.vision is not None
    settings = json.loads((folder / "processor_config.json").read_text())
    processor = image_processor.without_videos(settings["processor_class"]).from_args_and_dict(
        (), settings, image_processor=reader.vision.processor, tokenizer=reader.tokenizer, video_processor=None
    )
    files = [image_files.read(image).image for image in pictures]
    official = processor(text=made.text, images=files, add_special_tokens=False, return_tensors="pt")
    assert official["input_ids"][0].tolist() == list(made.ids)
    assert torch.equal(joined(made.images.read())["pixel_values"], official["pixel_values"])


def test_a_question_without_images_reaches_a_template_that_takes_lists_only(tmp_path: Path) -> None:
    reader = model_reader(repository(tmp_path / "model", "llava"))
    made = prompt(reader, Turn(question="so?", system="Be brief."), Turn(question="and then?"))
    system, asked = "<|im_start|>system\nBe brief.<|im_end|>\n", "<|im_start|>user\nso?<|im_end|>\n"
    assert made.text == f"{system}{asked}<|im_start|>assistant\n"
    assert made.talk is not None
    assert reader.tokenizer.decode(made.talk.follow(("Two.",)).ids).endswith(  # type: ignore[union-attr]
        "<|im_start|>user\nand then?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llava", {"processor_class": "PixtralProcessor"}, "its processor 'PixtralProcessor' cuts no grid of patches"),
        ("llava", {"patch_size": None}, "its processor files lack a setting"),
        ("internvl", {"image_seq_length": None}, "its processor files lack a setting"),
        ("llava_onevision", {"num_image_tokens": None}, "its processor files lack a setting"),
    ],
)
def test_processors_that_kvbench_does_not_know_get_a_line(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = repository(tmp_path / "model", family)
    settings = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises((UserError, SetupError), match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("multi_turn", ["keep", "reset"])
def test_conversations_with_images_run(run: Any, multi_turn: str) -> None:
    later = run("full", "h2o", turns=(asked(WIDE), asked(SQUARE), Turn(question="so?")), multi_turn=multi_turn)
    assert set(later.status) == {"ok"}
    assert set(later.multi_turn_cache) == {"reset (images)" if multi_turn == "keep" else "reset"}
    assert all(len(json.loads(turns)) == 3 for turns in later.turns)


def test_a_conversation_goes_on_from_a_cache_with_images(run: Any) -> None:
    rows = run("full", "h2o", turns=(asked(WIDE), Turn(question="so?")), multi_turn="keep")
    assert set(rows.status) == {"ok"}
    assert set(rows.multi_turn_cache) == {"keep"}


def no_weights(*_: Any, **__: Any) -> Any:
    raise AssertionError("weights are loaded")


def test_a_plan_counts_image_tokens_and_reads_no_weights(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(workload, "load_task", lambda name, file: talk(asked(WIDE, LARGE)))
    monkeypatch.setattr("kvbench.runner.run_plan.load", no_weights)
    planned = execute(configuration(model, "full"), out=tmp_path, dry_run=True, notice=lambda text: None)
    (cell,) = planned.plans
    assert {len(row.prompt.ids) for row in cell.rows} == {cell.max_tokens - 6}
    assert cell.rows[0].prompt.ids.count(IMAGE_TOKEN) == 22
    monkeypatch.setattr(workload, "load_task", lambda name, file: talk(Turn(question="so?")))
    text = execute(configuration(model, "full"), out=tmp_path, dry_run=True, notice=lambda text: None)
    monkeypatch.setattr(workload, "load_task", lambda name, file: talk(asked(*[picture("x.png", (128, 128))] * 9)))
    large = execute(configuration(model, "full"), out=tmp_path, dry_run=True, notice=lambda text: None)
    patches = 9 * 16 * 16
    assert large.plans[0].plan.peak_bytes - text.plans[0].plan.peak_bytes > patches * 4 * (8 * 8 * 3 * 2 + 6 * 64)


def test_a_changed_image_is_another_prompt_for_a_resumed_run(model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "x.png"
    turn = asked(Image(name="x.png", path=path))
    monkeypatch.setattr(workload, "load_task", lambda name, file: talk(turn))

    def again(seed: int) -> Any:
        path.write_bytes(picture(size=(48, 32), seed=seed).data)
        return execute(configuration(model, "full"), out=tmp_path, run_name="r", notice=lambda text: None)

    assert again(1).done == 2
    assert again(1).repeated
    with pytest.raises(UserError, match="'talks'"):
        again(2)


def test_plans_hold_no_pixels(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = image_files.read
    monkeypatch.setattr(image_files, "read", lambda image: read.append(image.name) or real(image))
    run("full", turns=(asked(WIDE, LARGE),))
    # once per file for the plan, once for the memory of the largest prompt, then once per prompt
    assert read == ["wide.png", "l.png", *["wide.png", "l.png"] * 3]


def test_methods_that_cannot_have_images_are_refused_before_weights(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbench.runner.run_plan.load", no_weights)
    with pytest.raises(UserError, match=r"'expected-attention' rotates keys or queries \(RoPE\)"):
        run("full", "expected-attention", turns=(asked(WIDE),))


def test_without_a_chat_template_images_have_no_place(run: Any) -> None:
    message = r"^task 'talks' has images, which only a chat template can place .* Leave out --no-chat-template\.$"
    with pytest.raises(UserError, match=message):
        run("full", turns=(asked(WIDE),), no_chat_template=True)
    assert prompts.chat_cure(False, no_chat_template=False) == "Set chat=True in the GenSpec of the task."
    assert prompts.chat_cure(True, no_chat_template=False) == "Give another --prompt-style."
