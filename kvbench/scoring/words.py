"""Words and marks as the published scorers of several benchmarks count them."""

from __future__ import annotations

import re
import string

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
WITHOUT_MARKS_ZH = str.maketrans(  # for `str.translate`: drops ASCII and Chinese punctuation
    "",
    "",
    string.punctuation
    + "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】"  # no "《": official
    + "〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏.",
)


def plain_words(text: str) -> list[str]:
    """Return a text's words in lower case, without ASCII punctuation and without the articles a, an and the."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()
