"""Numbers on grids: pictures with fixed bytes, questions that only the pictures answer, and scores."""

from __future__ import annotations

import hashlib
import io
import random
from collections import Counter, defaultdict

import numpy as np
import PIL.Image
import pytest
from kvbench.tasks.vneedle import VARIANTS

from kvbench.sources import image_files
from kvbench.sources.data import Data
from kvbench.task import IMAGE, Output
from kvbench.taskkit.grid_image import CELL, DIGITS, SCALE, draw, grid_png
from kvbench.taskkit.names import get_task

NAMES = ["vneedle", *(f"vneedle/{name}" for name in list(VARIANTS)[1:])]
GRID = [[10, 23], [45, 67], [89, 98]]


def docs(name: str = "vneedle", limit: int = 3):
    return get_task(name).docs(Data(env={}), limit=limit)


def output(*turns: str, thinking: bool | None = False) -> Output:
    return Output(text=turns[-1], turns=turns, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=thinking)


def pixels(file: bytes):
    return np.asarray(PIL.Image.open(io.BytesIO(file)).convert("RGB"))


def test_a_library_reads_the_picture_as_drawn():
    seen = pixels(grid_png(GRID))
    assert seen.shape == (3 * CELL, 2 * CELL, 3)
    assert (seen == np.where(draw(GRID), 0, 255)[..., None]).all()


def test_the_bytes_are_fixed():
    """They are part of the prompt: if they change, the task's version must rise."""
    assert hashlib.sha256(grid_png(GRID)).hexdigest()[:16] == "fd6be15f0bf9b230"
    image = docs()[0].turns[0].images[0]
    assert hashlib.sha256(image_files.encoded(image)).hexdigest()[:16] == "8592d8857ba7ecb6"


def test_a_picture_larger_than_a_stored_block():
    grid = [[10 + (r * 9 + c) % 90 for c in range(9)] for r in range(90)]
    assert (pixels(grid_png(grid)) == np.where(draw(grid), 0, 255)[..., None]).all()


def test_digits_differ_and_have_one_size():
    assert len(set(DIGITS)) == 10
    assert {len(row) for digit in DIGITS for row in digit} == {5}
    assert {len(digit) for digit in DIGITS} == {7}


def read_number(cell) -> int:
    """Read a cell's number from its pixels, by comparison with the bitmaps."""
    black = cell[:, :, 0] == 0
    top, left = (CELL - 7 * SCALE) // 2, (CELL - 11 * SCALE) // 2
    dots = black[top : top + 7 * SCALE : SCALE, left : left + 11 * SCALE : SCALE]
    rows = ["".join("#" if dot else "." for dot in row) for row in dots]
    tens, units = (DIGITS.index(tuple(row[start : start + 5] for row in rows)) for start in (0, 6))
    return 10 * tens + units


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_of_the_pictures_knows_every_answer(name: str):
    for doc in docs(name):
        seen: list = []
        for turn, reference in zip(doc.turns, doc.reference, strict=True):
            assert turn.user.count(IMAGE) == len(turn.images)
            seen += [pixels(image_files.encoded(image)) for image in turn.images]
            image, row, column = (int(word.strip(",?")) - 1 for word in turn.question.split() if word[0].isdigit())
            place = seen[image][row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
            assert str(read_number(place)) == reference


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_of_the_text_is_at_chance(name: str):
    """The best guess from the text, learned on other questions, is right about once in 90 times."""
    known: dict[str, Counter[str]] = defaultdict(Counter)
    every: list = [(turn.user, right) for doc in docs(name, 300) for turn, right in zip(doc.turns, doc.reference)]
    for text, right in every[: len(every) // 2]:
        known[text][right] += 1
    tested = every[len(every) // 2 :]
    hits = [known[text].most_common(1)[0][0] == right for text, right in tested if known[text]]
    assert len(hits) > len(tested) // 2  # most texts occur again
    assert np.mean(hits) < 3 / 90


@pytest.mark.parametrize("name", NAMES)
def test_questions_are_fixed_and_differ(name: str):
    assert docs(name, 5) == docs(name, 8)[:5]
    assert len({(doc.turns[0].images[0].data, doc.doc_id) for doc in docs(name, 8)}) == 8
    knobs = VARIANTS[get_task(name).variant]
    for doc in docs(name):
        assert len(doc.turns) == knobs.turns
        assert [len(turn.images) for turn in doc.turns] == (
            [1] * knobs.turns if knobs.spread else [knobs.images] + [0] * (knobs.turns - 1)
        )


def test_number_of_questions():
    task = get_task("vneedle/grid-3")
    assert len(task.docs(Data(env={}))) == 128
    assert task.size() == 128
    spec = task.gen("qwen3_vl")
    assert (spec.n, spec.temperature, spec.thinking, spec.chat) == (1, 0.0, False, True)


def test_scores():
    task, doc = get_task("vneedle"), docs()[0]
    right = doc.reference
    score = task.score(doc, output(*right))
    assert (score.value, score.strict, score.partial, score.extracted) == (1.0, 1.0, 1.0, ", ".join(right))
    wordy = [f"In row 2, column 3 of image 1 stands **{number}**, in row 4." for number in right]
    score = task.score(doc, output(*wordy))
    assert (score.value, score.strict, score.partial) == (1.0, 0.0, 1.0)
    wrong = str(10 + (int(right[1]) - 9) % 90)
    score = task.score(doc, output(right[0], wrong, "100 or 7 or 12345", ""))
    assert (score.value, score.strict, score.partial) == (0.0, 0.0, 0.25)
    assert score.extracted == f"{right[0]}, {wrong}, -, -"
    assert score.aux == {"no_answer": 0.5, "right_1": 1.0, "right_2": 0.0, "right_3": 0.0, "right_4": 0.0}
    score = task.score(doc, output(*(f"<think>{wrong}</think>{number}" for number in right), thinking=True))
    assert score.strict == 1.0
    missing = task.score(doc, output(right[0]))
    assert (missing.value, missing.note) == (None, "the model gave 1 of 4 answers")


def test_guessing_is_at_chance():
    task, guess = get_task("vneedle"), random.Random(0)
    scores = [task.score(doc, output(*(str(guess.randrange(10, 100)) for _ in doc.turns))) for doc in docs(limit=400)]
    assert np.mean([score.partial for score in scores]) < 3 / 90
