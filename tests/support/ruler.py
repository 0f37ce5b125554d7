"""Made-up essays and question-answering sets, and a tokenizer with one token a word."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

from kvbench.taskkit.reader import ModelReader
from kvbench.taskkit.ruler.fit_length import Room
from kvbench.taskkit.ruler.material import Sources
from kvbench.taskkit.ruler.recipes import FAMILIES, SUBTASKS

DATA = Path(__file__).parents[1] / "data" / "ruler"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@functools.cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DATA / "whitespace_tokenizer")


def count(text: str) -> int:
    return len(tokenizer()(text, add_special_tokens=False)["input_ids"])


def reader(*, chat: bool = False, context: int = 131072) -> ModelReader:
    return ModelReader(tokenizer=tokenizer(), model_type="qwen3", context=context, chat=chat, template=CHAT)


def room(subtask: str, asked: int, **changes: Any) -> Room:
    new_tokens = FAMILIES[SUBTASKS[subtask].family].new_tokens
    return Room(**{"name": subtask, "asked": asked, "wrapping": 0, "new_tokens": new_tokens, "count": count} | changes)


class MadeUp(Sources):
    """Words are wonderwords'; the rest is made up, with sentences that end in a full stop and nowhere else."""

    def __init__(self) -> None:
        draw = random.Random(7)
        words = self.words("verblist")

        def sentence() -> str:
            return f"{' '.join(draw.choices(words, k=draw.randint(4, 16)))}.".capitalize()

        self.text = "\n\n".join("  ".join(sentence() for _ in range(8)) for _ in range(40))
        self.articles = [[" ".join(sentence() for _ in range(6)) for _ in range(5)] for _ in range(30)]
        self.hops = [[[draw.choice(words), [sentence(), f" {sentence()}"]] for _ in range(10)] for _ in range(40)]

    def essays(self) -> str:
        return self.text

    def sentences(self, text: str) -> list[str]:
        return [f"{part}." for part in text.removesuffix(".").split(". ")]

    def squad(self) -> dict[str, Any]:
        def asked(paragraph: str, i: int) -> dict[str, Any]:
            answers = [{"text": paragraph.split()[i]}, {"text": paragraph.split()[i + 1]}]
            return {"question": f"Q{i} {paragraph[:12]}?", "is_impossible": i == 1, "answers": answers * (i != 1)}

        paragraphs = [[{"context": p, "qas": [asked(p, i) for i in range(3)]} for p in a] for a in self.articles]
        return {"version": "v2.0", "data": [{"title": str(i), "paragraphs": p} for i, p in enumerate(paragraphs)]}

    def hotpotqa(self) -> list[dict[str, Any]]:
        return [
            {"question": f"Q{i}?", "answer": context[0][0], "context": context} for i, context in enumerate(self.hops)
        ]

    def english_words(self) -> list[str]:
        return [f"word{i}" for i in range(60000)]
