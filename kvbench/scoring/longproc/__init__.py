"""LongProc's scores (Ye et al. 2025), one module per task, equal to those of princeton-pli/LongProc (78e873a).

Every scorer returns accuracy (1 for a right answer), partial_accuracy (the share of the procedure before its first
error, or 1) and extraction_rate (1 if the text holds an answer).
"""
