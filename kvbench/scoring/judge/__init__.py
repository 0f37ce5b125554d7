"""Let a judge model rate answers (MT-Bench, MMDU), mark them as right or wrong (LongMemEval), or extract the final
answer from a model's text (MathVista). The judge is an OpenAI-compatible server or a local model.

A run ends if the judge's server refuses the API key (`KeyRefused`) or a local judge cannot be used. After any other
failure of the judge, the answer's score has no value, and its note gives the reason.
"""

from kvbench.scoring.judge.api import JudgeError, KeyRefused, Reply
from kvbench.scoring.judge.grading import compare, rate
from kvbench.scoring.judge.settings import check, connect

__all__ = ["JudgeError", "KeyRefused", "Reply", "check", "compare", "connect", "rate"]
