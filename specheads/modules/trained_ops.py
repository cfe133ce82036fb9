"""The small operations of a decoder layer for training, with their backward written out.

Autograd's chains over elementwise steps cost several times as much on a CPU (every step is a pass through memory and
bf16 and fp32 meet in each), and a draft of one layer has such an operation for every two products. The numbers are
those of ``modules.norm`` and ``modules.decoder_layer``; each has a gradient check.

Legend: n rows, H hidden size, I MLP width, d head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def _wide(x: Tensor) -> Tensor:
    """In fp32, or in x's dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        wide = _wide(x)
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = scale.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        """With n = x scale: dw = sum of g n, dx = scale (g w - n mean(g w n))."""
        x, weight, scale = ctx.saved_tensors
        normed, wide = _wide(x) * scale, _wide(grad)
        product = wide * normed
        grad_weight = product.flatten(0, -weight.ndim - 1).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None, None
        mean = product.mul_(weight).sum(-1, keepdim=True).div_(-x.shape[-1])
        grad_x = torch.mul(wide, weight, out=product).addcmul_(normed, mean).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None, None


def trained_rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension, statistics in fp32 or wider, result in ``dtype``.

    weight: [H], or [n, H] for x [..., n, H].
    """
    return _RMSNorm.apply(x, weight, eps, dtype)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        active = F.silu(gate)
        ctx.save_for_backward(gate_up, active)
        return active * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate_up, active = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        torch.mul(grad, active, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return out


def trained_swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of fused halves: [n, 2I] -> [n, I]."""
    return _SwiGLU.apply(gate_up)


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        split = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))
        rotated = _turn(split[:, : heads + kv_heads], cos, sin)
        return rotated[:, :heads], rotated[:, heads:], split[:, heads + kv_heads :].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_queries: Tensor, grad_keys: Tensor, grad_values: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        heads, kv_heads = grad_queries.shape[1], grad_keys.shape[1]
        out = grad_queries.new_empty(grad_queries.shape[0], heads + 2 * kv_heads, grad_queries.shape[2])
        _turn(grad_queries, cos, -sin, out[:, :heads])
        _turn(grad_keys, cos, -sin, out[:, heads : heads + kv_heads])
        out[:, heads + kv_heads :] = grad_values
        return out.flatten(1), None, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Half-split rotation of x [n heads d] by angles whose cos and sin are [n 1 d/2]."""
    first, second = x.chunk(2, dim=-1)
    out = x.new_empty(x.shape) if out is None else out
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


def rotated_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """A fused projection taken apart: qkv [n, (heads + 2 kv_heads) d], cos and sin [n 1 d/2] ->

    rotated queries [n heads d], rotated keys and plain values [n kv_heads d].
    """
    return _RotatedHeads.apply(qkv, cos, sin, heads, kv_heads)
