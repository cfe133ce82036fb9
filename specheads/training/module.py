"""The head's training step as a module's forward."""

from __future__ import annotations

from torch import nn

from specheads.heads.base import Head
from specheads.types import FrozenParts, HeadInputs, StepOutput


class TrainingModule(nn.Module):
    """The head's training step as a ``forward``, which data parallelism needs.

    ``FrozenParts`` is no module, so the target is neither a parameter nor a child of this one. With ``anchored`` every
    trainable parameter takes part in the loss with weight zero: a micro-batch that leaves some (or all) unused still
    gives each rank the same gradients to exchange.
    """

    def __init__(self, head: Head, parts: FrozenParts, anchored: bool) -> None:
        super().__init__()
        self.head = head
        self.parts = parts
        self.anchored = anchored

    def forward(self, inputs: HeadInputs) -> StepOutput:
        """The head's step; its loss always has a gradient."""
        out = self.head.training_step(inputs, self.parts)
        if self.anchored or not out.loss.requires_grad:
            anchor = sum(p.flatten()[0] * 0.0 for p in self.head.parameters() if p.requires_grad)
            out.loss = out.loss + anchor
        return out
