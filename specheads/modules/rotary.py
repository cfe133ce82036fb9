"""Rotary position embedding (Su et al. 2021): half-split layout of the Llama family, llama3 and linear scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def inverse_frequencies(head_dim: int, theta: float, scaling: Mapping[str, object] | None = None) -> Tensor:
    """Angles per position of each of the head_dim / 2 pairs, fp32.

    ``scaling``: Hugging Face rope parameters (``rope_type`` linear or llama3), or None.

    Raises:
        ValueError: a rope type that is not known here.
    """
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    kind = str((scaling or {}).get("rope_type", (scaling or {}).get("type", "default")))
    if scaling is None or kind == "default":
        return frequencies
    if kind not in ("linear", "llama3"):
        raise ValueError(f"rope_scaling: got rope_type {kind!r}, expected default, linear or llama3")
    factor = float(scaling["factor"])  # type: ignore[arg-type]
    if kind == "linear":
        return frequencies / factor
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])  # type: ignore[arg-type]
    original = float(scaling["original_max_position_embeddings"])  # type: ignore[arg-type]
    wavelengths = 2 * math.pi / frequencies
    blend = ((original / wavelengths - low) / (high - low)).clamp(0, 1)  # 0: slowed by the factor, 1: untouched
    return frequencies / factor * (1 - blend) + frequencies * blend


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [B N heads head_dim] by the angles of its positions. cos, ``signed`` sin: B N 1 head_dim."""
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


def signed(sin: Tensor) -> Tensor:
    """sin [..., head_dim] with its first half negated: a roll of x then does for the half-rotation."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)


class Rotary(nn.Module):
    """Angles for positions: a buffer of this module alone, so two models with unlike theta never share a table."""

    inverse: Tensor

    def __init__(self, head_dim: int, theta: float, scaling: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self.register_buffer("inverse", inverse_frequencies(head_dim, theta, scaling), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """Follows the module to a device but not to another dtype: in bf16 the angles would be off by whole turns."""
        inverse = self.inverse
        super()._apply(fn, recurse)
        self.inverse = inverse.to(self.inverse.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions: B N -> cos, ``signed`` sin: B N 1 head_dim in ``dtype`` (angles in fp32)."""
        angles = positions[:, :, None, None].float() * self.inverse.float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), signed(angles.sin()).to(dtype)
