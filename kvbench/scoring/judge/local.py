"""A local judge: a chat model in a folder, which transformers loads at the first request.

The judge needs memory beside the model under test. If memory is short, generate with ``--judge none`` and judge later
with ``kvbench score RUN --judge local:FOLDER``. Only safetensors weights are read, and no code from the folder runs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.console.faults import words
from kvbench.errors import SetupError, quote
from kvbench.scoring.judge.api import MAX_TOKENS, JudgeError, Reply, messages
from kvbench.sources.model_weights import REPORTING, difference
from kvbench.sources.models import context_of
from kvbench.sources.tokenizer import TODAY, decode, read_tokenizer


class LocalJudge:
    """A judge model that runs on this machine: it decodes greedily without thinking, one request at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._loaded: tuple[Any, Any] | None = None  # tokenizer and model

    def ask(self, system: str, user: str, images: Sequence[bytes] = (), max_tokens: int = MAX_TOKENS) -> Reply:
        if images:
            raise SetupError("a local judge reads no images; give a judge at an address (--judge URL) that reads them.")
        with self._lock:
            return Reply(self._answer(system, user, max_tokens), f"local:{self.folder.resolve().name}")

    def _answer(self, system: str, user: str, max_tokens: int) -> str:
        import torch

        self._loaded = self._loaded or self._load()
        tokenizer, model = self._loaded
        try:
            prompt = tokenizer.apply_chat_template(
                messages(system, user),
                add_generation_prompt=True,
                enable_thinking=False,
                strftime_now=TODAY.strftime,
                return_dict=True,
                return_tensors="pt",
            )
        except Exception as error:  # a template may raise any error; some refuse a system message
            raise SetupError(
                f"the chat template of the judge {quote(self.folder)} fails: {quote(error)}. Give another judge."
            ) from None
        read = prompt["input_ids"].shape[1]
        room = context_of(model.config) - read
        if room < 1:
            raise JudgeError(f"the judge's prompt has {read} tokens, but the judge's context holds only {room + read}")
        end = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        try:
            with torch.inference_mode():
                ids = model.generate(
                    **prompt.to(model.device),
                    max_new_tokens=min(max_tokens, room),
                    do_sample=False,
                    pad_token_id=end,
                )
        except torch.OutOfMemoryError:
            raise JudgeError(f"the judge ran out of memory on a prompt of {read} tokens") from None
        return decode(tokenizer, ids[0, read:].tolist())

    def _load(self) -> tuple[Any, Any]:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            tokenizer = read_tokenizer(str(self.folder))
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                self.folder, dtype="auto", trust_remote_code=False, use_safetensors=True, **REPORTING
            )
            model, report = loaded
            if wrong := difference(model, report):
                raise ValueError(wrong)
            model.generation_config = transformers.GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
            return tokenizer, model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        except torch.OutOfMemoryError:
            raise SetupError(
                f"the judge {quote(self.folder)} does not fit into memory. Give a smaller judge; or run with --judge "
                "none, then 'kvbench score RUN', which loads the judge without the model under test."
            ) from None
        except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
            first = (words(error).splitlines() or [""])[0]
            raise SetupError(
                f"the judge {quote(self.folder)} cannot be loaded: {quote(first)}. Give another judge."
            ) from None
