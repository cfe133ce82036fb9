"""The weights of a Llama-family decoder layer, with fused projections, and grouped-query attention.

The EAGLE-3 head holds one such layer; its training step and its drafter run it in the forms that each needs (anchored
attention, packed weights). ``attend`` and ``fold_groups`` serve every cached forward, the lean target's too.

Legend: B rows, N new positions, T keys (cached and new), H hidden size, I MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from specheads.modules.norm import RMSNorm


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a decoder layer. ``attention_input``: width that q, k and v read (2H in EAGLE-3), None = hidden_size."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_input: int | None = None


def fold_groups(mask: Tensor, groups: int) -> Tensor:
    """Mask B N T -> B 1 (groups N) T, for queries folded as ``attend`` folds them. Once a forward, not once a layer."""
    rows, nodes, keys = mask.shape
    return mask[:, None, None].expand(rows, 1, groups, nodes, keys).reshape(rows, 1, groups * nodes, keys)


def attend(queries: Tensor, keys: Tensor, values: Tensor, folded_mask: Tensor | None) -> Tensor:
    """Grouped-query attention without copies of the keys: the query heads of a group become rows of one head.

    queries: B heads N head_dim; keys, values: B kv_heads T head_dim; folded_mask: of ``fold_groups`` (True = attend),
    None = all. Returns B N (heads head_dim).
    """
    rows, heads, nodes, head_dim = queries.shape
    kv_heads = keys.shape[1]
    folded = queries.reshape(rows, kv_heads, heads // kv_heads * nodes, head_dim)
    out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=folded_mask)
    return out.reshape(rows, heads, nodes, head_dim).transpose(1, 2).reshape(rows, nodes, heads * head_dim)


class Attention(nn.Module):
    """Projections of self-attention: q, k and v in one matrix, rows in this order."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.qkv_proj = nn.Linear(shape.attention_input or shape.hidden_size, width, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)


class MLP(nn.Module):
    """SwiGLU with one fused gate and up projection."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Attention and MLP with the norm between them; the caller prepares (and norms) what attention reads."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.post_attention_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)
