"""The draft tree: B rows of N candidate tokens with their parents.

Node 0 is the root: the last token that is already decided but not yet in the target's cache. Nodes are in
topological order (a parent comes before its children), siblings carry distinct tokens, and padding nodes (rows of
unequal size) stand at the end with ``parents == -1``.

    tokens   [7, 3, 9, 4]        7 ── 3 ── 4
    parents  [-1, 0, 0, 1]        └── 9
    depths   [0, 1, 1, 2]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class DraftTree:
    """Candidate continuations of B rows."""

    tokens: Tensor  # B N int64
    parents: Tensor  # B N int64: parent's node id; -1 for the root and for padding
    depths: Tensor  # B N int64: 0 for the root (and for padding)
    ancestors: Tensor  # B N N bool: [b, i, j] = node j is node i or an ancestor of it (the tree mask)
    valid: Tensor  # B N bool: False for padding
    scores: Tensor | None = None  # B N float32: log of the estimated chance that the node is accepted (root 0)

    @property
    def size(self) -> int:
        """Nodes a row, root and padding included."""
        return self.tokens.shape[1]

    @classmethod
    def root_only(cls, root: Tensor) -> DraftTree:
        """A tree without drafts: plain decoding's step. ``root``: B."""
        rows, device = root.shape[0], root.device
        ones = torch.ones(rows, 1, dtype=torch.bool, device=device)
        zeros = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        return cls(root[:, None], zeros - 1, zeros, ones[:, :, None], ones, zeros.float())
