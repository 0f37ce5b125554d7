"""Examples for learned methods: texts that contain the answer to their question at a known place.

`duo` is trained on such texts. The weights of `headkv` and `triattention`, numbers per query head, are estimated while
a model reads such texts.

The built-in model gets problems of the task `lookup`; for `triattention`, it gets problems of `lookup`, `chain` and
`walk` (`kvbench.train.recipes.mean_queries`). Other models get English texts: notes with codes among unrelated
sentences. Their last sentence asks for one code (`text_examples`) or for all codes (`passkey_examples`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbench import tiny
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import SetupError
from kvbench.taskkit.synthetic.draw import Draw
from kvbench.taskkit.synthetic.problem import FACT, HELD_OUT, Problem
from kvbench.taskkit.synthetic.variants import VARIANTS
from kvbench.taskkit.synthetic.vocabulary import ids

Encode = Callable[[str], list[int]]  # turns text into token ids, without special tokens

PLACES = (
    *("the north harbour", "the old mill", "the city archive", "the glass house", "the upper station"),
    *("the river museum", "the east tower", "the print works", "the night market", "the coast guard"),
    *("the botanical library", "the lower bridge"),
)
SUBJECTS = ("The ferry", "A late train", "The gardener", "Her neighbour", "The small orchestra", "A visitor")
ACTIONS = ("crossed the square", "waited for the rain to end", "mended the wooden gate", "counted the lamps again")
ENDINGS = ("before noon.", "without a word.", "as on every other day.", "while the bells rang.", "and went home early.")
NOTES, SENTENCES = 6, 120
LONGEST = 4096  # most tokens of a text of `text_examples`, even if the model's context is longer
PASSKEYS, SHORTEST = 10, 1000


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt followed by its right answer (`ids`), and the places in the prompt from which the answer can be copied.

    The query at position `rows[i]` predicts a token of the answer. The model can copy this token from the tokens at the
    positions `evidence[i]`.
    """

    ids: tuple[int, ...]
    rows: tuple[int, ...]
    evidence: tuple[tuple[int, ...], ...]


def is_tiny(loaded: LoadedModel) -> bool:
    """Return whether the model was loaded from the folder of the built-in model, not from a copy of it."""
    return Path(loaded.model.config._name_or_path).resolve() == tiny.path().resolve()


def examples(loaded: LoadedModel, count: int, seed: int, longest: int) -> list[Example]:
    """Return `count` examples: problems of lookup-8 for the built-in model, `passkey_examples` for other models.

    longest: the most tokens of a text; ignored for the built-in model. For other models, raises SetupError when
    `longest` or the model's context is too short for a text.
    """
    if is_tiny(loaded):
        return tiny_examples(count, seed)
    return passkey_examples(loaded, count, seed, longest)


def source(loaded: LoadedModel) -> str:
    """Return a description, for a card, of the examples that this model gets."""
    return "problems of lookup-8" if is_tiny(loaded) else "codes among unrelated sentences, English"


def tiny_examples(count: int, seed: int) -> list[Example]:
    """Return `count` examples for the built-in model: problems of lookup-8 with seeds that no evaluation uses."""
    draw = Draw("head tables", seed)
    return [_of_lookup(VARIANTS["lookup-8"].generate(draw.below(HELD_OUT))) for _ in range(count)]


def _of_lookup(problem: Problem) -> Example:
    """Return a problem of the task `lookup` as an example.

    The answer lists the asked keys, each with its value of two digits. The query at a key predicts the tens digit, and
    the query at the tens digit predicts the units digit. The model can copy both from the fact in the prompt that gives
    the key's value.
    """
    prompt, solution = problem.prompt_pieces, problem.solution_pieces
    stops = prompt.index("Ask")
    rows, evidence, name = [], [], ""
    for index, (piece, kind) in enumerate(zip(solution, problem.solution_kinds)):
        if kind == FACT:
            at = prompt.index(name, 0, stops)
            rows.append(len(prompt) + index - 1)
            evidence.append((at, at + 1, at + 2))
        else:
            name = piece if piece.startswith(" ") else name
    return Example(tuple(ids([*prompt, *solution])), tuple(rows), tuple(evidence))


