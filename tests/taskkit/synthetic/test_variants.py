"""The variants: first problems byte for byte, one token per piece, lengths that batches rely on, and the floor."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from kvbench import tiny
from kvbench.taskkit.synthetic import chain, lookup, walk
from kvbench.taskkit.synthetic.problem import HELD_OUT, KINDS
from kvbench.taskkit.synthetic.variants import VARIANTS, first_eviction, floor
from kvbench.taskkit.synthetic.vocabulary import SIZE, TOKENS, ids

LENGTHS = {  # prompt, solution with the end token
    "orbit-300": (46, 308),
    "orbit-300f": (102, 308),
    "orbit-100": (46, 108),
    "lines-30": (67, 458),
    "lookup-8": (166, 33),
    "lookup-1": (159, 5),
    "chain-4": (136, 85),
    "chain-8": (186, 161),
}

FIRST_PROBLEMS = {  # sha256 over prompt, solution and answer of the first eight held-out problems
    "orbit-300": "43943165c1beb0bdcecb48ba6da683639cdbbc17f1e84b247d035bdfb9d88d98",
    "orbit-300f": "a374b34c6e70b17150cd572ab9c8debbf8144ceb9b81e9d1ab01279f4c5b65ab",
    "orbit-100": "c1f8816a99b2567242236d41eddb627142f9e7f18e00205bc0a42fa44632e411",
    "lines-30": "a62a1f7cc5beda1cfe22055308d5d4966a45eab6e57bb84812b966795deef15c",
    "lookup-8": "bea9b327912441b3afaf7fd48b8639de9fa289f7ec6cd2c1820a4ba7a363bdec",
    "lookup-1": "4b4d7046e790ee0f4148fc7be6cafbbf91f7b1f9c58f5d6a181174f788e442b7",
    "chain-4": "7a8c01c01470fa578b022a1f317ec46c45c91f0159fc4d71bd8318704d95b5c4",
    "chain-8": "fbd0d445b6b4c7bc0e2310cbc7d24ed1c5c9ece828b7ac6d89e152ac70f28d8a",
}


@pytest.fixture(params=VARIANTS)
def variant(request):
    return VARIANTS[request.param]


def test_first_problems_byte_for_byte(variant):
    digest = hashlib.sha256()
    for i in range(8):
        problem = variant.generate(HELD_OUT + i)
        digest.update("\0".join((problem.prompt, problem.solution, problem.answer, "")).encode())
    assert digest.hexdigest() == FIRST_PROBLEMS[variant.name]


def test_lengths_kinds_and_pieces(variant):
    for i in range(5):
        problem = variant.generate(HELD_OUT + i)
        assert (len(problem.prompt_pieces), len(problem.solution_pieces) + 1) == LENGTHS[variant.name]
        assert "".join(problem.prompt_pieces) == problem.prompt
        assert "".join(problem.solution_pieces) == problem.solution == "".join(problem.steps) + problem.tail
        assert len(problem.solution_kinds) == len(problem.solution_pieces)
        assert set(problem.solution_kinds) <= set(KINDS)
        assert variant.score(problem, problem.solution) == (1.0, 1.0, problem.answer)
        assert problem.prompt.isascii()


def test_pieces_are_the_tokens_of_the_shipped_tokenizer(variant):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny.path() / "tokenizer.json"))
    for i in range(5):
        problem = variant.generate(HELD_OUT + i)
        pieces = problem.prompt_pieces + problem.solution_pieces
        assert tokenizer.encode(problem.prompt + problem.solution).ids == ids(pieces)


def test_vocabulary_is_the_shipped_one():
    stored = json.loads(Path(tiny.path() / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(stored) == SIZE == 492
    assert len(set(TOKENS)) == len(TOKENS)


def test_seeds_and_knobs_matter_and_nothing_else(variant):
    assert variant.generate(5) == variant.generate(5)
    assert variant.generate(5).prompt != variant.generate(6).prompt


def test_first_eviction():
    assert first_eviction(46, 48, 32) == first_eviction(46, 64, 32) == 33
    assert first_eviction(46, 96, 32) == 65
    assert first_eviction(102, 64, 32) == 1, "cut at once, but the first token has seen all of the prompt"
    assert first_eviction(64, 64, 32) == 33


def test_floor():
    assert floor(walk.Digits(), budget=64, interval=32) == pytest.approx(33 / 300)
    assert floor(walk.Digits(n_filler=8), budget=64, interval=32) == pytest.approx(1 / 300)
    assert floor(walk.Digits(n_steps=20), budget=512, interval=32) == 1.0
    assert floor(walk.Lines(), budget=96, interval=32) == pytest.approx(2 / 30)
    assert floor(chain.Knobs(), budget=144, interval=32) == pytest.approx(1 / 4)
    assert floor(lookup.Knobs(), budget=96, interval=32) == 0.0
