"""Regression runs: two sides, a base and a new one, matched cell by cell and judged. Imports torch only for --replay.

    base, new = read_side("main.json"), read_side("results/today")
    outcome = compare(base, new, policy)          # kvbench.compare.outcome
    outcome.exit_code                             # 0 pass, 5 regression, 4 missing

May import: report, store and everything below; `replay` for recorded decisions.
"""
