"""SCBench's (Li et al. 2024) scores of one answer, equal to `compute_scores.py` of microsoft/MInference (fb56c91)."""
