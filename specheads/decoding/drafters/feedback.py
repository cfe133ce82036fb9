"""What a drafter learns during a call: what the target wrote where it had drafted.

Legend: B rows, P longest accepted path, N tree nodes (root included).
"""

from __future__ import annotations

import numpy as np

from specheads.decoding.drafters.host_tree import Array, HostTree

DEEPEST = 16  # deeper drafts share one correction
PRIOR_WEIGHT = 6.0  # expected acceptances for which the first correction (none) counts


def continuation(tokens: Array, counts: Array, root: Array) -> Array:
    """The target's own words after the last root: B P, -1 where nothing is known.

    tokens, counts: as in ``Drafter.accept`` (the old root first); root: B, the next root. With tokens x3 x4 x5, count
    3 and root x6 it is x4 x5 x6.
    """
    steps = np.arange(tokens.shape[1])
    shifted = np.concatenate([tokens[:, 1:], root[:, None]], axis=1)
    last = counts[:, None] - 1
    return np.where(steps < last, shifted, np.where(steps == last, root[:, None], -1))


class Calibration:
    """Corrects the chances that a draft claims, by depth: claimed chance x (acceptances seen / acceptances claimed).

    A head trained for minutes is too sure of itself; a tree sized by its own word would be too large.
    """

    def __init__(self) -> None:
        self._seen = np.full(DEEPEST + 1, PRIOR_WEIGHT)
        self._claimed = np.full(DEEPEST + 1, PRIOR_WEIGHT)
        self._own = np.zeros((0, 0))  # B N: chance claimed given the parent, of the last tree

    def corrected(self, tree: HostTree) -> Array:
        """Scores of the tree's nodes (B N) after correction: cumulative logs, never above the parent's, -inf for
        padding. A tree without scores claims one half for every node."""
        inner = tree.parents >= 0
        own = np.full(tree.tokens.shape, np.log(0.5))
        if tree.scores is not None:
            row = np.arange(len(own))[:, None]
            own = np.where(inner, tree.scores, 0) - np.where(inner, tree.scores[row, tree.parents], 0)
        own = own * inner
        self._own = np.exp(own)
        ratio = np.log(self._seen / self._claimed)
        own = np.minimum(own + ratio[np.minimum(tree.depths, DEEPEST)] * inner, 0)
        scores = (tree.ancestors * own[:, None, :]).sum(-1)
        # rounding must not lift a node above an ancestor: the tree is cut by score and has to stay closed
        scores = np.where(tree.ancestors, scores[:, None, :], np.inf).min(-1)
        return np.where(tree.valid, scores, -np.inf)

    def learn(self, tree: HostTree, truth: Array) -> Array:
        """Compare the last tree with what the target wrote (``continuation``); returns its right drafts (B)."""
        row = np.arange(len(truth))[:, None]
        inner = tree.parents >= 0
        padded = np.concatenate([truth, np.full((len(truth), 1), -1)], axis=1)
        word = padded[row, np.minimum(np.maximum(tree.depths - 1, 0), truth.shape[1])]  # B N
        agrees = (tree.tokens == word) | (tree.depths == 0)
        on_path = (agrees[:, None, :] >= tree.ancestors).all(-1) & inner  # every ancestor agrees
        judged = (on_path[row, tree.parents] | (tree.parents == 0)) & inner & (word >= 0)
        depth = np.minimum(tree.depths, DEEPEST).ravel()
        self._seen += np.bincount(depth, on_path.ravel(), DEEPEST + 1)
        self._claimed += np.bincount(depth, (self._own * judged).ravel(), DEEPEST + 1)
        return on_path.sum(-1)
