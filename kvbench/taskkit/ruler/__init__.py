"""RULER's prompts (Hsieh et al. 2024, arXiv:2404.06654), generated for every tokenizer and length.

    room = Room(name="ruler/vt@4096", asked=4096, wrapping=20, new_tokens=30, count=reader.count)
    rows = make_rows("vt", room, Sources(source, "ruler/vt@4096"), 500)       # of kvbench.taskkit.ruler.make

For the same tokenizer, length and word lists the rows are those of NVIDIA/RULER's own generators (commit c3f5e3b, seed
42), byte for byte: every subtask draws from its own random numbers in the same order. A shorter set is the beginning of
a longer one. Why not lm-eval's: see ``tasks/ruler.py``.

Not covered: the generators' other settings (more chains or hops, several in-context examples).
"""
