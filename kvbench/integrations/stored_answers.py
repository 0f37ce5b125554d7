"""The check that lm-eval's file of stored answers (``--use_cache``) holds answers of the same model and settings."""

from __future__ import annotations

from typing import Any

from kvbench.errors import UserError, quote

MARK = "kvbench"  # key in lm-eval's file of answers: the model, method and budget that gave the answers


def check_stored_answers(answers: Any, identity: dict[str, Any]) -> None:
    """Store `identity` in the file `answers`, or compare it with the stored one.

    lm-eval looks up an answer by its prompt alone. So a file with answers of another model, method or budget raises
    UserError.

    identity: all settings on which an answer depends.
    """
    stored = answers.get(MARK)
    if stored is None and len(answers):
        raise UserError(f"--use_cache {quote(answers.filename)} holds answers of another model. Give another file.")
    if stored is not None and stored != identity:
        changed = ", ".join(f"{k} {stored.get(k)}, now {identity[k]}" for k in identity if identity[k] != stored.get(k))
        raise UserError(
            f"--use_cache {quote(answers.filename)} holds answers of another model ({changed}). Give another file."
        )
    answers[MARK] = identity
