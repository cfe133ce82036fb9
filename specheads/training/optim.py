"""Optimisers and the learning-rate schedule.

Hidden 2-D weights are trained by Muon, everything else (output rows, embeddings, norms, biases) by AdamW. Muon
(Keller Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks") replaces the momentum of a
matrix by the nearest semi-orthogonal matrix, found with five Newton-Schulz steps. `torch.optim.Muon` hard-wires
bf16, which processors without bf16 instructions emulate at a quarter of fp32's speed, so the few lines are our own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from specheads.modules.decoder_layer import MLP, Attention
from specheads.utils import InputError

# parameters whose names hold one of these parts are output rows or embeddings
ADAMW_NAMES = ("lm_head", "output", "embed")
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic tuned for a steep slope at zero, as published


def orthogonalise(matrices: Tensor, dtype: torch.dtype, steps: int = 5) -> Tensor:
    """Nearly semi-orthogonal matrices (singular values about 0.7 to 1.2) with the singular vectors of ``matrices``.

    matrices: S R C (a stack of one shape). The products run in ``dtype``; the result has it too.
    """
    x = matrices.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:  # the smaller Gram matrix
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    if dtype != torch.bfloat16 and x.shape[-1] >= 1.5 * x.shape[-2]:
        x = gram_factor(x @ x.mT, steps) @ x
    elif x.shape[0] == 1:  # 2-D products read a transposed factor as it is, batched ones copy it: up to 1.5 x slower
        x = newton_schulz(torch.addmm, x[0], steps)[None]
    else:
        x = newton_schulz(torch.baddbmm, x, steps)
    return x.mT if tall else x


def newton_schulz(add_product: Callable[..., Tensor], x: Tensor, steps: int) -> Tensor:
    """The iteration itself. ``add_product``: ``torch.addmm`` for x [R C], ``torch.baddbmm`` for a stack [S R C]."""
    a, b, c = NEWTON_SCHULZ
    for _ in range(steps):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def gram_factor(gram: Tensor, steps: int) -> Tensor:
    """The matrix by which ``steps`` Newton-Schulz steps multiply X, from its Gram matrix X X^T alone (S R R).

    A quarter fewer operations for wide matrices. The small singular values are squared away here, which fp32 bears
    (relative error below 1e-4) and bf16 does not.
    """
    a, b, c = NEWTON_SCHULZ
    factor = None
    for step in range(steps):
        z = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # everything here is a polynomial of the first Gram
        z.diagonal(dim1=-2, dim2=-1).add_(a)  # matrix, so all products commute
        factor = z if factor is None else z @ factor
        if step < steps - 1:
            gram = (z @ gram) @ z
    assert factor is not None
    return factor


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    ``parts`` maps a parameter to the row counts of the matrices fused in it (q, k, v or gate, up): each part is
    orthogonalised on its own, since a fused matrix would share one spectrum among unrelated maps. Parts of one shape
    are orthogonalised as one stack. The update of an R x C part is scaled by ``max(1, R / C) ** 0.5`` (Jordan 2024).
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
        parts: dict[Tensor, list[int]] | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype
        self.parts = parts or {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            stacks: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(buffer, group["momentum"])  # Nesterov: look one step ahead
                sizes = self.parts.get(parameter, [parameter.shape[0]])
                for weight, piece in zip(parameter.split(sizes), update.split(sizes), strict=True):
                    stacks[tuple(piece.shape)].append((weight, piece))
            for (rows, columns), members in stacks.items():
                stack = orthogonalise(torch.stack([piece for _, piece in members]), self.dtype)
                scale = max(1.0, rows / columns) ** 0.5
                for (weight, _), direction in zip(members, stack, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(direction.to(weight.dtype), alpha=-group["lr"] * scale)


def fused_rows(head: nn.Module) -> dict[Tensor, list[int]]:
    """Row counts of the maps fused in one weight: q, k, v of an ``Attention``; gate, up of an ``MLP``."""
    parts: dict[Tensor, list[int]] = {}
    for module in head.modules():
        if isinstance(module, Attention):
            heads, kv_heads, width = module.shape.num_heads, module.shape.num_kv_heads, module.shape.head_dim
            parts[module.qkv_proj.weight] = [heads * width, kv_heads * width, kv_heads * width]
        elif isinstance(module, MLP):
            parts[module.gate_up_proj.weight] = [module.gate_up_proj.out_features // 2] * 2
    return parts


class Optimizers:
    """The optimisers of one head as one: a step, a state and a learning-rate factor for all of them."""

    def __init__(self, members: dict[str, torch.optim.Optimizer]) -> None:
        self.members = members
        self.base = {name: member.param_groups[0]["lr"] for name, member in members.items()}

    @property
    def parameters(self) -> list[Tensor]:
        """Every parameter that is trained."""
        return [p for member in self.members.values() for group in member.param_groups for p in group["params"]]

    def set_factor(self, factor: float) -> dict[str, float]:
        """Learning rate = factor x base rate; returns the rates by optimiser."""
        rates = {name: base * factor for name, base in self.base.items()}
        for name, member in self.members.items():
            for group in member.param_groups:
                group["lr"] = rates[name]
        return rates

    def step(self) -> None:
        """One update."""
        for member in self.members.values():
            member.step()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for member in self.members.values():
            member.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors, numbers and dictionaries."""
        return {name: member.state_dict() for name, member in self.members.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``, for the same head and settings."""
        for name, member in self.members.items():
            member.load_state_dict(state[name])


def build_optimizer(
    head: nn.Module,
    kind: str = "muon",
    *,
    learning_rate: float = 1e-3,
    muon_learning_rate: float = 0.02,
    weight_decay: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> Optimizers:
    """The optimisers for a head's trainable parameters.

    ``kind``: ``"muon"`` (Muon for hidden 2-D weights, AdamW for the rest) or ``"adamw"`` (AdamW for all). ``dtype``:
    what Muon's products run in. AdamW uses betas (0.9, 0.95), as EAGLE's trainers do.

    Raises:
        InputError: an unknown ``kind``, or a head without a trainable parameter.
    """
    if kind not in ("muon", "adamw"):
        raise InputError(f"optimizer: got {kind!r}, expected muon or adamw")
    trained = [(name, parameter) for name, parameter in head.named_parameters() if parameter.requires_grad]
    if not trained:
        raise InputError("head: no parameter is trainable; unfreeze at least one (requires_grad)")

    def hidden(name: str, parameter: Tensor) -> bool:
        return kind == "muon" and parameter.ndim == 2 and not any(part in name for part in ADAMW_NAMES)

    members: dict[str, torch.optim.Optimizer] = {}
    matrices = [parameter for name, parameter in trained if hidden(name, parameter)]
    rest = [parameter for name, parameter in trained if not hidden(name, parameter)]
    if matrices:
        members["muon"] = Muon(
            matrices, muon_learning_rate, weight_decay=weight_decay, dtype=dtype, parts=fused_rows(head)
        )
    if rest:
        members["adamw"] = torch.optim.AdamW(
            rest, learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True
        )
    return Optimizers(members)


def schedule_factor(kind: str, step: int, warmup_steps: int, progress: float) -> float:
    """Learning-rate factor of the optimiser step with number ``step`` (0 is the first).

    A linear warm-up over ``warmup_steps`` times a decay over ``progress`` (0 at the start, 1 at the end of the
    budget, in steps or in time) that ends at 0.
    """
    warmup = min(1.0, (step + 1) / max(1, warmup_steps))
    progress = min(1.0, max(0.0, progress))
    return warmup * (0.5 * (1 + math.cos(math.pi * progress)) if kind == "cosine" else 1 - progress)
