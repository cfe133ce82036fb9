"""Draft trees as numpy arrays on the host, where the drafters that train nothing do their bookkeeping.

A step's bookkeeping is a few hundred operations on a few dozen numbers: numpy starts each in about a microsecond,
torch in five, an accelerator in more. Everything stays vectorised over rows and nodes.

Legend: B rows, N tree nodes (root included), D deepest common depth, M pooled candidates (no root).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specheads.tree.draft_tree import DraftTree

Array = np.ndarray


@dataclass
class HostTree:
    """The fields of ``DraftTree`` as arrays."""

    tokens: Array  # B N int64
    parents: Array  # B N int64
    depths: Array  # B N int64
    ancestors: Array  # B N N bool
    valid: Array  # B N bool
    scores: Array | None  # B N float: cumulative logs

    @classmethod
    def of(cls, tree: DraftTree) -> HostTree:
        """Copies from an accelerator, shares memory on the CPU."""
        tokens, parents, depths = (x.cpu().numpy() for x in (tree.tokens, tree.parents, tree.depths))
        scores = None if tree.scores is None else tree.scores.cpu().numpy()
        return cls(tokens, parents, depths, tree.ancestors.cpu().numpy(), tree.valid.cpu().numpy(), scores)

    def to(self, device: torch.device) -> DraftTree:
        """As the decoder takes it."""

        def tensor(array: Array) -> Tensor:
            return torch.from_numpy(array).to(device)

        arrays = (self.tokens, self.parents, self.depths, self.ancestors, self.valid)
        tokens, parents, depths, ancestors, valid = (tensor(array) for array in arrays)
        scores = None if self.scores is None else tensor(self.scores.astype(np.float32))
        return DraftTree(tokens, parents, depths, ancestors, valid, scores)


@dataclass
class Pool:
    """Candidates of one step, parents before their children."""

    tokens: Array  # B M
    scores: Array  # B M: cumulative logs, never above the parent's; -inf = no candidate
    parents: Array  # B M: pool indices, -1 = child of the root

    @classmethod
    def of(cls, tree: HostTree, scores: Array) -> Pool:
        """The nodes of one tree. scores: B N."""
        return cls(tree.tokens[:, 1:], scores[:, 1:], np.maximum(tree.parents[:, 1:] - 1, -1))


def paths(tree: HostTree, depth: int) -> Array:
    """B N depth: the tokens from below the root down to each node, -1 beyond it."""
    rows, nodes = tree.tokens.shape
    out = np.full((rows, nodes, depth + 1), -1)
    row, node, ancestor = np.nonzero(tree.ancestors)
    column = tree.depths[row, ancestor]
    column[column > depth] = 0  # column 0 takes the root and what lies too deep, and is cut off
    out[row, node, column] = tree.tokens[row, ancestor]
    return out[:, :, 1:]


def merge(first: HostTree, first_scores: Array, second: HostTree, second_scores: Array) -> Pool:
    """The union of two trees with the same root: the first's nodes, then those of the second that it lacks.

    A node that both propose has the chance that not both are wrong about it, and at least the greater of theirs.
    """
    size = first.tokens.shape[1]
    if size == 1 or second.tokens.shape[1] == 1:
        return Pool.of(second, second_scores) if size == 1 else Pool.of(first, first_scores)
    depth = int(min(first.depths.max(), second.depths.max()))
    same = (paths(first, depth)[:, None] == paths(second, depth)[:, :, None]).all(-1)  # B N2 N1
    same &= (first.depths[:, None] == second.depths[:, :, None]) & first.valid[:, None] & second.valid[:, :, None]
    row, twin, place = np.nonzero(same)  # node ``twin`` of the second is node ``place`` of the first
    other = np.full_like(first_scores, -np.inf)
    other[row, place] = second_scores[row, twin]
    with np.errstate(divide="ignore"):
        either = np.log1p(-(1 - np.exp(first_scores)) * (1 - np.exp(other)))
    # the greatest of the three, so that rounding lifts no child above its parent
    joint = np.maximum(np.maximum(first_scores, other), either)
    renamed = np.broadcast_to(size + np.arange(second.tokens.shape[1]), second.tokens.shape).copy()
    renamed[row, twin] = place
    rows = np.arange(len(renamed))[:, None]
    new_parents = np.where(second.parents < 0, -1, renamed[rows, np.maximum(second.parents, 0)])
    rest = second_scores.copy()
    rest[row, twin] = -np.inf
    return Pool(
        np.concatenate([first.tokens, second.tokens], 1)[:, 1:],
        np.concatenate([joint, rest], 1)[:, 1:],
        np.maximum(np.concatenate([first.parents, new_parents], 1)[:, 1:] - 1, -1),
    )


def best_tree_of(root: Array, pool: Pool, size: int) -> HostTree:
    """The best ``size - 1`` candidates as a tree (``tree.dynamic.rerank`` on the host). root: B.

    Equal scores are taken in pool order, a parent before its child, so the tree stays closed under ancestors.
    """
    rows, many = pool.tokens.shape
    row = np.arange(rows)[:, None]
    chosen = np.argsort(-pool.scores, axis=1, kind="stable")[:, : size - 1]
    chosen = np.sort(np.where(pool.scores[row, chosen] == -np.inf, many, chosen), axis=1)  # absent ones at the end
    valid = np.concatenate([np.ones((rows, 1), bool), chosen < many], 1)
    nodes = valid.shape[1]
    # pool index -> node; -1 (child of the root) reads the last column, which says node 0; absent ones write there first
    number = np.zeros((rows, many + 1), np.int64)
    number[row, chosen] = np.arange(1, nodes)
    number[:, many] = 0
    chosen = np.minimum(chosen, many - 1)
    parents = np.full((rows, nodes), -1)
    parents[:, 1:] = np.where(valid[:, 1:], number[row, pool.parents[row, chosen]], -1)
    tokens = np.concatenate([root[:, None], pool.tokens[row, chosen]], 1) * valid
    scores = np.zeros((rows, nodes))
    scores[:, 1:] = np.where(valid[:, 1:], pool.scores[row, chosen], -np.inf)
    ancestors = np.broadcast_to(np.eye(nodes, dtype=bool), (rows, nodes, nodes))
    hop = np.where(parents < 0, np.arange(nodes), parents)
    while True:  # pointer doubling, see tree.build.lineage
        ancestors = ancestors | ancestors[row, hop]
        further = hop[row, hop]
        if (further == hop).all():
            break
        hop = further
    return HostTree(tokens, parents, ancestors.sum(-1) - 1, ancestors, valid, scores)
