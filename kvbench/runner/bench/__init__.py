"""Measures the engine's speed beside that of other systems, in one call of `kvbench bench`.

All systems run one model with random weights, decode greedily and get equal prompts. They are measured alternately,
round by round, so that a busy machine slows all of them; each speed is the median over the rounds. On a CPU the unit is
tokens per second of process CPU time, which other processes disturb less than wall time; on a GPU it is tokens per
second of wall time. Ratios transfer between machines, absolute numbers do not. Only speed is measured: random weights
give no quality to compare.

On a CPU, every round measures each system in a new fork of the process, and the system generates twice there: "fresh"
is the speed of the first generation, "warm" the speed of the second; docs/speed.md says why they differ. On a GPU,
where a fork cannot use CUDA, all rounds run in one process; only vLLM has a process of its own.
"""
