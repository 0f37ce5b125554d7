"""Retrieval problems in which it is known where the answer stands: data of `headkv`'s table and of `duo`'s training.

`tiny_examples` are problems of the task `lookup`, the language of the built-in model; `text_examples` and
`passkey_examples` are plain English for every other model: one-line notes with codes among unrelated sentences, and at
the end a code, or all of them, to recall. `examples` takes what suits a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench import tiny
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import SetupError
from kvbench.taskkit.synthetic.cells import CELLS
from kvbench.taskkit.synthetic.draw import Draw
from kvbench.taskkit.synthetic.problem import FACT, HELD_OUT, Problem
from kvbench.taskkit.synthetic.vocabulary import ids

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
PASSKEYS, SHORTEST = 10, 1000


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its right answer. Row i of the answer is written by the query at position `rows[i]`, which knows
    it from the tokens at the positions `evidence[i]`.
    """

    ids: tuple[int, ...]
    rows: tuple[int, ...]
    evidence: tuple[tuple[int, ...], ...]


def is_tiny(loaded: LoadedModel) -> bool:
    """Whether this is the built-in model, not a copy of it."""
    return Path(loaded.model.config._name_or_path).resolve() == tiny.path().resolve()


def examples(loaded: LoadedModel, count: int, seed: int, longest: int) -> list[Example]:
    """Problems of lookup-8 for the built-in model, for others `passkey_examples`. Raises SetupError."""
    if is_tiny(loaded):
        return tiny_examples(count, seed)
    return passkey_examples(encoder(loaded), count, seed, first_ids(loaded), min(loaded.context, longest))


def source(loaded: LoadedModel) -> str:
    """What the examples for a model are, in words for a card."""
    return "problems of lookup-8" if is_tiny(loaded) else "codes among unrelated sentences, English"


def encoder(loaded: LoadedModel) -> Encode:
    return lambda text: list(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])


def first_ids(loaded: LoadedModel) -> list[int]:
    start = loaded.tokenizer.bos_token_id
    return [] if start is None else [start]


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
    """Texts of 120 sentences and six codes, one of which is asked for.

    first: tokens before every prompt; longest: tokens that the model can read. Raises SetupError.
    """
    draws = [Draw("head tables", seed, number) for number in range(count)]
    return _read(longest, [_of_notes(encode, draw, first, longest, NOTES, 1, SENTENCES) for draw in draws])


def passkey_examples(encode: Encode, count: int, seed: int, first: Sequence[int], longest: int) -> list[Example]:
    """Texts of 1,000 to `longest` tokens with ten codes, all of which are asked for. Raises SetupError."""
    made = []
    for number in range(count):
        draw = Draw("passkeys", seed, number)
        length = draw.between(min(SHORTEST, longest), longest)
        made.append(_of_notes(encode, draw, first, length, PASSKEYS, PASSKEYS, length))
    return _read(longest, made)


def _read(longest: int, made: list[Example]) -> list[Example]:
    if any(len(example.ids) > longest for example in made):
        raise SetupError(f"the model reads {longest} tokens, too few for the texts that heads are told apart by.")
    return made


def _of_notes(
    encode: Encode, draw: Draw, first: Sequence[int], longest: int, notes: int, asked: int, sentences: int
) -> Example:
    """A text with so many notes, of which `asked` are asked for, and at most so many sentences between them."""
    places = draw.sample(PLACES, notes)
    codes = [f"{draw.between(10000, 99999)}" for _ in places]
    wanted = draw.sample(range(notes), asked)
    head = [*first, *encode("Remember the codes in these notes.\n")]
    said = [(encode(f" The code of {p} is"), encode(f" {code}"), encode(".")) for p, code in zip(places, codes)]
    what = f"is the code of {places[wanted[0]]}" if asked == 1 else "are the codes"
    question = encode(f"\nQuestion: What {what}?\nAnswer:")

    taken = [part for note in (*range(notes), *wanted) for part in said[note]]
    filler = list(_filler(encode, draw, longest - len(head) - len(question) - sum(map(len, taken)), sentences))
    tokens, spans = head, dict[int, range]()
    gaps = sorted(draw.below(len(filler) + 1) for _ in range(notes))
    for index, sentence in enumerate([*filler, []]):
        for note in (i for i, gap in enumerate(gaps) if gap == index):
            words, code, stop = said[note]
            spans[note] = range(len(tokens) + len(words), len(tokens) + len(words) + len(code))
            tokens = [*tokens, *words, *code, *stop]
        tokens = [*tokens, *sentence]
    tokens = [*tokens, *question]
    rows: list[int] = []
    evidence: list[tuple[int, ...]] = []
    for note in wanted:
        words, code, stop = said[note]
        begin = len(tokens) + len(words) - 1
        rows += range(begin, begin + len(code))
        evidence += [tuple(spans[note])] * len(code)
        tokens = [*tokens, *words, *code, *stop]
    return Example(tuple(tokens[: rows[-1] + 2]), tuple(rows), tuple(evidence))


def _filler(encode: Encode, draw: Draw, room: int, sentences: int) -> Iterator[list[int]]:
    """Sentences until there are enough or the room is used."""
    for _ in range(sentences):
        sentence = encode(f" {draw.pick(SUBJECTS)} {draw.pick(ACTIONS)} {draw.pick(ENDINGS)}")
        if (room := room - len(sentence)) < 0:
            return
        yield sentence
