"""The model families that the docs name: which run, and which are refused, each by what text.

python -m support.families        (in tests/) writes the lists in docs/engine.md anew
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from kvbench.sources.refusals import WITH_IMAGES

ENGINE_DOCS = Path(__file__).parents[2] / "docs/engine.md"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 512,
}
MROPE = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}}
HALF_MROPE = {
    "text_config": {"rope_parameters": MROPE["text_config"]["rope_parameters"] | {"mrope_section": [2, 1, 1]}}
}
FULL, SLIDING = "full_attention", "sliding_attention"
DBRX = {
    "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 64},
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
}
LAGUNA = {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL], "num_attention_heads_per_layer": [4, 6, 4]}
STEP = {"num_hidden_layers": 3, "layer_types": [FULL, SLIDING, FULL], "num_sliding_attention_heads": 6}
STEP |= {"mlp_layer_types": ["dense", "sparse", "sparse"], "share_expert_dim": 32, "sliding_window": 24}
ZAYA = {"num_hidden_layers": 3, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 24}
LONGCAT = {"num_layers": 1, "zero_expert_num": 2, "expert_ffn_hidden_size": 32}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}

SHARED = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]}
SHARED |= {"mamba_headdim": 16, "n_mamba_heads": 8}

# Few entries, so that the indexer chooses; many heads, so that few scores are 0: among equal ones any may be chosen.
INDEXED = {"index_topk": 8, "index_n_heads": 16}
SHARES = INDEXED | {"indexer_types": ["full", "shared"]}

QSA = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
QSA |= {"indexer_budget": 8, "indexer_compress_ratio": 2}

DENSE, MIXTURES, LATENT, SPARSE, VISION = (
    "dense",
    "mixtures of experts",
    "latent attention",
    "latent attention that an indexer makes sparse",
    "vision-language (text; images where marked)",
)
LINEAR = "linear_attention"
HYBRID = "hybrids (linear attention, state space or convolution beside attention)"
STATE = "linear attention, state space or convolution"
INTERFACE = "without the attention interface (ALiBi, own attention)"
DIRECTIONS = "both directions, or encoder-decoder"
OTHER = "other attention"


@dataclass(frozen=True)
class Family:
    """One repository of the zoo.

    Attributes:
        name: as docs name it; group: under which.
        changes: how its configuration differs from the smallest one of its model type.
        refused: a part of the message; None where it runs.
        estimated: a plan without weights is estimated.
    """

    name: str
    model_type: str
    group: str
    changes: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    estimated: bool = False
    seed: int = 0


FAMILIES = [
    Family("A.X K1", "axk1", LATENT),
    Family("A.X K2", "axk2", SPARSE, INDEXED),
    Family("AFMoE", "afmoe", MIXTURES),
    Family("Apertus", "apertus", DENSE),
    Family("Arcee", "arcee", DENSE),
    Family("Aria", "aria", VISION, estimated=True),
    Family("Aya Vision", "aya_vision", VISION),
    Family("BitNet (not quantised)", "bitnet", DENSE),
    Family("Cohere", "cohere", DENSE),
    Family("Cohere 2", "cohere2", DENSE),
    Family("Cohere 2 MoE", "cohere2_moe", MIXTURES),
    Family("Cohere 2 Vision", "cohere2_vision", VISION),
    Family("DBRX", "dbrx", MIXTURES, DBRX, estimated=True),
    Family("DeepSeek-V2", "deepseek_v2", LATENT, EXPERTS),
    Family("DeepSeek-V3", "deepseek_v3", LATENT),
    Family("DeepSeek-V3.2", "deepseek_v32", SPARSE, INDEXED),
    Family("dots.1", "dots1", MIXTURES, EXPERTS | {"n_shared_experts": 1}),
    Family("ERNIE 4.5", "ernie4_5", DENSE),
    Family("ERNIE 4.5 MoE", "ernie4_5_moe", MIXTURES),
    Family("EXAONE 4", "exaone4", DENSE),
    Family("EXAONE 4.5", "exaone4_5", VISION),
    Family("EXAONE MoE", "exaone_moe", MIXTURES),
    Family("FlexOlmo", "flex_olmo", MIXTURES),
    Family("Gemma", "gemma", DENSE),
    Family("Gemma 2", "gemma2", DENSE, {"attn_logit_softcapping": 2.0}),
    Family("Gemma 3", "gemma3", VISION),
    Family("Gemma 3 (text)", "gemma3_text", DENSE),
    Family("Gemma 4", "gemma4", VISION),
    Family("Gemma 4 12B", "gemma4_unified", VISION),
    Family("Gemma 4 (text)", "gemma4_text", DENSE),
    Family("GLM", "glm", DENSE),
    Family("GLM-4", "glm4", DENSE),
    Family("GLM-4 MoE", "glm4_moe", MIXTURES),
    Family("GLM-4 MoE lite", "glm4_moe_lite", LATENT),
    Family("GLM-5", "glm_moe_dsa", SPARSE, INDEXED),
    Family("GLM-5 (layers share a choice)", "glm_moe_dsa", SPARSE, SHARES),
    Family("GLM-4V", "glm4v", VISION, MROPE),
    Family("GLM-4V MoE", "glm4v_moe", VISION, HALF_MROPE),
    Family("GOT-OCR 2", "got_ocr2", VISION),
    Family("GPT-2", "gpt2", DENSE),
    Family("GPT-BigCode", "gpt_bigcode", DENSE),
    Family("GPT-NeoX", "gpt_neox", DENSE),
    Family("GPT-OSS", "gpt_oss", MIXTURES),
    Family("Granite", "granite", DENSE),
    Family("Granite MoE", "granitemoe", MIXTURES),
    Family("Granite SWA", "granite_swa", DENSE, {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, SLIDING]}),
    Family("Helium", "helium", DENSE),
    Family("HunYuan", "hunyuan_v1_dense", DENSE),
    Family("HunYuan MoE", "hunyuan_v1_moe", MIXTURES),
    Family("Hy3", "hy_v3", MIXTURES, {"num_hidden_layers": 3, "first_k_dense_replace": 1}),
    Family("Hy4", "hy_v4", SPARSE, SHARES),
    Family("Idefics 3", "idefics3", VISION),
    Family("InternVL", "internvl", VISION),
    Family("JetMoE", "jetmoe", MIXTURES, estimated=True),
    Family("Kimi K2.5 (text)", "kimi_k25", LATENT),
    Family("Laguna", "laguna", MIXTURES, LAGUNA | {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    Family("Llama", "llama", DENSE),
    Family("Llama 3", "llama", DENSE, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    Family("LongCat Flash", "longcat_flash", LATENT, LONGCAT, estimated=True),
    Family("LLaVA", "llava", VISION),
    Family("LLaVA-OneVision", "llava_onevision", VISION),
    Family("MiMo-V2-Flash", "mimo_v2_flash", MIXTURES),
    Family("MiniCPM 3", "minicpm3", LATENT),
    Family("MiniCPM-V 4.6", "minicpmv4_6", VISION),
    Family("MiniMax-M2", "minimax_m2", MIXTURES),
    Family("MiniMax-M3", "minimax_m3_vl", VISION),
    Family("Ministral", "ministral", DENSE, {"layer_types": ["full_attention", "sliding_attention"]}),
    Family("Ministral 3", "ministral3", DENSE),
    Family("Mistral", "mistral", DENSE, {"sliding_window": None}),
    Family("Mistral 3", "mistral3", VISION, {"text_config": {"sliding_window": None}}),
    Family("Mistral 4", "mistral4", LATENT, {"head_dim": 16}),
    Family("Mixtral", "mixtral", MIXTURES),
    Family("Muse Glimmer", "muse_glimmer", DENSE),
    Family("Nemotron", "nemotron", DENSE),
    Family("OLMo", "olmo", DENSE),
    Family("OLMo 2", "olmo2", DENSE),
    Family("OLMo 3", "olmo3", DENSE),
    Family("OLMoE", "olmoe", MIXTURES),
    Family("OPT", "opt", DENSE),
    Family("Phi", "phi", DENSE),
    Family("Phi-3", "phi3", DENSE, {"sliding_window": None}),
    Family("PhiMoE", "phimoe", MIXTURES),
    Family("Qwen2", "qwen2", DENSE),
    Family("Qwen2-MoE", "qwen2_moe", MIXTURES),
    Family("Qwen2-VL", "qwen2_vl", VISION, MROPE),
    Family("Qwen2.5-VL", "qwen2_5_vl", VISION, MROPE),
    Family("Qwen3", "qwen3", DENSE),
    Family("Qwen3 (YaRN)", "qwen3", DENSE, {"rope_parameters": YARN}),
    Family("Qwen3-MoE", "qwen3_moe", MIXTURES),
    Family("Qwen3-VL", "qwen3_vl", VISION, MROPE),
    Family("Qwen3-VL-MoE", "qwen3_vl_moe", VISION, MROPE),
    Family("Seed-OSS", "seed_oss", DENSE),
    Family("SmolLM3", "smollm3", DENSE),
    Family("SmolVLM", "smolvlm", VISION),
    Family("Solar Open", "solar_open", MIXTURES),
    Family("StarCoder 2", "starcoder2", DENSE),
    Family("Step 3.7", "step3p7", VISION, {"text_config": STEP | {"query_pre_attn_scalar": 16}}, estimated=True),
    Family("VaultGemma", "vaultgemma", DENSE),
    Family("Youtu", "youtu", LATENT),
    Family("Bamba", "bamba", HYBRID, {"attn_layer_indices": [1]}),
    Family("Falcon-H1", "falcon_h1", HYBRID, {"mamba_n_heads": 8, "mamba_d_ssm": 128}),
    Family("Granite 4 hybrid", "granitemoehybrid", HYBRID, {"layer_types": ["mamba", "attention"]}),
    Family("Kimi Linear", "kimi_linear", HYBRID),
    Family("LFM2", "lfm2", HYBRID, {"layer_types": ["conv", "full_attention"]}),
    Family("LFM2 MoE", "lfm2_moe", HYBRID, {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    Family("Nemotron-H", "nemotron_h", HYBRID),
    Family(
        "OLMo hybrid",
        "olmo_hybrid",
        HYBRID,
        {"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, "full_attention", LINEAR]},
    ),
    Family("Qwen3-Next", "qwen3_next", HYBRID),
    Family("Qwen3.5", "qwen3_5", HYBRID),
    Family("Qwen3.5 MoE", "qwen3_5_moe", HYBRID),
    Family("ZAYA", "zaya", HYBRID, ZAYA | {"num_experts_per_tok": 1, "router_hidden_size": 16}),
    # refused
    Family(
        "Jamba",
        "jamba",
        STATE,
        {"attn_layer_period": 2, "attn_layer_offset": 1},
        refused="layers of type 'mamba' JambaMambaDecoderLayer do not continue",
    ),
    Family("Falcon Mamba", "falcon_mamba", STATE, refused="neither a KV cache"),
    Family("Mamba", "mamba", STATE, refused="neither a KV cache"),
    Family("Mamba 2", "mamba2", STATE, {"num_heads": 8, "head_dim": 16}, refused="neither a KV cache"),
    Family("MiniMax", "minimax", STATE, refused="cache of its own"),
    Family("RecurrentGemma", "recurrent_gemma", STATE, refused="'recurrent_gemma'"),
    Family("RWKV", "rwkv", STATE, refused="'rwkv'"),
    Family("xLSTM", "xlstm", STATE, refused="'xlstm'"),
    Family("Zamba 2", "zamba2", STATE, SHARED, refused="layer -1 twice"),
    Family("BLOOM", "bloom", INTERFACE, refused="attention interface"),
    Family("Falcon", "falcon", INTERFACE, refused="attention interface"),
    Family("GPT-J", "gptj", INTERFACE, refused="attention interface"),
    Family("MPT", "mpt", INTERFACE, refused="attention interface"),
    Family("StableLM", "stablelm", INTERFACE, refused="attention interface"),
    Family("BART", "bart", DIRECTIONS, refused="'bart'"),
    Family("BERT", "bert", DIRECTIONS, refused="both directions"),
    Family("PaliGemma", "paligemma", DIRECTIONS, refused="both directions"),
    Family("T5-Gemma 2", "t5gemma2", DIRECTIONS, refused="encoder-decoder"),
    Family("DeepSeek-V4", "deepseek_v4", OTHER, refused="compressed_sparse_attention"),
    Family("DiffLlama", "diffllama", OTHER, refused="twice"),
    Family("Doge", "doge", OTHER, refused="passes its own mask"),
    Family(
        "GLM-5.3-Flash",
        "glm5_next",
        OTHER,
        {"text_config": {"qk_rope_head_dim": 0, "head_dim": 0}},
        refused="pools of neighbouring tokens",
    ),
    Family("Moshi", "moshi", OTHER, refused="sliding window"),
    Family("Kosmos-2.5", "kosmos-2.5", OTHER, refused="counts positions"),
    Family("Llama 4", "llama4", OTHER, refused="chunked_attention"),
    Family(
        "Llama 4 (no chunks)",
        "llama4_text",
        OTHER,
        {"layer_types": [FULL, FULL], "no_rope_layers": [1, 0]},
        refused="layers without RoPE",
    ),
    Family(
        "Llama 3.2 Vision",
        "mllama",
        OTHER,
        {"text_config": {"cross_attention_layers": [1]}},
        refused="neither a KV cache",
    ),
    Family(
        "Phi-3 (LongRoPE)",
        "phi3",
        OTHER,
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512},
        refused="longrope RoPE",
    ),
    Family("Qwen4-Exp", "qwen4_exp", OTHER, {"text_config": QSA}, refused="qwen_sparse_attention"),
]


def _name(family: Family) -> str:
    return f"{family.name} (images)" if family.model_type in WITH_IMAGES else family.name


def lists() -> str:
    """The lists of docs/engine.md."""
    lines = []
    for refused, title in ((False, "Run"), (True, "Refused by name")):
        these = sorted((f for f in FAMILIES if (f.refused is not None) == refused), key=lambda f: f.group)
        lines += [f"{title}:", ""]
        lines += [
            f"- {group}: {', '.join(_name(f) for f in found)}" for group, found in groupby(these, lambda f: f.group)
        ]
        lines.append("")
    return "\n".join(lines)


BLOCK = re.compile(r"(<!-- families: .*? -->\n).*?(<!-- end of families -->)", re.S)


def write() -> None:
    text = ENGINE_DOCS.read_text(encoding="utf-8")
    ENGINE_DOCS.write_text(BLOCK.sub(lambda m: m[1] + lists() + m[2], text), encoding="utf-8")


if __name__ == "__main__":
    write()
