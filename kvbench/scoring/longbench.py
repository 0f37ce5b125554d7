"""LongBench's nine metrics (Bai et al. 2023), equal to `metrics.py` and `eval.py` of THUDM/LongBench (2e00731).

Every score is in [0, 1]; the official tables show the mean times 100, rounded to two decimals. ROUGE-L comes from the
package rouge 1.0.1 and Chinese words from jieba 0.42.1 (extra ``longbench``): other versions, and the package
rouge-score, give other scores. The similarity of code lines is `difflib`'s ratio. The official set-up uses the
package fuzzywuzzy without python-Levenshtein; fuzzywuzzy then computes the same ratio.
"""

from __future__ import annotations

import difflib
import importlib
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from typing import Any

from kvbench.errors import SetupError
from kvbench.scoring.words import WITHOUT_MARKS_ZH, plain_words

FIRST_LINE = frozenset({"trec", "triviaqa", "samsum", "lsht"})  # few-shot sets: only an output's first line counts
CODE_SKIPPED = ("`", "#", "//")  # a line with one of these is a fence or a comment
PACKAGES = {"rouge": "1.0.1", "jieba": "0.42.1"}


def score_row(dataset: str, prediction: str, answers: Sequence[str], all_classes: Sequence[str] | None = None) -> float:
    """Score an output (`prediction`) by the reference answer that it matches best, with the metric of its data set.

    In the data sets `FIRST_LINE`, only the output's first line counts. all_classes: names of all classes, for a
    classification set.

    Raises SetupError if the set's metric needs a package that is missing or of another version.
    """
    if dataset in FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    if dataset in CLASSIFICATION:
        return max((classification(prediction, answer, all_classes or ()) for answer in answers), default=0.0)
    metric = METRICS[dataset]
    return max((metric(prediction, answer) for answer in answers), default=0.0)


def require(dataset: str) -> None:
    """Raise SetupError unless the packages that a set's metric needs are installed in the right version."""
    for name in NEEDS.get(METRICS.get(dataset, classification), ()):
        _package(name)


# --- metrics ----------------------------------------------------------------------------------------------------------


def qa_f1(prediction: str, answer: str) -> float:
    """F1 of the output's words against the reference's (`answer`), each word counted as often as it occurs. Case, ASCII
    punctuation and articles do not count."""
    return _f1(plain_words(prediction), plain_words(answer))


def qa_f1_zh(prediction: str, answer: str) -> float:
    """F1 of the output's words against the reference's (`answer`), as jieba separates them, each counted as often as it
    occurs. Case, blanks and punctuation do not count, except marks that the official code keeps, such as "《"."""
    return _f1(_words_zh(prediction), _words_zh(answer))


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L F by the package rouge, which splits sentences at full stops; 0 where rouge raises an error.

    rouge fails on empty texts, and on long sentences: it recurses once per word of both texts, so about a thousand
    words reach Python's recursion limit. Chinese texts without an ASCII full stop may be that long. The official
    scripts also count a failure as 0. This function calls rouge in a new thread and under Python's default recursion
    limit, because torch's compiler raises the limit. The score therefore does not depend on the caller.
    """
    rouge, scores = _package("rouge"), [0.0]

    def run() -> None:
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(1000)
        try:
            scores[0] = rouge.Rouge(metrics=["rouge-l"]).get_scores([prediction], [answer], avg=True)["rouge-l"]["f"]
        except (ValueError, RecursionError):
            pass
        finally:
            sys.setrecursionlimit(before)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return float(scores[0])


def rouge_l_zh(prediction: str, answer: str) -> float:
    """ROUGE-L of Chinese texts, over the words into which jieba separates them."""
    return rouge_l(" ".join(_cut(prediction)), " ".join(_cut(answer)))


def classification(prediction: str, answer: str, all_classes: Sequence[str]) -> float:
    """Return 1 / n if the right name is among the n class names that count for the output; otherwise return 0.

    All names that the output contains count, except shorter names that are part of the right name. The official code
    has a fault, on which scores depend: after it removes such a shorter name, it does not check the next name in the
    list. That next name counts even if it is part of the right name.
    """
    named = [name for name in all_classes if name in prediction]
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    return 1.0 / len(named) if answer in named else 0.0


def count(prediction: str, answer: str) -> float:
    """Share of the numbers in the output that equal the reference (`answer`), compared as text."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Share of the numbers in the output that equal the number in a reference such as "Paragraph 12"."""
    return count(prediction, re.findall(r"Paragraph (\d+)", answer)[0])


def retrieval_zh(prediction: str, answer: str) -> float:
    """Share of the numbers in the output that equal the number in a reference such as "段落12"."""
    return count(prediction, re.findall(r"段落(\d+)", answer)[0])


def code_similarity(prediction: str, answer: str) -> float:
    """Similarity of the reference (`answer`) and the output's first line of code, from 0 to 1 and rounded to 0.01.
    Lines with a mark of a code fence or a comment (`CODE_SKIPPED`) are skipped."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in CODE_SKIPPED)), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


Metric = Callable[[str, str], float]
CLASSIFICATION = frozenset({"trec", "lsht"})
_SETS: dict[Metric, str] = {
    qa_f1: "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa",
    qa_f1_zh: "multifieldqa_zh",
    rouge_l: "gov_report qmsum multi_news samsum",
    rouge_l_zh: "dureader vcsum",
    count: "passage_count",
    retrieval: "passage_retrieval_en",
    retrieval_zh: "passage_retrieval_zh",
    code_similarity: "lcc repobench-p",
}
METRICS = {name: metric for metric, names in _SETS.items() for name in names.split()}
NEEDS: dict[Callable[..., float], tuple[str, ...]]
NEEDS = {qa_f1_zh: ("jieba",), rouge_l: ("rouge",), rouge_l_zh: ("rouge", "jieba")}


# --- words ------------------------------------------------------------------------------------------------------------


def _f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    same = (Counter(prediction) & Counter(answer)).total()
    if not same:
        return 0.0
    precision, recall = same / len(prediction), same / len(answer)
    return (2 * precision * recall) / (precision + recall)


def _words_zh(text: str) -> list[str]:
    words = ("".join(word.lower().translate(WITHOUT_MARKS_ZH).split()) for word in _cut(text))
    return [word for word in words if word]


def _cut(text: str) -> list[str]:
    return list(_segmenter().cut(text, cut_all=False))


@cache
def _segmenter() -> Any:
    """Return jieba's tokenizer with its packaged dictionary, bypassing jieba's cache. jieba trusts any cache file in
    the folder for temporary files; a cache from another version or user would change scores."""
    segmenter = _package("jieba").Tokenizer()
    segmenter.FREQ, segmenter.total = segmenter.gen_pfdict(segmenter.get_dict_file())
    segmenter.initialized = True
    return segmenter


@cache
def _package(name: str) -> Any:
    wanted, how = PACKAGES[name], f"Install {name} {PACKAGES[name]} with 'pip install \"kvbench[longbench]\"'."
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        raise SetupError(f"scores of this LongBench set need the package {name}, which is missing. {how}") from None
    if version != wanted:
        raise SetupError(f"scores of this LongBench set need {name} {wanted}; {version} is installed. {how}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jieba is old
        return importlib.import_module(name)
