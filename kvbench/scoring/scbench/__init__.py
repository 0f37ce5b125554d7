"""SCBench's scores of one answer (Li et al. 2024), equal to `compute_scores.py` of microsoft/MInference (fb56c91)."""
