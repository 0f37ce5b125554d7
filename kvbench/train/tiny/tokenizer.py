"""The tokenizer of the built-in model: one token per word of the synthetic tasks, bytes for everything else.

It is a byte-level BPE without merges. A pattern cuts text into pieces: words, labels such as S12, single digits and
single signs, each with the blank before it if there is one. A piece that the vocabulary has is one token; other pieces
have a token per byte. So decoding returns any UTF-8 text unchanged, but text that is not from the tasks takes about one
token per byte.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvbench.taskkit.synthetic.vocabulary import END, PAD, SIZE, TOKENS

CUT = r" ?S[1-9][0-9]?(?![0-9A-Za-z])| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]|\s"

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + '\\n' }}{% endfor %}"

_BYTES: dict[int, str] = bytes_to_unicode()  # for each byte, the letter that stands for it in a byte-level vocabulary


def build_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {_BYTES[i]: i for i in range(256)}
    vocabulary |= {_spelled(text) if text not in (END, PAD) else text: 256 + i for i, text in enumerate(TOKENS)}
    assert len(vocabulary) == SIZE
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CUT), behavior="isolated"), as_bytes])
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=PAD,
        model_max_length=32768,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _spelled(text: str) -> str:
    return "".join(_BYTES[byte] for byte in text.encode())
