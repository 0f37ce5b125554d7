"""LongProc's scores (Ye et al. 2025), one module per task, equal to those of princeton-pli/LongProc (78e873a).

Where a task's scores are not equal to LongProc's, its module says so.

Every function `score_...` returns three scores. accuracy: 1 for a right answer, else 0. partial_accuracy: 1 for a right
answer; otherwise the share of the right procedure that the text has before its first error, by each task's own rule.
extraction_rate: 1 if the text holds an answer, else 0; always 1 in tom_tracking.
"""
