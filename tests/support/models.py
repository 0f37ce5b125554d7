"""Small random models of many architectures, and sequences to run on them."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import transformers

from kvbench.engine.model.division import divide
from kvbench.engine.model.load import LoadedModel, prepare
from kvbench.records import Request, Sampling

VOCABULARY = 160
BASE: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=512,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
HEAD = dict(head_dim=16)
ALTERNATE = dict(layer_types=["full_attention", "sliding_attention", "full_attention"], sliding_window=24)
# Of seven layers, the last three have no keys and values: layers 4 and 6 share those of layer 2, layer 5 those of 3.
SHARING = dict(
    num_hidden_layers=7,
    num_kv_shared_layers=3,
    layer_types=["full_attention", "sliding_attention"] * 3 + ["full_attention"],
    sliding_window=24,
    vocab_size_per_layer_input=VOCABULARY,
    hidden_size_per_layer_input=8,
    **HEAD,
)

LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    first_k_dense_replace=3,
)
# Embeddings of zeros, as a padding token has them, would give all entries the same score.
SPARSE = dict(LATENT, index_topk=10, index_head_dim=16, index_n_heads=16, pad_token_id=None)

# Architecture -> (configuration class, what differs from BASE). The zoo (`support.families`) has more of them.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-sliding": ("Qwen2Config", dict(use_sliding_window=True, **ALTERNATE)),
    "qwen3": ("Qwen3Config", HEAD),
    "qwen3-moe": ("Qwen3MoeConfig", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, **HEAD)),
    "mistral": ("MistralConfig", dict(sliding_window=None, **HEAD)),
    "mistral-sliding": ("MistralConfig", dict(sliding_window=24, **HEAD)),
    "mistral-wide": ("MistralConfig", dict(sliding_window=300, **HEAD)),  # no test sequence outgrows it
    "gemma": ("GemmaConfig", HEAD),
    "gemma2": ("Gemma2Config", dict(ALTERNATE, query_pre_attn_scalar=16, attn_logit_softcapping=2.0, **HEAD)),
    "gemma3": ("Gemma3TextConfig", dict(ALTERNATE, query_pre_attn_scalar=16, **HEAD)),
    "gemma3n": ("Gemma3nTextConfig", dict(SHARING, laurel_rank=8)),
    "gemma4": ("Gemma4TextConfig", dict(SHARING, global_head_dim=32)),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {}),
    "smollm3": ("SmolLM3Config", {}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", dict(attention_multiplier=0.3)),
    "glm4": ("Glm4Config", HEAD),
    "cohere": ("CohereConfig", {}),
    "exaone4": ("Exaone4Config", ALTERNATE),
    "seed-oss": ("SeedOssConfig", HEAD),
    "hunyuan-dense": ("HunYuanDenseV1Config", HEAD),
    "ernie4.5": ("Ernie4_5Config", HEAD),
    "gpt-oss": ("GptOssConfig", dict(ALTERNATE, num_local_experts=4, num_experts_per_tok=2, **HEAD)),
    "deepseek-v3": ("DeepseekV3Config", LATENT),
    "deepseek-v3.2": ("DeepseekV32Config", SPARSE),
    "glm-5": ("GlmMoeDsaConfig", dict(SPARSE, indexer_types=["full", "shared", "shared"])),
    "lfm2": ("Lfm2Config", dict(layer_types=["conv", "full_attention", "conv"])),
    "qwen3.5": (
        "Qwen3_5TextConfig",
        dict(
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            **HEAD,
        ),
    ),
    "qwen3-vl-text": (
        "Qwen3VLTextConfig",
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2]), **HEAD),
    ),
}


class Words:
    """A tokenizer whose words are numbers."""

    eos_token_id = None
    chat_template = None
    all_special_ids: ClassVar[list[int]] = []

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """A number stands for itself, every other word for its length."""
        words = text.split()
        return {"input_ids": [int(w) if w.isdigit() and int(w) < VOCABULARY else len(w) for w in words]}

    def __len__(self) -> int:
        return VOCABULARY

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def batch_decode(self, sequences: list[list[int]], **_: Any) -> list[str]:
        return [self.decode(ids) for ids in sequences]


def build(name: str, scale: float = 2.0) -> LoadedModel:
    """A random model; weights are enlarged so that attention is far from uniform and mistakes show."""
    config_name, changes = ARCHITECTURES[name]
    if not hasattr(transformers, config_name):
        pytest.skip(f"transformers {transformers.__version__} has no {config_name}")
    config = getattr(transformers, config_name)(**BASE | changes)
    torch.manual_seed(0)
    if name == "qwen3-vl-text":
        model: Any = _vision_language_text(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return prepare(model.eval(), Words())


def _vision_language_text(config: Any) -> Any:
    """The text path of a vision-language model: its text model under a language-model head."""
    vision = transformers.Qwen3VLConfig().vision_config
    vision.depth, vision.hidden_size, vision.num_heads, vision.intermediate_size, vision.out_hidden_size = (
        1,
        32,
        2,
        32,
        64,
    )
    vision.deepstack_visual_indexes = [0]
    whole = transformers.Qwen3VLConfig(text_config=config.to_dict(), vision_config=vision.to_dict())
    return transformers.Qwen3VLForConditionalGeneration(whole)


def divided(name: str) -> LoadedModel:
    """A small model with its three layers on two pretended GPUs."""
    loaded = build(name)
    division = divide(loaded.model.config, "auto", "auto", torch.float32)
    assert division is not None
    return prepare(division.dispatch(loaded.model), loaded.tokenizer)


def requests(
    lengths: tuple[int, ...], new_tokens: tuple[int, ...], samples: int, sampling: Sampling | None = None
) -> list[Request]:
    """Random prompts of these lengths, each with its own number of new tokens."""
    generator = torch.Generator().manual_seed(1)
    return [
        Request(
            task="t",
            doc_id=str(i),
            prompt_ids=tuple(torch.randint(0, VOCABULARY, (n,), generator=generator).tolist()),
            samples=tuple(range(samples)),
            max_new_tokens=m,
            sampling=sampling or Sampling(temperature=1.0),
        )
        for i, (n, m) in enumerate(zip(lengths, new_tokens))
    ]
