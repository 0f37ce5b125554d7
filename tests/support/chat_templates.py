"""Chat templates of the shapes that models have, and a tokenizer and a question to render them with."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvbench.task import Doc, Turn
from kvbench.taskkit.reader import ModelReader

SWITCH = (  # the shape of Qwen3's template
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
# the shape of R1 distills
OPEN = "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]<think>\n"
PLAIN = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"

# the shape of Granite 3.3's: another variable switches thinking on
OTHER = "{% if thinking %}Write <think></think> first.{% endif %}" + PLAIN
# the shape of GPT-OSS's: channels, no tags
CHANNELS = "{% for m in messages %}[{{ m.role }}]{{ m.thinking }}{{ m.content }}{% endfor %}[assistant]"
# the shape of Gemma 4's: a switch, and channels in place of tags
SWITCHED_CHANNELS = "{% if enable_thinking %}<|think|>{% endif %}" + CHANNELS
# the shape of Seed-OSS's: tags of its own
SEED = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</seed:think>')[-1] }}{% endfor %}[assistant]"
# the shape of SmolLM3's: the system message describes thinking blocks
ANNOUNCED = "<|system|>{% if enable_thinking %}Begin with <think> thoughts </think>{% endif %}\n" + SWITCH
# the shape of DeepSeek-V3.1's
PREFIX = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if thinking %}<think>{% else %}</think>{% endif %}"
)
# the shape of GPT-OSS's, with its variable alone
EFFORT = "{% for m in messages %}{{ m.content }}{% endfor %} effort {{ reasoning_effort }}"
# the shape of the first R1's: answers of earlier turns lose their thinking, nothing opens a block
STRIPS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}"
    "{% generation %}[assistant]{% endgeneration %}"
)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Bytes as tokens, and a start token that is added to raw text, as Llama's tokenizers do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<s>", *alphabet])}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", chat_template=template, name_or_path="org/x")


def doc(**turn: Any) -> Doc:
    return Doc(doc_id="q", turns=(Turn(**{"question": "1+1?", **turn}),), reference="2")


def render(
    asked: Doc,
    tok: PreTrainedTokenizerFast,
    *,
    chat: bool,
    thinking: bool | None = None,
    chat_template: str | None = None,
    variables: dict[str, Any] | None = None,
) -> str:
    """The prompt of a question's first turn."""
    reader = ModelReader(
        tokenizer=tok, model_type="", context=4096, chat=chat, template=chat_template, variables=variables or {}
    )
    return reader.text(asked, thinking=thinking)
