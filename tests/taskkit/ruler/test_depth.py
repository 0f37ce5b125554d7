from __future__ import annotations

import pytest
from support.ruler import MadeUp, count, room

from kvbench.errors import UserError
from kvbench.taskkit.ruler import needles
from kvbench.taskkit.ruler.depth import DEPTHS, Grid, boundary
from kvbench.taskkit.ruler.needles import SANDWICH


@pytest.mark.parametrize(
    ("depth", "place"), [(0, 0), (10, 0), (12, 0), (13, 1), (25, 1), (50, 2), (62, 2), (63, 3), (88, 4), (100, 4)]
)
def test_boundary(depth: int, place: int):
    assert boundary(["abcd"] * 4, depth) == place


def test_boundary_of_uneven_sentences():
    assert boundary(["a" * 99, "b", "c"], 40) == 0
    assert boundary(["a" * 99, "b", "c"], 60) == 1


@pytest.mark.parametrize("essays", [False, True])
@pytest.mark.parametrize("sandwich", [False, True])
def test_a_grid(essays: bool, sandwich: bool):
    material = MadeUp()
    needle = needles.sandwich if sandwich else needles.number
    grid = Grid(room=room("vt", 1024, new_tokens=64, wrapping=9), material=material, essays=essays, needle=needle)
    keys = set()
    for number in range(3):
        hays = set()
        for depth in DEPTHS:
            row = grid.row(depth, number)
            prompt = row.prompt
            assert row.tokens == count(prompt.text) + 64 + 9 <= 1024
            hidden = SANDWICH if sandwich else f"The special magic number is: {prompt.outputs[0]}."
            keys.add(prompt.outputs[0])
            body = prompt.context.rstrip("\n").rpartition("quiz you about the number afterwards.\n")[2]
            before, after = body.split(hidden)
            assert before == "" or before.endswith(". ")
            assert after == "" or after.startswith(" ")
            assert abs(len(before) / len(before + after) - depth / 100) < 0.03
            assert row.needle_at == count(prompt.user[: prompt.user.index(prompt.outputs[0])])
            hays.add((before + after.removeprefix(" ") if before else after.removeprefix(" "))[:500].strip())
        assert len(hays) == 1  # one stretch of hay for all depths
        assert grid.row(0, number).prompt.cluster == grid.row(100, number).prompt.cluster
    assert len(keys) == (1 if sandwich else 3 * len(DEPTHS))
    assert len({grid.row(50, number).prompt.cluster for number in range(3)}) == 3


def test_facts_about_other_persons_are_hidden_at_equal_distances():
    grid = Grid(room=room("vt", 1024), material=MadeUp(), essays=False, needle=needles.paraphrase)
    for depth in DEPTHS:
        prompt = grid.row(depth, 0).prompt
        needle = needles.paraphrase(f"niah-1024-{depth}-0")
        assert (prompt.outputs, prompt.question) == (needle.outputs, needle.question)
        body = prompt.context.rpartition("one of these people afterwards.\n")[2]
        places = [100 * body.index(sentence) / len(body) for sentence in (needle.sentence, *needle.others)]
        expected = [depth, *((depth + 25 * n) % 100 for n in (1, 2, 3))]
        assert places == pytest.approx(expected, abs=6)


def test_rows_do_not_depend_on_others():
    def grid() -> Grid:
        return Grid(room=room("vt", 2048), material=MadeUp(), essays=True, needle=needles.number)

    whole = grid()
    rows = [whole.row(depth, number) for number in range(2) for depth in DEPTHS]
    assert grid().row(30, 1) == rows[len(DEPTHS) + 3]


def test_too_short():
    with pytest.raises(UserError, match="does not fit into 100 tokens"):
        Grid(room=room("vt", 100, new_tokens=64), material=MadeUp(), essays=False, needle=needles.number).row(0, 0)
