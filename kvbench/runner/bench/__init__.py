"""Measures the engine's speed beside that of other systems, in one call of `kvbench bench`.

All systems run one model with random weights, decode greedily and get equal prompts. They are measured alternately,
round by round, so that a busy machine slows all of them; each speed is the median over the rounds. On a CPU the unit is
tokens per second of process CPU time, which other processes disturb less than wall time; on a GPU it is tokens per
second of wall time. Ratios transfer between machines, absolute numbers do not. Only speed is measured: random weights
give no quality to compare.

On a CPU, every round measures each system in a new fork of the process, and the system generates twice there: "fresh"
is the speed of the first generation, "warm" the speed of the second. Both occur in practice, so both are shown. The
second generation of transformers' `generate` is up to twice as fast as the first. The growing cache of `generate` asks
for new memory at every step. In a new process glibc returns the old pages to the system each time, but after a first
long generation glibc keeps the pages. On a GPU, where a fork cannot use CUDA, all rounds run in one process; only vLLM
has a process of its own.
"""
