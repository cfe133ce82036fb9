"""Sums over micro-batches and ranks, and the numbers shown of them.

Chain acceptance length: tau = 1 + sum over k of (joint hits at draft step k / positions judged at step k). The 1 is
the target's own (bonus) token; step k counts only where steps 0..k were all the target's argmax, so this is what a
greedy chain of K drafts would reach on this text, teacher-forced.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from specheads.types import StepOutput


class Totals:
    """Sums of ``StepOutput`` in fp64 on the CPU: loss, supervised positions, tokens read, and per draft step the hits,
    joint hits and judged positions. Rank-wise until ``reduce``."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.count = 0
        self.tokens = 0
        self.steps = torch.zeros(3, 0, dtype=torch.float64)  # 3 K: hits, joint hits, judged positions

    def add(self, out: StepOutput, tokens: int) -> None:
        """One micro-batch of ``tokens`` real (unpadded) tokens."""
        self.loss += float(out.loss.detach())
        self.count += int(out.count)
        self.tokens += tokens
        self._add_steps(torch.stack([out.hits, out.joint_hits, out.steps]).detach().cpu().double())

    def merge(self, other: Totals) -> None:
        """Add another sum to this one."""
        self.loss += other.loss
        self.count += other.count
        self.tokens += other.tokens
        self._add_steps(other.steps)

    def reduce(self, accelerator: Accelerator, most_steps: int = 16) -> None:
        """Sum over all ranks, in place. A collective: every rank calls it. ``most_steps``: room for draft steps, equal
        on all ranks, so that a rank whose share was empty still takes part."""
        if accelerator.num_processes == 1:
            return
        room = torch.zeros(3, max(most_steps, self.steps.shape[1]), dtype=torch.float64)
        room[:, : self.steps.shape[1]] = self.steps
        plain = torch.tensor([self.loss, self.count, self.tokens, *room.flatten().tolist()], dtype=torch.float64)
        summed = accelerator.reduce(plain.to(accelerator.device), "sum").cpu()
        self.loss, self.count, self.tokens = float(summed[0]), int(summed[1]), int(summed[2])
        self.steps = summed[3:].view(3, -1)
        judged = int((self.steps[2] > 0).sum())
        self.steps = self.steps[:, :judged]

    def _add_steps(self, steps: Tensor) -> None:
        if steps.shape[1] > self.steps.shape[1]:
            steps, self.steps = self.steps, steps.clone()
        self.steps[:, : steps.shape[1]] += steps

    def summary(self) -> dict[str, Any]:
        """``loss`` per supervised position, ``tau``, ``acceptance`` (joint, by step) and ``hits`` (by step alone)."""
        judged = self.steps[2].clamp(min=1)
        joint = (self.steps[1] / judged).tolist()
        return {
            "loss": self.loss / max(1, self.count),
            "tau": 1 + sum(joint),
            "acceptance": joint,
            "hits": (self.steps[0] / judged).tolist(),
            "positions": self.count,
        }
