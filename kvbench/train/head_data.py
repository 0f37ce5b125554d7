"""Retrieval problems in which it is known where the answer stands: the data that head tables are estimated on.

`tiny_examples` are problems of the task `lookup`, the language of the built-in model; `text_examples` are plain English
for every other model: one-line notes with codes among unrelated sentences, and at the end a code to recall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvbench.errors import SetupError
from kvbench.synthetic.cells import CELLS
from kvbench.synthetic.draw import Draw
from kvbench.synthetic.problem import FACT, HELD_OUT, Problem
from kvbench.synthetic.vocabulary import ids

Encode = Callable[[str], list[int]]  # without special tokens

PLACES = (
    *("the north harbour", "the old mill", "the city archive", "the glass house", "the upper station"),
    *("the river museum", "the east tower", "the print works", "the night market", "the coast guard"),
    *("the botanical library", "the lower bridge"),
)
SUBJECTS = ("The ferry", "A late train", "The gardener", "Her neighbour", "The small orchestra", "A visitor")
ACTIONS = ("crossed the square", "waited for the rain to end", "mended the wooden gate", "counted the lamps again")
ENDINGS = ("before noon.", "without a word.", "as on every other day.", "while the bells rang.", "and went home early.")
NOTES, SENTENCES = 6, 120


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its right answer. Row i of the answer is written by the query at position `rows[i]`, which knows
    it from the tokens at the positions `evidence[i]`.
    """

    ids: tuple[int, ...]
    rows: tuple[int, ...]
    evidence: tuple[tuple[int, ...], ...]


def tiny_examples(count: int, seed: int) -> list[Example]:
    """Problems of the cell lookup-8 that no evaluation uses."""
    draw = Draw("head tables", seed)
    return [_of_lookup(CELLS["lookup-8"].generate(draw.below(HELD_OUT))) for _ in range(count)]


def _of_lookup(problem: Problem) -> Example:
    """The answer names a key and its value, so the row of the key writes the tens and that of the tens the units."""
    prompt, trace = problem.prompt_pieces, problem.trace_pieces
    stops = prompt.index("Ask")
    rows, evidence, name = [], [], ""
    for index, (piece, kind) in enumerate(zip(trace, problem.trace_kinds)):
        if kind == FACT:
            at = prompt.index(name, 0, stops)
            rows.append(len(prompt) + index - 1)
            evidence.append((at, at + 1, at + 2))
        else:
            name = piece if piece.startswith(" ") else name
    return Example(tuple(ids([*prompt, *trace])), tuple(rows), tuple(evidence))


def text_examples(encode: Encode, count: int, seed: int, first: Sequence[int], longest: int) -> list[Example]:
    """first: tokens before every prompt; longest: tokens that the model can read. Raises SetupError."""
    made = [_of_notes(encode, Draw("head tables", seed, number), first, longest) for number in range(count)]
    if any(len(example.ids) > longest for example in made):
        raise SetupError(f"the model reads {longest} tokens, too few for the texts that head tables are made from.")
    return made


def _of_notes(encode: Encode, draw: Draw, first: Sequence[int], longest: int) -> Example:
    places = draw.sample(PLACES, NOTES)
    codes = [f"{draw.between(10000, 99999)}" for _ in places]
    asked = draw.below(NOTES)
    head = [*first, *encode("Remember the codes in these notes.\n")]
    notes = [(encode(f" The code of {p} is"), encode(f" {code}"), encode(".")) for p, code in zip(places, codes)]
    question = encode(f"\nQuestion: What is the code of {places[asked]}?\nAnswer: The code of {places[asked]} is")
    answer = encode(f" {codes[asked]}")

    room = longest - len(head) - len(question) - len(answer) - sum(len(part) for note in notes for part in note)
    filler = list(_filler(encode, draw, room))
    tokens, span = head, range(0)
    gaps = sorted(draw.below(len(filler) + 1) for _ in notes)
    for index, sentence in enumerate([*filler, []]):
        for note in (i for i, gap in enumerate(gaps) if gap == index):
            words, code, stop = notes[note]
            if note == asked:
                span = range(len(tokens) + len(words), len(tokens) + len(words) + len(code))
            tokens = [*tokens, *words, *code, *stop]
        tokens = [*tokens, *sentence]
    begin = len(tokens) + len(question)
    rows = tuple(range(begin - 1, begin - 1 + len(answer)))
    return Example((*tokens, *question, *answer), rows, tuple(tuple(span) for _ in rows))


def _filler(encode: Encode, draw: Draw, room: int) -> Iterator[list[int]]:
    """Sentences until there are enough or the room is used."""
    for _ in range(SENTENCES):
        sentence = encode(f" {draw.pick(SUBJECTS)} {draw.pick(ACTIONS)} {draw.pick(ENDINGS)}")
        if (room := room - len(sentence)) < 0:
            return
        yield sentence
