"""Making, checking and cutting draft trees, vectorised over rows and nodes.

Legend: B rows, N tree nodes (root included), M nodes kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specheads.tree.draft_tree import DraftTree


def lineage(parents: Tensor) -> tuple[Tensor, Tensor]:
    """parents B N -> ancestors B N N bool (self included) and depths B N.

    Pointer doubling: after k rounds a node knows its ancestors up to 2^k - 1 steps above, so the number of rounds
    is log2(N) whatever the shape. A node without a parent (the root, padding) is its own only ancestor.
    """
    rows, nodes = parents.shape
    own = torch.arange(nodes, device=parents.device)
    hop = torch.where(parents < 0, own, parents)
    ancestors = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(rows, nodes, nodes)
    for _ in range(max(nodes - 1, 0).bit_length()):
        ancestors = ancestors | ancestors.gather(1, hop[:, :, None].expand(rows, nodes, nodes))
        hop = hop.gather(1, hop)
    return ancestors, ancestors.sum(-1) - 1


def build_tree(tokens: Tensor, parents: Tensor, scores: Tensor | None = None) -> DraftTree:
    """A tree from tokens and parents (B N, node 0 the root, -1 for padding after the last node).

    scores: B N, log of the estimated chance that the node is accepted.
    """
    ancestors, depths = lineage(parents)
    valid = parents >= 0
    valid[:, 0] = True
    return DraftTree(tokens, parents, depths, ancestors, valid, scores)


def keep_nodes(tree: DraftTree, keep: Tensor, size: int | None = None) -> DraftTree:
    """The tree of the nodes ``keep`` (B N bool), in their old order; rows with fewer nodes are padded.

    ``keep`` must hold the root and, with a node, all its ancestors. ``size``: the largest number of kept nodes of a
    row, if the caller knows it already (saves a read from the device).
    """
    rows = keep.shape[0]
    counts = keep.sum(1)
    size = int(counts.max()) if size is None else size
    order = (~keep).to(torch.uint8).sort(dim=1, stable=True).indices[:, :size]  # B M: kept nodes first, in order
    valid = torch.arange(size, device=keep.device) < counts[:, None]
    renamed = keep.cumsum(1) - 1  # B N: old id -> new id
    old_parents = tree.parents.gather(1, order)
    parents = renamed.gather(1, old_parents.clamp(min=0)).masked_fill(~valid | (old_parents < 0), -1)
    lines = tree.ancestors.gather(1, order[:, :, None].expand(rows, size, tree.size))
    ancestors = lines.gather(2, order[:, None, :].expand(rows, size, size)) & valid[:, :, None] & valid[:, None, :]
    ancestors = ancestors | torch.eye(size, dtype=torch.bool, device=keep.device)
    depths = tree.depths.gather(1, order) * valid
    tokens = tree.tokens.gather(1, order) * valid
    scores = None if tree.scores is None else tree.scores.gather(1, order).masked_fill(~valid, -torch.inf)
    return DraftTree(tokens, parents, depths, ancestors, valid, scores)


def cut_depth(tree: DraftTree, rooms: Tensor) -> DraftTree:
    """The tree without the nodes deeper than ``rooms`` (B): near a limit, deeper drafts could never be used."""
    return keep_nodes(tree, tree.valid & (tree.depths <= rooms[:, None]))


def check_tree(tree: DraftTree) -> None:
    """Refuse a tree that the decoder could not verify exactly.

    Raises:
        ValueError: naming the first rule that is broken: node 0 is the only root, parents come before their
            children, padding stands at the end, siblings carry distinct tokens, depths and ancestors fit the parents.
    """
    valid, parents = tree.valid, tree.parents
    nodes = tree.size
    own = torch.arange(nodes, device=parents.device)
    if not bool(valid[:, 0].all()) or not bool((parents[:, 0] == -1).all()):
        raise ValueError("draft tree: node 0 must be the root (valid, parent -1)")
    if bool((valid[:, 1:] & ~valid[:, :-1]).any()):
        raise ValueError("draft tree: padding must stand after the last node of a row")
    inner = valid.clone()
    inner[:, 0] = False
    if bool((inner & ((parents < 0) | (parents >= own))).any()):
        raise ValueError("draft tree: a node's parent must be present and come before it")
    if bool((~valid & (parents != -1)).any()):
        raise ValueError("draft tree: padding must have parent -1")
    twins = (parents[:, :, None] == parents[:, None, :]) & (tree.tokens[:, :, None] == tree.tokens[:, None, :])
    twins &= inner[:, :, None] & inner[:, None, :] & (own[:, None] != own)
    if bool(twins.any()):
        raise ValueError("draft tree: siblings must carry distinct tokens")
    ancestors, depths = lineage(parents)
    if not torch.equal(depths, tree.depths) or not torch.equal(ancestors, tree.ancestors):
        raise ValueError("draft tree: depths and ancestors must follow from the parents")
