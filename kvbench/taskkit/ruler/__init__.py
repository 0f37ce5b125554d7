"""RULER's prompts (Hsieh et al. 2024, arXiv:2404.06654), generated for every tokenizer and length.

For the same tokenizer, length and source texts (word lists, essays, question sets), the prompts equal those of
NVIDIA/RULER's own generators (commit c3f5e3b, seed 42) byte for byte. For this, every subtask draws its random numbers
in the same order as those generators. A larger set of prompts begins with the prompts of a smaller set.

Not covered: other settings of NVIDIA's generators (more chains or hops, several in-context examples).
"""
