"""Measures the engine's speed beside that of other systems, in one process and one run.

Random weights of a named shape, greedy decoding, equal prompts. The systems take turns, repetition by repetition, so
that a busy machine slows all; each figure is the median over the repetitions. On a CPU, tokens are counted per second
of process CPU time, which other processes disturb less than wall time; on a GPU per second of wall time. Ratios
transfer between machines, absolute numbers do not. Only speed is measured: random weights give no quality to compare.

On a CPU every repetition runs in a fresh copy of the process and is timed twice there, because a baseline changes: a
growing cache asks for new memory at every step, and in a fresh process glibc hands the old pages back to the system
each time. After a first long generation glibc keeps them, and transformers becomes up to twice as fast. "fresh" is the
speed of a job that generates once, "warm" the speed of a job that continues. Both occur in practice: both are shown.
"""
