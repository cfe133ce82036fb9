"""Attention masks as every Hugging Face attention implementation reads them right.

A bool mask is silently wrong under ``eager`` and a 0/1 float mask under both; an additive mask of the model's own
dtype (0 = attend, the dtype's lowest number = do not) is right under ``sdpa`` and ``eager`` alike.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal(rows: int, nodes: int, device: torch.device | str = "cpu") -> Tensor:
    """The mask of N new tokens in sequence: B N N bool, [b, i, j] = j <= i."""
    mask = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril_()
    return mask[None].expand(rows, nodes, nodes)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """bool B N T (True = attend) -> B 1 N T in ``dtype``: 0 where attended, the lowest finite number elsewhere."""
    out = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return out.masked_fill_(~mask, torch.finfo(dtype).min)[:, None]