def text_examples(loaded: LoadedModel, count: int, seed: int) -> list[Example]:
    """Return `count` English texts with six codes each; the question at the end asks for one code.

    A text has at most 120 sentences without codes, and at most `LONGEST` tokens. Raises SetupError when the model's
    context is too short.
    """
    longest = min(loaded.context, LONGEST)
    draws = [Draw("head tables", seed, number) for number in range(count)]
    return [_of_notes(loaded, draw, longest, notes=NOTES, asked=1, sentences=SENTENCES) for draw in draws]


def passkey_examples(loaded: LoadedModel, count: int, seed: int, longest: int) -> list[Example]:
    """Return `count` English texts with ten codes each; the question at the end asks for all codes.

    A text has about 1,000 to `longest` tokens, but at most as many as the model's context. Raises SetupError when
    `longest` or the context is too short for a text.
    """
    longest = min(loaded.context, longest)
    draws = [Draw("passkeys", seed, number) for number in range(count)]
    sized = [(draw, draw.between(min(SHORTEST, longest), longest)) for draw in draws]
    return [_of_notes(loaded, d, n, notes=PASSKEYS, asked=PASSKEYS, sentences=n) for d, n in sized]


def _of_notes(loaded: LoadedModel, draw: Draw, longest: int, *, notes: int, asked: int, sentences: int) -> Example:
    """Return one English text with `notes` codes among at most `sentences` other sentences. The question at its end
    asks for `asked` of the codes; the text and the answer have at most `longest` tokens."""

    def encode(text: str) -> list[int]:
        return list(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])

    places = draw.sample(PLACES, notes)
    codes = [f"{draw.between(10000, 99999)}" for _ in places]
    wanted = draw.sample(range(notes), asked)
    start = loaded.tokenizer.bos_token_id
    first = [] if start is None else [start]
    head = [*first, *encode("Remember the codes in these notes.\n")]
    facts = [(encode(f" The code of {p} is"), encode(f" {code}"), encode(".")) for p, code in zip(places, codes)]
    what = f"is the code of {places[wanted[0]]}" if asked == 1 else "are the codes"
    question = encode(f"\nQuestion: What {what}?\nAnswer:")

    taken = [part for note in (*range(notes), *wanted) for part in facts[note]]
    filler = list(_filler(encode, draw, longest - len(head) - len(question) - sum(map(len, taken)), sentences))
    tokens, spans = head, dict[int, range]()
    gaps = sorted(draw.below(len(filler) + 1) for _ in range(notes))
    for index, sentence in enumerate([*filler, []]):
        for note in (i for i, gap in enumerate(gaps) if gap == index):
            words, code, stop = facts[note]
            spans[note] = range(len(tokens) + len(words), len(tokens) + len(words) + len(code))
            tokens = [*tokens, *words, *code, *stop]
        tokens = [*tokens, *sentence]
    tokens = [*tokens, *question]
    rows: list[int] = []
    evidence: list[tuple[int, ...]] = []
    for note in wanted:
        words, code, stop = facts[note]
        begin = len(tokens) + len(words) - 1
        rows += range(begin, begin + len(code))
        evidence += [tuple(spans[note])] * len(code)
        tokens = [*tokens, *words, *code, *stop]
    ids = tuple(tokens[: rows[-1] + 2])
    if len(ids) > longest:
        raise SetupError(
            f"the shortest training text has {len(ids)} tokens, but the limit is {longest}. Use a model with a longer "
            "context; for duo, raise --opt tokens."
        )
    return Example(ids, tuple(rows), tuple(evidence))


def _filler(encode: Encode, draw: Draw, room: int, sentences: int) -> Iterator[list[int]]:
    """Yield at most `sentences` random sentences, with at most `room` tokens in total."""
    for _ in range(sentences):
        sentence = encode(f" {draw.pick(SUBJECTS)} {draw.pick(ACTIONS)} {draw.pick(ENDINGS)}")
        if (room := room - len(sentence)) < 0:
            return
        yield sentence
