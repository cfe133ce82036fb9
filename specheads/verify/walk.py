"""From the target's choice at every node to the accepted path, without a loop over nodes.

Legend: B rows, N tree nodes (root included).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specheads.tree.draft_tree import DraftTree
from specheads.types import Verdict


def walk(tree: DraftTree, choices: Tensor) -> Verdict:
    """Follow ``choices`` (B N: the target's own next token after each node) down from the root.

    A node is accepted iff it and all its ancestors equal their parent's choice; choices at nodes that are not accepted
    are not read. Siblings carry distinct tokens, so the accepted nodes are one path with one node a depth. Example,
    root 7 with children 3 and 9, and 4 under 3:

        tokens 7 3 9 4   parents -1 0 0 1   choices 3 4 . 5   ->   path 0 1 3, counts 3, bonus 5
    """
    rows, nodes = tree.tokens.shape
    agrees = (tree.tokens == choices.gather(1, tree.parents.clamp(min=0))) & tree.valid
    agrees[:, 0] = True
    accepted = ~(tree.ancestors & ~agrees[:, None, :]).any(-1)  # B N; padding disagrees with itself
    counts = accepted.sum(-1)
    # every accepted node goes to the column of its depth, all others to a column that is cut off
    column = tree.depths.masked_fill(~accepted, nodes)
    own = torch.arange(nodes, device=choices.device).expand(rows, nodes)
    path = own.new_zeros(rows, nodes + 1).scatter_(1, column, own)[:, :nodes]
    last = path.gather(1, counts[:, None] - 1)
    return Verdict(path, counts, choices.gather(1, last).squeeze(1))
