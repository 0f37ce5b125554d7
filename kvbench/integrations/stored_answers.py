"""Checks that lm-eval's file of stored answers (``--use_cache``) was written with this model, method and settings."""

from __future__ import annotations

from typing import Any

from kvbench import __version__
from kvbench.errors import UserError, quote
from kvbench.integrations.model_args import ModelArgs
from kvbench.runner.cell import MethodState

MARK = "kvbench"  # key in lm-eval's file of answers; its value is the settings that made the answers


def identity_of(args: ModelArgs, state: MethodState, **model: str | None) -> dict[str, Any]:
    """Return the facts on which the answer to a given prompt depends: settings, version, and the method's source and
    artefacts. state: the method with its source and artefacts. model: further facts about the loaded model, by name."""
    run = args.run
    return {
        "version": __version__,
        "model": run.model,
        **model,
        "method": args.choice.name,
        "options": args.method().options(),
        "source": state.source.hash,
        "artefacts": state.artefacts,
        "budget": args.budget,
        "interval": run.interval,
        "prefill": run.prefill,
        "prefill_chunk": run.prefill_chunk if run.prefill == "chunked" else None,
        "seed": run.seed,
        "truncate": args.truncate,
        "think_end_token": args.think_end_token,
    }


def check_stored_answers(answers: Any, identity: dict[str, Any]) -> None:
    """Compare `identity` with the identity in the file; if the file is empty, store `identity` in it.

    Raises UserError if the file holds answers of other settings, or answers without an identity. Without this check,
    lm-eval would use these answers, because it looks up an answer by the prompt alone.

    answers: lm-eval's open file. identity: what `identity_of` returns.
    """
    stored = answers.get(MARK)
    if stored is None and len(answers):
        raise UserError(
            f"--use_cache {quote(answers.filename)} holds answers, but not the settings that made them. Give another "
            "file."
        )
    if stored is not None and stored != identity:
        changed = ", ".join(f"{k} {stored.get(k)}, now {identity[k]}" for k in identity if identity[k] != stored.get(k))
        raise UserError(
            f"--use_cache {quote(answers.filename)} holds answers of other settings ({changed}). Give another file."
        )
    answers[MARK] = identity
