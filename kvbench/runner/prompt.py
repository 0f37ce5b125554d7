"""Makes the prompt of a document: renders it with the chat template, cuts it to fit, and turns it into token ids."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvbench.config.run_config import RunConfig
from kvbench.errors import UserError, quote
from kvbench.records import Images
from kvbench.runner.spool import Spool, Stored, StoredIds
from kvbench.task import IMAGE, Doc, GenSpec, Task
from kvbench.taskkit import prompts
from kvbench.taskkit.reader import ModelReader, Talk, special_stops
from kvbench.taskkit.vision import check_markers


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One document as token ids.

    Document, text and ids lie in a temporary file; each access to `doc` or `text` reads this file.

    Attributes:
        thinking: what scorers are told of thinking (`Output.thinking`).
        thinks: whether answers hold a thinking block, as `prompts.effective_thinking` returns it.
        max_new_tokens: most tokens that a sample generates in one turn.
        max_tokens: most tokens that a sample reads and generates in all turns together.
        cut: number of tokens removed because the text was too long.
        compress_at: in a query-agnostic run, how many tokens of the prompt come before the question.
        reply_header: the tokens that the chat template puts between the first turn's text and the reply.
        images: the first turn's images, for the engine.
        pictures: facts about the images of all turns, as rows store them.
        read_pictures: a function that returns the model's inputs for each image of all turns.
    """

    doc_id: str
    spec: GenSpec
    thinking: bool | None
    thinks: bool | None
    ids: StoredIds
    stored_doc: Stored[Doc]
    stored_text: Stored[str]
    max_new_tokens: int
    max_tokens: int
    sha256: str
    cut: int = 0
    talk: Talk | None = None
    multi_turn_cache: str | None = None  # how later turns are read, see `Talk.mode`
    compress_at: int | None = None
    reply_header: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    images: Images | None = None
    pictures: tuple[Mapping[str, Any], ...] = ()
    read_pictures: Callable[[], Sequence[Mapping[str, Any]]] | None = None

    @property
    def doc(self) -> Doc:
        """The document as the model reads it, cut if it was too long."""
        return self.stored_doc.read()

    @property
    def text(self) -> str:
        """The first turn's prompt, rendered."""
        return self.stored_text.read()


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Renders the documents of one task and turns them into token ids."""

    task: Task
    reader: ModelReader
    config: RunConfig
    spool: Spool

    def prompt(self, doc: Doc) -> Prompt:
        reader, config = self.reader, self.config
        check_markers(doc.turns, f"question {quote(doc.doc_id)}")
        default = dataclasses.replace(self.task.gen(reader.model_type), **doc.gen)
        spec = sampling(default, config)
        # Some templates open a thinking block whatever the task asks. A task without thinking allows few new tokens, so
        # that such a block may never end: what the model wrote is then its answer.
        how: Any = {"chat": reader.chat, "chat_template": reader.template, "variables": reader.variables}
        thinks = prompts.effective_thinking(reader.tokenizer, spec.thinking, **how)
        thinking = False if default.thinking is False and not spec.thinking else thinks
        stop, special = special_stops(spec.stop, reader.tokenizer)
        spec = dataclasses.replace(spec, stop=stop, stop_tokens=(*spec.stop_tokens, *special))
        doc, cut = self._cut(doc, spec)
        text = reader.text(doc, thinking=spec.thinking)
        at = None
        if config.compress == "query-agnostic":
            plain, at = _to_context(self.task, doc, reader.tokenizer, text, reader.chat)
            encoded = reader.started(plain)
            at += len(encoded) - len(plain)
        else:
            encoded = reader.ids(text)
        encoded, images = reader.with_images(encoded, doc)
        if at is not None and images is not None:
            assert reader.vision is not None
            at = _behind(at, images, *map(len, reader.vision.around))
        stored, talk, mode = self.spool.put(doc, f"question {quote(doc.doc_id)}"), None, None
        if len(doc.turns) > 1:
            talk = Talk(stored.read, reader, spec.thinking, config.multi_turn == "keep", thinking)
            talk.check_images()
            mode = talk.mode
            if config.compress == "query-agnostic" and mode != "keep":
                raise UserError(
                    f"task {quote(self.task.name)}: --compress query-agnostic needs later turns that continue the "
                    "cache, but each later turn is read as a new prompt (because of the chat template, images in later "
                    "turns, or --multi-turn reset). Use --compress query-aware."
                )
        later = spec.max_new_tokens  # tokens after the prompt
        if talk:
            later = later * len(doc.turns) + talk.tokens()
        return Prompt(
            doc_id=doc.doc_id,
            spec=spec,
            thinking=thinking,
            thinks=thinks,
            ids=self.spool.ids(encoded),
            stored_doc=stored,
            stored_text=self.spool.put(text, "a prompt"),
            max_new_tokens=max(1, min(spec.max_new_tokens, reader.context - len(encoded))),
            max_tokens=len(encoded) + max(1, min(later, reader.context - len(encoded))),
            sha256=self._hash(text, doc),
            cut=cut,
            talk=talk,
            multi_turn_cache=mode,
            compress_at=at,
            reply_header=reader.reply_header(doc.turns[0], thinking=spec.thinking),
            stop_ids=tuple(reader.last_id(t) for t in spec.stop_tokens),
            images=images,
            pictures=self._facts(doc, text),
            read_pictures=partial(reader.vision.read, reader.vision.pictures(doc.turns)) if reader.vision else None,
        )

    def _hash(self, text: str, doc: Doc) -> str:
        """Return one SHA-256 over the rendered prompt and the image files of all turns."""
        digest = hashlib.sha256(text.encode())
        if self.reader.vision:
            for picture in self.reader.vision.pictures(doc.turns):
                digest.update(bytes.fromhex(picture.sha256))
        return digest.hexdigest()

    def _facts(self, doc: Doc, text: str) -> tuple[Mapping[str, Any], ...]:
        """Return facts about the images of all turns, as rows store them. text: the first turn's prompt."""
        vision = self.reader.vision
        if vision is None:
            return ()
        places = (place.start() for place in re.finditer(re.escape(vision.text), text))
        return tuple(
            picture.facts(number, next(places, None))
            for number, turn in enumerate(doc.turns, 1)
            for picture in vision.pictures([turn])
        )

    def _cut(self, doc: Doc, spec: GenSpec) -> tuple[Doc, int]:
        """Shorten a document's first turn to a limit; return the document and the number of tokens removed.

        If `spec.truncate` is "none", the task forbids cutting: nothing is removed, even with --max-prompt-tokens. If it
        is "middle", the limit is --max-prompt-tokens or, without this option, the model's context less
        `spec.max_new_tokens` and `spec.reserve`, but at most `spec.longest`.
        """
        limit = self.config.max_prompt_tokens
        if limit is None and spec.truncate == "middle":
            limit = self.reader.context - spec.max_new_tokens - spec.reserve
            limit = min(limit, spec.longest or limit)
        if limit is None or spec.truncate == "none":
            return doc, 0
        turn, cut = self.reader.cut(doc.turns[0], max(2, limit))
        return dataclasses.replace(doc, turns=(turn, *doc.turns[1:])), cut


