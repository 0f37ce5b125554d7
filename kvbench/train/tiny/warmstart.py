"""The initial weights of the built-in model: a random Qwen3 in which a few heads already attend to useful positions.

From random weights, training stalls for two reasons. With QK-norm and head size 32, no head becomes sharp enough to
attend to the previous token alone. And digit sums give no gradient until a head attends to both operands at once. So
some heads initially attend to fixed offsets, and one head is initially an induction head. The norms and one embedding
channel begin as constants, all remaining weights at random. All weights are trained.
"""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from kvbench.taskkit.synthetic.vocabulary import END_ID, PAD_ID

HEAD, Q_HEADS, KV_HEADS, HIDDEN = 32, 4, 2, 128
PAIRS = HEAD // 2  # RoPE rotates channels p and p + PAIRS as a pair; pair p = 0 is the fastest
FAST = 3  # pairs 0, 1, 2 rotate by 1.0, 0.53 and 0.28 rad per token: enough to tell neighbouring tokens apart
SLOW = 7  # pairs from this one on rotate by at most 0.011 rad per token, so they match contents at any distance
CONSTANT = 0  # embedding channel with the same value for all tokens; queries and keys made from it ignore content

THETA = 30000.0

CONFIG = Qwen3Config(
    vocab_size=512,
    hidden_size=HIDDEN,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=Q_HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=HEAD,
    max_position_embeddings=32768,
    rope_parameters={"rope_type": "default", "rope_theta": THETA},
    tie_word_embeddings=False,
    attention_bias=False,
    bos_token_id=None,
    eos_token_id=END_ID,
    pad_token_id=PAD_ID,
    dtype="float32",
)


@torch.no_grad()
def warm_start(seed: int) -> Qwen3ForCausalLM:
    gen = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(CONFIG)
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.fill_(1.0)
        else:
            small = 0.15 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            weight.normal_(0.0, small * weight.shape[1] ** -0.5, generator=gen)
    embed = model.model.embed_tokens.weight
    embed.normal_(0.0, 0.5, generator=gen)
    embed[:, CONSTANT] = 4.0

    layers = [layer.self_attn for layer in model.model.layers]
    for i, attention in enumerate(layers):
        for gain in (attention.q_norm.weight, attention.k_norm.weight):
            gain.fill_(1.7 if i == 1 else 1.2)
            if i != 1:
                for p in range(FAST):
                    gain[[p, p + PAIRS]] = 2.0

    first, second = layers[0], layers[1]
    _look_back(first, kv_head=0, offsets=(1, 2), gen=gen)
    identity = _orthonormal(HEAD, HIDDEN, gen)  # [32, 128] reads a token's identity
    written = _orthonormal(HEAD, HIDDEN, gen)  # [32, 128] where head 0 writes the previous token's identity
    first.v_proj.weight[:HEAD] = identity
    first.o_proj.weight[:, :HEAD] = 2.0 * written.T
    _induct(second, identity, written, gen)
    for attention in layers[2:]:
        _look_back(attention, kv_head=KV_HEADS - 1, offsets=(3, 7), gen=gen)  # the operands of a sum
    return model


def _look_back(attention: Qwen3Attention, kv_head: int, offsets: tuple[int, int], gen: torch.Generator) -> None:
    """Make the two query heads of one KV head attend to the tokens at given offsets before the query.

    All tokens have the same key, and each query is this key rotated back by the offset. Under RoPE, the product of
    query and key is the sum of cos(angle * (distance - offset)) over the pairs of dimensions that RoPE rotates fast.
    This sum is largest where the distance equals the offset.
    """
    angles = THETA ** (-torch.arange(FAST) / PAIRS)  # [FAST] rad per token
    key = torch.zeros(HEAD)
    key[:FAST] = 1.0
    _set_constant(attention.k_proj.weight, kv_head, key, gen)
    for i, offset in enumerate(offsets):
        query = torch.zeros(HEAD)
        query[:FAST] = torch.cos(offset * angles)
        query[PAIRS : PAIRS + FAST] = -torch.sin(offset * angles)
        _set_constant(attention.q_proj.weight, kv_head * (Q_HEADS // KV_HEADS) + i, query, gen)


def _set_constant(weight: torch.Tensor, head: int, vector: torch.Tensor, gen: torch.Generator) -> None:
    rows = slice(head * HEAD, (head + 1) * HEAD)
    weight[rows].normal_(0.0, 0.02, generator=gen)
    weight[rows, CONSTANT] = vector


def _induct(attention: Qwen3Attention, identity: torch.Tensor, written: torch.Tensor, gen: torch.Generator) -> None:
    """Make head 0 an induction head: a token's query matches the keys of positions whose previous token is the same.

    Queries and keys use only the pairs of dimensions that RoPE rotates slowly. identity: the directions in the hidden
    state that encode the token. written: the directions to which an earlier layer writes the previous token.
    """
    slow = [*range(SLOW, PAIRS), *range(PAIRS + SLOW, HEAD)]
    for weight, reader in ((attention.q_proj.weight, identity), (attention.k_proj.weight, written)):
        weight[:HEAD].normal_(0.0, 0.02, generator=gen)
        weight[slow] = reader[: len(slow)]


def _orthonormal(rows: int, columns: int, gen: torch.Generator) -> torch.Tensor:
    """Return `rows` random orthonormal vectors as a matrix [rows, columns], with 0 in the column `CONSTANT`."""
    basis = torch.linalg.qr(torch.randn(columns - 1, rows, generator=gen)).Q.T
    return torch.cat([torch.zeros(rows, 1), basis], dim=1)
