"""The residual block of Medusa heads (Cai et al. 2024)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class ResBlock(nn.Module):
    """``x + SiLU(W x + b)``. W starts at zero and b as a linear layer's, so a fresh block is nearly the identity."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return x + F.silu(self.linear(x))
