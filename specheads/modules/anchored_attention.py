"""Attention of EAGLE-3's training-time test (Li et al. 2025).

A query of draft step k at anchor t sees the step-0 keys of positions <= t and, of each step 1..k, only the key of its
own anchor: what a draft chain that starts at t would have in its cache.

On a CPU the first part is a flash kernel that also gives its log-sum-exp; the few own keys are merged in by hand. So
memory grows with the positions, not with their square, and with the number of steps not at all. Its backward in bf16 is
written out in products, of a row of the batch at a time, where they fit ``ROW_BYTES``: the kernel takes twice as long.
Other devices run one attention call over all keys, with a mask.

Legend: B rows, T positions, M anchor slots a row (padded), k own keys, G query heads a key head, d head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ROW_BYTES = 32 << 20  # of one row's attention weights in backward
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def anchored_attention(
    queries: Tensor, keys: Tensor, values: Tensor, own: Sequence[tuple[Tensor, Tensor]], mask: Tensor
) -> Tensor:
    """One draft step for all anchors of a batch.

    queries: B heads M d; keys, values: B kv_heads T d (step 0); own: the keys and values [B kv_heads M d] of steps 1
    and later, this one included; mask: of ``anchor_mask``. Returns B heads M d.
    """
    rows, heads, slots, width = queries.shape
    kv_heads = keys.shape[1]
    folded = queries.reshape(rows, kv_heads, heads // kv_heads * slots, width)
    if queries.device.type == "cpu":
        flat = [tensor for pair in own for tensor in pair]
        out = _AnchoredAttention.apply(folded, keys, values, mask, *flat)
    else:
        out = concatenated_attention(folded, keys, values, own, mask)
    return out.reshape(rows, heads, slots, width)


def anchor_mask(positions: Tensor, width: int, groups: int, dtype: torch.dtype) -> Tensor:
    """Additive mask B 1 (G M) T over step-0 keys. positions: B M, of the anchors; width: T."""
    column = torch.arange(width, device=positions.device)
    hidden = column > positions[:, :, None]  # B M T
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)
    return mask[:, None, None].expand(-1, 1, groups, -1, -1).flatten(2, 3)


def concatenated_attention(
    folded: Tensor, keys: Tensor, values: Tensor, own: Sequence[tuple[Tensor, Tensor]], mask: Tensor
) -> Tensor:
    """The same in one call over all keys. folded: B kv_heads (G M) d -> B kv_heads (G M) d."""
    if own:
        slots = own[0][0].shape[2]
        groups = folded.shape[2] // slots
        others = torch.full((slots, slots), -torch.inf, dtype=mask.dtype, device=mask.device).fill_diagonal_(0.0)
        others = others.repeat(groups, len(own)).expand(mask.shape[0], 1, -1, -1)
        mask = torch.cat([mask, others], dim=-1)
        keys = torch.cat([keys] + [key for key, _ in own], dim=2)
        values = torch.cat([values] + [value for _, value in own], dim=2)
    return F.scaled_dot_product_attention(folded, keys, values, mask)


class _AnchoredAttention(torch.autograd.Function):
    """Flash attention over the step-0 keys, merged with own keys by log-sum-exp.

    Backward: the flash kernel works from the merged output and the merged log-sum-exp, which is all that it needs to
    know of the keys it does not see.
    """

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *own: Tensor) -> Tensor:
        out, total = _flash(queries, keys, values, 0.0, False, attn_mask=mask)  # total: B kv (G M)
        shares = None
        if own:
            scores = _own_scores(queries, torch.stack(own[::2], dim=2)).to(total.dtype)  # B kv G k M
            base = total.unflatten(-1, (-1, scores.shape[-1]))[:, :, :, None]  # B kv G 1 M
            merged = torch.logsumexp(torch.cat([base, scores], dim=3), dim=3, keepdim=True)
            shares = (scores - merged).exp()  # of each own key
            kept = (base - merged).exp()[:, :, :, 0, :, None]
            out = out.unflatten(2, (-1, scores.shape[-1])).to(total.dtype) * kept
            for index, value in enumerate(own[1::2]):
                out.addcmul_(value[:, :, None].to(total.dtype), shares[:, :, :, index, :, None])
            out, total = out.flatten(2, 3).to(queries.dtype), merged.flatten(2)
        ctx.save_for_backward(queries, keys, values, mask, out, total, shares, *own)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        queries, keys, values, mask, out, total, shares, *own = ctx.saved_tensors
        grad = grad.contiguous()
        row_bytes = queries[0, :, :, 0].numel() * keys.shape[2] * 2
        if queries.dtype == torch.bfloat16 and row_bytes <= ROW_BYTES:
            grad_queries, grad_keys, grad_values = _backward_by_rows(grad, queries, keys, values, out, total, mask)
        else:
            grad_queries, grad_keys, grad_values = _flash_backward(
                grad, queries, keys, values, out, total, 0.0, False, attn_mask=mask
            )
        grads: list[Tensor] = []
        key_dtype = queries.dtype
        if own:
            slots = own[0].shape[2]
            groups = (queries.shape[2] // slots, slots)
            asked, given, wide, result = (  # B kv G M d; sums of bf16 are slow, so all in fp32
                tensor.to(shares.dtype).unflatten(2, groups) for tensor in (queries, grad, grad_queries, out)
            )
            scale = queries.shape[-1] ** -0.5
            mean = result.mul(given).sum(-1)  # B kv G M
            for index in range(len(own) // 2):
                key, value = (tensor.to(shares.dtype)[:, :, None] for tensor in own[2 * index : 2 * index + 2])
                share = shares[:, :, :, index]
                slope = (given * value).sum(-1).sub_(mean).mul_(share).mul_(scale)[..., None]
                wide = wide.addcmul(slope, key)
                grads += [(slope * asked).sum(2).to(key_dtype), (share[..., None] * given).sum(2).to(key_dtype)]
            grad_queries = wide.flatten(2, 3).to(key_dtype)
        return grad_queries, grad_keys, grad_values, None, *grads


def _own_scores(queries: Tensor, keys: Tensor) -> Tensor:
    """queries: B kv (G M) d, keys: B kv k M d -> scaled products B kv G k M."""
    asked = queries.unflatten(2, (-1, keys.shape[3]))[:, :, :, None]  # B kv G 1 M d
    wide = torch.promote_types(queries.dtype, torch.float32)
    return (asked.to(wide) * keys[:, :, None].to(wide)).sum(-1) * queries.shape[-1] ** -0.5


def _backward_by_rows(
    grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, total: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What ``_flash_backward`` returns, for bf16: weights ``p = exp(q k - total)``, slopes ``p (grad v - out grad)``.

    Both differences come out of a product: the factors get two more columns, of which one side carries the subtrahend
    in two bf16 terms. So they are formed in the product's fp32 and rounded once, when they are small.
    """
    scale = queries.shape[-1] ** -0.5
    scaled = queries * scale
    asked, given = _less(scaled, total), _less(grad, (grad.float() * out.float()).sum(-1))
    offered, worth = _with_ones(keys), _with_ones(values)
    grads = [torch.empty_like(tensor) for tensor in (queries, keys, values)]
    for row in range(queries.shape[0]):
        hidden = mask[row].expand(keys.shape[1], -1, -1)
        p = torch.baddbmm(hidden, asked[row], offered[row].mT).exp_()
        torch.bmm(p.mT, grad[row], out=grads[2][row])
        slopes = torch.bmm(given[row], worth[row].mT).mul_(p)
        torch.bmm(slopes, keys[row], out=grads[0][row]).mul_(scale)
        torch.bmm(slopes.mT, scaled[row], out=grads[1][row])
    return grads[0], grads[1], grads[2]


def _less(x: Tensor, column: Tensor) -> Tensor:
    """x [... n d] with -column [... n] behind it, as two bf16 columns that add up to it."""
    high = column.to(x.dtype)
    low = (column - high.to(column.dtype)).to(x.dtype)
    return torch.cat([x, -high[..., None], -low[..., None]], dim=-1)


def _with_ones(x: Tensor) -> Tensor:
    """x [... n d] with two columns of ones behind it: the other factor of ``_less``."""
    return torch.cat([x, x.new_ones(*x.shape[:-1], 2)], dim=-1)
