"""The source texts of RULER's prompts: word lists, essays and question-answering sets; and a sentence splitter.

Words come from the package wonderwords, whose lists define the keys of RULER's needles. The sentence splitter is
nltk's. All other texts come from the run's data source, so a data folder may hold them. By default kvbench takes the
essays from the hub data set that lm-eval reads. That text differs slightly from the text of NVIDIA's download script,
so a run records the source of its essays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

from kvbench.errors import SetupError, quote
from kvbench.task import DataSource, Manifest

ESSAYS = Manifest(
    path="ruler/PaulGrahamEssays.json",
    rows=None,
    hub="baber/paul_graham_essays",
    split="train",
    revision="792d672b77d1a67720f7e9820d646358fc18792e",
    licence="the author's copyright",
)
SQUAD = Manifest(
    path="ruler/squad.json",
    rows=None,
    url="https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",
    url_sha256="80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
    licence="CC-BY-SA-4.0",
)
HOTPOTQA = Manifest(
    path="ruler/hotpotqa.json",
    rows=7405,
    hub="namlh2004/hotpotqa",
    files=("hotpot_dev_distractor_v1.json",),
    revision="7e54db4656209750ff487f6fdf8e39a66dba136b",
    licence="CC-BY-SA-4.0",
)
ENGLISH_WORDS = Manifest(
    path="ruler/english_words.json",
    rows=None,
    url=(
        "https://media.githubusercontent.com/media/NVIDIA/RULER/c3f5e3b4f87f97e048793bb510a3a6b19a46bf3a/"
        "scripts/data/synthetic/json/english_words.json"
    ),
    url_sha256="affcd6d45fdf3cc843d585c99c97ad615094e760e6c4756b654bab6c73bc2eca",
)
PIP = "'pip install \"kvbench[ruler]\"'."
EXTRA = f"Install it with {PIP}"
# SHA-256 of each word list of wonderwords 3.0.1, one word per line.
WORD_LISTS = {
    "nounlist": "d2e7b4a3fe536cfbe2aeb4790ee6d4f64f52d5fffba73067526ac7f564b6f4aa",
    "adjectivelist": "a1d78b64addb8621f7d82f2fde67b11e6a7bdfbfa3b455b0fc5779fc781d4bea",
    "verblist": "0ee563820008ca422e0e222963b4efe2ec4acb8e7143029ff089e3ba6970e613",
}


class Sources:
    """The texts that RULER's prompts are made of, and a sentence splitter.

    `words` come from the package wonderwords, and the splitter is nltk's. All other texts are read from the run's data
    source. Every method raises SetupError if what it needs is unavailable.
    """

    def __init__(self, source: DataSource, task: str) -> None:
        self.source, self.task = source, task

    def words(self, name: str) -> list[str]:
        """Return one of the word lists of the package wonderwords, for example "nounlist"."""
        return _words(name)

    def english_words(self) -> list[str]:
        return [str(word) for word in self._json(ENGLISH_WORDS).values()]

    def essays(self) -> str:
        texts = [row.get("text") for row in self.source.rows(self.task, ESSAYS)]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise SetupError(
                f"the essays of task {quote(self.task)} must be objects with a 'text'; correct {quote(ESSAYS.path)}."
            )
        return " ".join(map(str, texts))

    def sentences(self, text: str) -> list[str]:
        return _splitter()(text)

    def squad(self) -> dict[str, Any]:
        return self._json(SQUAD)

    def hotpotqa(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.source.rows(self.task, HOTPOTQA)]

    def _json(self, manifest: Manifest) -> dict[str, Any]:
        file = self.source.file(self.task, manifest)
        try:
            found = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise SetupError(
                f"data of task {quote(self.task)} in {quote(file)} cannot be read ({error}). Check the file's "
                "permissions, or download the file again."
            ) from None
        if not isinstance(found, dict):
            raise SetupError(
                f"data of task {quote(self.task)} in {quote(file)} must be one JSON object. Replace the file."
            )
        return found


@cache
def _words(name: str) -> list[str]:
    try:
        text = (files("wonderwords.assets") / f"{name}.txt").read_text(encoding="utf-8")
    except ModuleNotFoundError:
        raise SetupError(f"RULER's words come from the package wonderwords, which is missing. {EXTRA}") from None
    found = [line.rstrip() for line in text.splitlines()]
    if hashlib.sha256("\n".join(found).encode()).hexdigest() != WORD_LISTS[name]:
        raise SetupError(
            f"the installed word list {quote(name)} differs from that of wonderwords 3.0.1, so RULER's prompts would "
            f"differ. Install wonderwords 3.0.1 with {PIP}"
        )
    return found


@cache
def _splitter() -> Callable[[str], list[str]]:
    try:
        from nltk.tokenize.punkt import PunktTokenizer
    except ModuleNotFoundError:
        raise SetupError(f"essays are split into sentences by the package nltk, which is missing. {EXTRA}") from None
    try:
        split: Callable[[str], list[str]] = PunktTokenizer("english").tokenize
    except LookupError:
        raise SetupError(
            "nltk's model 'punkt_tab', which splits essays into sentences, is not on this machine. Run "
            "'python -m nltk.downloader punkt_tab', or set NLTK_DATA to the folder with tokenizers/punkt_tab."
        ) from None
    return split
