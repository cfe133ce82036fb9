"""Lossless sampling over a deterministic draft tree.

The published rule (speculative sampling, Leviathan et al. 2023, Chen et al. 2023, over the tree of EAGLE-2 whose draft
distribution is one-hot) takes the children x1, x2, ... of an accepted node in turn: accept xi with chance p(xi), else
set p(xi) to 0 and renormalise; if none is accepted, the bonus token comes from what is left of p. Child xi is then
accepted with chance p(xi) in all, and every other token is the bonus with its own p. That is one draw from p: if the
draw is a child, accept it, else it is the bonus. So every node of the path draws one token from the target's
distribution at that node, and the draws are followed: exactly the law of the target's plain sampling, with no
division by a remainder that could be 0.

Legend: B rows, N tree nodes (root included), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specheads.sampling import pick
from specheads.tree.draft_tree import DraftTree
from specheads.types import SamplingParams, Verdict
from specheads.verify.walk import walk


def verify_sampling(
    tree: DraftTree, logits: Tensor, params: SamplingParams, generator: torch.Generator | None = None
) -> Verdict:
    """logits: B N V of the tree's nodes. The emitted tokens follow ``sampling.probabilities`` at every position.

    Draws are made level by level for the nodes that are reached: a vocabulary-long distribution at each of N nodes,
    of which one path is read, would cost more than the draft saves.
    """
    rows = torch.arange(tree.tokens.shape[0], device=logits.device)
    choices = torch.full_like(tree.tokens, -1)  # B N: -1 where the walk never comes
    current = torch.zeros_like(rows)  # B: the last accepted node
    live = rows  # the rows whose path may still grow
    while len(live):
        node = current[live]
        drawn = pick(logits[live, node], params, generator)
        choices[live, node] = drawn
        child = (tree.parents[live] == node[:, None]) & (tree.tokens[live] == drawn[:, None])
        grows = child.any(-1)
        live = live[grows]
        current[live] = child[grows].to(torch.uint8).argmax(-1)
    return walk(tree, choices)
