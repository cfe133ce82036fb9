"""A Llama-family decoder layer with fused projections: what EAGLE heads are made of and what the lean target runs.

Legend: B rows, N new positions, T keys (cached and new), H hidden size, I MLP width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from specheads.modules.kv_cache import KVCache
from specheads.modules.norm import RMSNorm
from specheads.modules.rotary import rotate


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
    attention_bias: bool = False


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
    """Self-attention with one fused q, k, v projection."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        inner = shape.attention_input or shape.hidden_size
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.qkv_proj = nn.Linear(inner, width, bias=shape.attention_bias)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: B N inner -> rotated queries B heads N d, rotated keys and values B kv_heads N d."""
        shape = self.shape
        turned = shape.num_heads + shape.num_kv_heads
        heads = self.qkv_proj(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)  # B heads N d
        rotated = rotate(heads[:, :turned], cos, sin)
        return rotated[:, : shape.num_heads], rotated[:, shape.num_heads :], heads[:, turned:]

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, folded_mask: Tensor | None, cache: KVCache | None, layer: int
    ) -> Tensor:
        """x: B N inner -> B N H. New keys and values go behind the cache's committed columns, if there is a cache."""
        queries, keys, values = self.project(x, cos, sin)
        if cache is not None:
            keys, values = cache.write(layer, keys, values)
        return self.o_proj(attend(queries, keys, values, folded_mask))


class MLP(nn.Module):
    """SwiGLU with one fused gate and up projection."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """B N H -> B N H."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP. ``input_norm`` is absent where the caller prepares the attention input itself."""

    def __init__(self, shape: LayerShape, input_norm: bool = True) -> None:
        super().__init__()
        self.input_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps) if input_norm else None
        self.attention = Attention(shape)
        self.post_attention_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(
        self,
        hidden: Tensor,  # B N H: the residual stream
        cos: Tensor,
        sin: Tensor,
        folded_mask: Tensor | None,
        cache: KVCache | None = None,
        layer: int = 0,
        attention_input: Tensor | None = None,  # B N inner, instead of the normed residual
    ) -> Tensor:
        """B N H -> B N H: hidden + attention + MLP."""
        if attention_input is None:
            assert self.input_norm is not None
            attention_input = self.input_norm(hidden)
        hidden = hidden + self.attention(attention_input, cos, sin, folded_mask, cache, layer)
        return hidden + self.mlp(self.post_attention_norm(hidden))