def sampling(spec: GenSpec, config: RunConfig) -> GenSpec:
    """Return a task's sampling settings, overridden by the user's. The stop strings of both apply."""
    settings: dict[str, Any] = {
        "n": config.samples,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": config.min_p,
        "thinking": config.thinking,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    return dataclasses.replace(spec, **settings, stop=(*spec.stop, *config.stop))


def _behind(at: int, images: Images, before: int, after: int) -> int:
    """Return the length of a prompt's context, in tokens, with the tokens of its images.

    at: the length with one placeholder token in place of each image's tokens. before, after: how many tokens the
    model's processor adds before and after an image.
    """
    for first, stop in images.spans:
        if first - before < at:
            at += before + stop - first + after - 1
    return at


def _to_context(task: Task, doc: Doc, tokenizer: Any, text: str, chat: bool) -> tuple[list[int], int]:
    """Return a prompt's token ids, and how many of them come before the question.

    Raises UserError in these cases: nothing comes before the question (no context, system message or history); the
    question has an image; no token of the prompt, or every token, ends before the question.
    """
    turn = doc.turns[0]
    if not (turn.context.strip() or turn.system or turn.history):
        raise UserError(
            f"question {quote(doc.doc_id)} of task {quote(task.name)} has no context: there is nothing to "
            "compress before the question. Use --compress query-aware."
        )
    if IMAGE in turn.question and turn.images:
        raise UserError(
            f"question {quote(doc.doc_id)} of task {quote(task.name)} has an image after its context; --compress "
            "query-agnostic needs all images in the context. Use --compress query-aware."
        )
    ids, leading = prompts.encode_to_context(tokenizer, text, turn, chat)
    if not 0 < leading < len(ids):
        raise UserError(
            f"question {quote(doc.doc_id)} of task {quote(task.name)} cannot be read after its context, because no "
            "token of the prompt, or every token, ends before the question. Use --compress query-aware."
        )
    return ids, leading
