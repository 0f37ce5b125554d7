"""Score a function that a model repeats from a repository, as RepoQA does (Liu et al. 2024).

The candidates are all functions that questions on the repository ask about. The candidate with the highest BLEU
against the function in the output counts; of candidates with the same BLEU, the first in the list. The output is right
if this candidate is the function that the question asks for, and its BLEU is at least 0.8. tree-sitter finds the
function in the output: the first function in a code block counts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvbench.scoring.scbench.packages import package

THRESHOLD = 0.8
_BLOCK = re.compile(r"^```(?:\w+)?\s*\n(.*?)(?=^```)```", re.DOTALL | re.MULTILINE)
# Programming language -> module of its tree-sitter grammar, function that returns the grammar, node type of a function.
GRAMMARS = {
    "python": ("tree_sitter_python", "language", "function_definition"),
    "java": ("tree_sitter_java", "language", "method_declaration"),
    "typescript": ("tree_sitter_typescript", "language_typescript", "function_declaration"),
    "rust": ("tree_sitter_rust", "language", "function_item"),
    "cpp": ("tree_sitter_cpp", "language", "function_definition"),
    "go": ("tree_sitter_go", "language", "function_declaration"),
}
PACKAGES = ("nltk.translate.bleu_score", "tree_sitter", *(module for module, _, _ in GRAMMARS.values()))

Needle = tuple[str, str]  # a wanted function's name and text


def score_function(output: str, language: str, name: str, needles: Sequence[Needle]) -> float:
    """Return 1 if the output repeats the function of this name, else 0. language: the repository's programming
    language. needles: all functions that questions on the repository ask about, each with name and text."""
    function = first_function(output, language)
    best, best_name = 0.0, None
    for needle_name, needle in needles:
        likeness = similarity(function, needle)
        if likeness > best:
            best, best_name = likeness, needle_name
    return float(best_name == name and best >= THRESHOLD)


def similarity(function: str, needle: str) -> float:
    """Return the BLEU of a function with a wanted function (`needle`), over words, with nltk's smoothing method 4."""
    bleu = package("nltk.translate.bleu_score")
    words, wanted = (re.split(r"\s+", text.strip()) for text in (function, needle))
    return float(bleu.sentence_bleu([wanted], words, smoothing_function=bleu.SmoothingFunction().method4))


def first_function(output: str, language: str) -> str:
    """Return the first function in an output's code blocks. If the blocks have no function, return the first block. If
    the output has no block, return the output."""
    output = output.strip()
    blocks = _BLOCK.findall(output)
    for block in blocks:
        code = block.encode("utf-8", "replace")
        for node in _nodes(_parser(language).parse(code).root_node):
            if _is_function(node, language):
                return str(code[node.start_byte : node.end_byte].decode("utf-8"))
    return str(blocks[0]) if blocks else output


def _is_function(node: Any, language: str) -> bool:
    if node.type != GRAMMARS[language][2]:
        return False
    if language != "cpp":  # in other languages every node of this type is a function with a name
        return True
    declarator = node.child_by_field_name("declarator")  # of another type for methods and pointers
    if declarator is None or declarator.type != "function_declarator":
        return False
    return bool(declarator.child(0).type == "identifier")


def _nodes(node: Any) -> Iterator[Any]:
    """Yield a node and all nodes below it, in the order of the text."""
    waiting = [node]
    while waiting:
        yield (now := waiting.pop())
        waiting += reversed(now.children)


@functools.cache
def _parser(language: str) -> Any:
    tree_sitter = package("tree_sitter")
    module, grammar, _ = GRAMMARS[language]
    return tree_sitter.Parser(tree_sitter.Language(getattr(package(module), grammar)()))
