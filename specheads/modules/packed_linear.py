"""Linear layers for few rows on a CPU: weights reordered once into oneDNN's blocked layout.

A product of 1 to 16 rows is bound by reading the weights, and in the plain layout oneDNN reorders them at every call.
Measured on two kinds of processor: 1.4 to 2 times faster in bf16 at any number of rows, and in fp32 from 2 rows on.
In bf16 a row's result is the same bits for 1 to 32 rows, and those of the plain product of one row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def pack_linear(weight: Tensor, rows: int, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """``x -> x @ weight^T + bias`` for x of about ``rows`` rows [..., in]; any number works. weight: out in.

    Falls back to the plain product where oneDNN has no packed one that agrees with it (other devices and dtypes,
    older processors). No gradient flows through the packed one.
    """

    def plain(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return plain
    operators = torch.ops.mkldnn
    if weight.dtype not in (torch.float32, torch.bfloat16) or not hasattr(operators, "_reorder_linear_weight"):
        return plain
    trial = torch.linspace(-1, 1, 2 * weight.shape[1]).view(2, -1).to(weight.dtype)
    try:
        pointwise = operators._linear_pointwise.default
        packed = operators._reorder_linear_weight(weight.contiguous(), rows)
        found = pointwise(trial, packed, bias, "none", [], "")
    except (RuntimeError, AttributeError):  # the processor lacks the instructions, or the release the operator
        return plain
    wanted = plain(trial)
    room = (2e-2 if weight.dtype == torch.bfloat16 else 1e-4) * float(wanted.abs().max().clamp(min=1e-6))
    if not torch.allclose(found, wanted, rtol=0.0, atol=room):
        return plain
    one_row_is_faster_plain, width = weight.dtype == torch.float32, weight.shape[1]

    def product(x: Tensor) -> Tensor:
        if one_row_is_faster_plain and x.numel() == width:
            return F.linear(x, weight, bias)
        return pointwise(x, packed, bias, "none", [], "")

    return product
