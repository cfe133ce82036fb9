"""The decoder layer of the Llama family: what EAGLE-3 drafts with, and what the lean target is made of.

``DecoderLayer`` holds trainable weights. ``CachedLayer`` is the form that decoding runs, over packed products of
whatever weights: those of a target's layer or those of a draft. Training-time test runs the same weights in a form of
its own (``modules.anchored_attention``, ``modules.trained_ops``).

Legend: B rows, N new positions, T keys (cached and new), H hidden size, W = (heads + 2 kv_heads) x head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from specheads.modules.norm import RMSNorm, normed
from specheads.modules.rotary import turn

Product = Callable[[Tensor], Tensor]


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


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, folded_mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """Grouped-query attention without copies of the keys: the query heads of a group become rows of one head.

    queries: B heads N head_dim; keys, values: B kv_heads T head_dim; folded_mask: of ``fold_groups`` (True = attend, or
    additive), None = all; scale: None = head_dim ** -0.5. Returns B heads N head_dim.
    """
    rows, heads, nodes, head_dim = queries.shape
    kv_heads = keys.shape[1]
    folded = queries.reshape(rows, kv_heads, heads // kv_heads * nodes, head_dim)
    # some GPU kernels return a transposed tensor, which no view can unfold
    return F.scaled_dot_product_attention(folded, keys, values, folded_mask, scale=scale).reshape(queries.shape)


@dataclass(frozen=True)
class CachedLayer:
    """A decoder layer but for its attention, which the caller runs over a cache."""

    shape: LayerShape
    qkv: Product  # [..., H] (2H in EAGLE-3) -> W
    output: Product  # heads head_dim -> H
    gate_up: Product  # H -> 2 x MLP width
    down: Product  # MLP width -> H
    mlp_norm: Tensor | None = None  # H; None: ``gate_up`` holds it

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: B N H, normed; cos, sin: of ``modules.rotary`` -> rotated queries [B heads N head_dim], rotated keys and
        plain values [B kv_heads N head_dim]."""
        heads, turned = self.shape.num_heads, self.shape.num_heads + self.shape.num_kv_heads
        qkv = self.qkv(x).unflatten(-1, (-1, self.shape.head_dim))  # B N heads d
        rotated = turn(qkv[:, :, :turned], cos, sin).transpose(1, 2)
        return rotated[:, :heads], rotated[:, heads:], qkv[:, :, turned:].transpose(1, 2)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden: B N H; attended: B heads N head_dim -> hidden + attention + MLP [B N H]."""
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(normed(hidden, self.shape.rms_norm_eps, self.mlp_norm)).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up)).add_(hidden)


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


class DecoderLayer(nn.Module):
    """Trainable weights of attention and MLP with the norm between them."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.post_attention_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)
