"""Let a judge model rate answers (MT-Bench, MMDU), mark them (LongMemEval) or extract them (MathVista). The judge is an
OpenAI-compatible server or a local model.

A judge that refuses the key (`KeyRefused`) or cannot be loaded ends a run. Any other failure of a judge gives a score
without a value and with a note.
"""

from kvbench.scoring.judge.api import JudgeError, KeyRefused, Reply
from kvbench.scoring.judge.grading import compare, rate
from kvbench.scoring.judge.settings import check, connect

__all__ = ["JudgeError", "KeyRefused", "Reply", "check", "compare", "connect", "rate"]
