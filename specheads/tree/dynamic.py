"""Dynamic draft trees: the shape follows the draft's own confidence (EAGLE-2, Li et al. 2024).

Grow: every level expands its best ``top_k`` nodes by ``top_k`` children each; rerank: of all candidates ever made,
the ``total_nodes - 1`` with the highest cumulative log-probability become the tree.

Legend: B rows, W nodes of a level, k children a node, M candidates of the pool, N tree nodes (root included), D draft
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.tree.build import build_tree
from specheads.tree.draft_tree import DraftTree
from specheads.utils import InputError


@dataclass(frozen=True)
class DynamicTree:
    """Limits of a dynamic tree.

    ``depth``: longest draft; ``top_k``: nodes kept a level and children a node; ``total_nodes``: size of the tree that
    is verified, root included (EAGLE's ``total_token``).

    Raises:
        InputError: a limit below 1.
    """

    depth: int = 5
    top_k: int = 4
    total_nodes: int = 24

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "total_nodes"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"tree.{name}: got {value!r}, expected a whole number >= 1; mend the tree section")

    def fitted(self, vocab_size: int) -> DynamicTree:
        """The same limits, none larger than what can exist: top_k <= vocabulary, total_nodes <= all candidates."""
        top_k = min(self.top_k, vocab_size)
        return DynamicTree(self.depth, top_k, min(self.total_nodes, 1 + top_k + (self.depth - 1) * top_k * top_k))


def best_children(log_probs: Tensor, scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The ``top_k`` children of every node of a level. log_probs: B W D; scores: B W -> tokens, scores: B W k."""
    own, tokens = log_probs.topk(min(top_k, log_probs.shape[-1]), dim=-1)
    return tokens, scores[..., None] + own.clamp(max=0).float()


def next_beam(scores: Tensor, top_k: int) -> Tensor:
    """Which of a level's candidates (scores: B M) are expanded next -> B W indices, best first."""
    return scores.topk(min(top_k, scores.shape[1]), dim=1).indices


def rerank(root: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, total_nodes: int) -> DraftTree:
    """The best ``total_nodes - 1`` candidates as a tree.

    root: B; tokens, scores, parents: B M, the pool, parents before children; ``scores`` cumulative (never above the
    parent's; -inf = no candidate), ``parents`` pool indices, -1 for children of the root. Equal scores are taken in
    pool order, which puts a parent before its child: the tree is closed under ancestors even where a child is certain
    and ties with its parent.
    """
    pool = tokens.shape[1]
    kept = min(total_nodes - 1, pool)
    if kept < 1:
        return DraftTree.root_only(root)
    best = scores.sort(dim=1, descending=True, stable=True)
    chosen = best.indices[:, :kept].masked_fill(best.values[:, :kept] == -torch.inf, pool)
    chosen = chosen.sort(dim=1).values  # B N-1: pool order again, what is no candidate at the end
    absent = chosen == pool
    chosen_or_0 = chosen.masked_fill(absent, 0)
    old_parents = parents.gather(1, chosen_or_0)
    new_parents = torch.searchsorted(chosen, old_parents.clamp(min=0)) + 1  # node 0 is the root
    new_parents = new_parents.masked_fill(old_parents < 0, 0).masked_fill(absent, -1)
    new_scores = scores.gather(1, chosen_or_0).float().masked_fill(absent, -torch.inf)
    zeros = torch.zeros_like(root)[:, None]
    return build_tree(
        torch.cat([root[:, None], tokens.gather(1, chosen_or_0).masked_fill(absent, 0)], dim=1),
        torch.cat([zeros - 1, new_parents], dim=1),
        torch.cat([zeros.float(), new_scores], dim=1),
    )
