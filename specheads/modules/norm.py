"""RMS normalisation with statistics in fp32 (Zhang & Sennrich 2019; as in the Llama family)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension; fp32 statistics, result in the dtype of ``weight * x``."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def normed(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """``rms_norm`` to the last bit, in two operators, for decoding. No weight: the next product holds it."""
    out = F.rms_norm(x, x.shape[-1:], None, eps)  # statistics in fp32, rounded before the weight is applied
    return out if weight is None else out.mul_(weight)


class RMSNorm(nn.Module):
    """``rms_norm`` with its weight. x: [..., size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return rms_norm(x, self.weight, self.eps)
