"""Let a judge model rate answers: MT-Bench's prompts, an OpenAI-compatible endpoint or a model in a folder.

    check(services)                              # before a run: UserError for invalid settings
    rate(services, doc, answers)                 # Score: a rating from 1 to 10 per turn
    compare(services, doc, answers, baseline)    # Score: win, tie or loss per turn, asked in both orders

`KeyRefused` ends a run; any other failure of a judge gives a score without a value and with a note.
"""

from kvbench.scoring.judge.api import Judge, JudgeError, KeyRefused, Reply
from kvbench.scoring.judge.grading import compare, rate
from kvbench.scoring.judge.settings import check, connect

__all__ = ["Judge", "JudgeError", "KeyRefused", "Reply", "check", "compare", "connect", "rate"]
