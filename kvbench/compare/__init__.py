"""Compares two sides, a base and a new one, cell by cell, and judges whether the new one is worse.

    base, new = read_sides("main.json", "results/today")
    outcome = compare(base, new, policy)          # kvbench.compare.outcome
    outcome.exit_code                             # 0 pass, 5 regression, 4 missing

May import: report, store and what those two may import; also `replay`, and with it torch, to record decisions.
"""
