"""Greedy verification: a draft is accepted where it is the target's own best token (ties: the lowest id)."""

from __future__ import annotations

import torch
from torch import Tensor

from specheads.sampling import greedy
from specheads.tree.draft_tree import DraftTree
from specheads.types import SamplingParams, Verdict
from specheads.verify.walk import walk


def verify_greedy(
    tree: DraftTree, logits: Tensor, params: SamplingParams, generator: torch.Generator | None = None
) -> Verdict:
    """logits: B N V of the tree's nodes. The emitted tokens are those of the target's own greedy decoding."""
    return walk(tree, greedy(logits))
