"""LongProc's scores (Ye et al. 2025), one module per task, equal to those of princeton-pli/LongProc (78e873a).

Every scorer returns accuracy (1 for a right answer), partial_accuracy (1 for a right answer, otherwise, by each task's
own rule, the share of the right procedure that the text has before its first error) and extraction_rate (1 if the text
holds an answer).
"""
