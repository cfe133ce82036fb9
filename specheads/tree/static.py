"""Static draft trees in Medusa's format (Cai et al. 2024): one shape for every step, filled with ranked candidates.

A path is a tuple of ranks: ``(0, 2)`` is the third-best token of head 2 under the best token of head 1. Nodes are
sorted by (length, ranks), the root is node 0:

    paths      (0,) (0, 0) (1,)        root ── 0 ── 00
    nodes      root (0,) (1,) (0, 0)    └── 1
    parents    -1   0    0    1

Legend: B rows, N tree nodes (root included), K draft steps (heads), R ranks a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specheads.tree.build import lineage
from specheads.tree.draft_tree import DraftTree
from specheads.utils import InputError

Path = tuple[int, ...]


@dataclass(frozen=True)
class TreeBuffers:
    """What a static shape fixes once and for all (CPU tensors)."""

    parents: Tensor  # N int64, -1 for the root
    depths: Tensor  # N int64
    ranks: Tensor  # N int64: rank of the node among its head's candidates (0 for the root)
    ancestors: Tensor  # N N bool: the tree mask


@dataclass(frozen=True)
class StaticTree:
    """A prefix-closed set of rank paths, kept sorted by (length, ranks).

    Raises:
        InputError: an empty or repeated path, a rank that is not a whole number >= 0, or a path without its prefix.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        paths = [tuple(path) for path in self.paths]
        known = {(), *paths}
        for path in paths:
            if not path or any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in path):
                raise InputError(f"tree: got path {path!r}, expected ranks >= 0 such as (0, 1); mend or drop the path")
            if path[:-1] not in known:
                raise InputError(f"tree: path {path!r} came without its prefix {path[:-1]!r}; add the prefix")
        if len(known) != len(paths) + 1:
            raise InputError("tree: a path came twice, expected each once; drop the repeated one")
        object.__setattr__(self, "paths", tuple(sorted(paths, key=lambda path: (len(path), path))))

    @classmethod
    def of(cls, paths: Iterable[Sequence[int]]) -> StaticTree:
        """From any nested sequence, such as a Medusa tree read from JSON."""
        return cls(tuple(tuple(path) for path in paths))

    @property
    def size(self) -> int:
        """Nodes, root included."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """Longest path: how many heads the tree asks."""
        return max((len(path) for path in self.paths), default=0)

    @property
    def width(self) -> int:
        """Candidates a head must give: the highest rank + 1."""
        return max((max(path) + 1 for path in self.paths), default=1)

    @cached_property
    def buffers(self) -> TreeBuffers:
        """Parents, depths, ranks and mask of the nodes."""
        number = {(): 0, **{path: index + 1 for index, path in enumerate(self.paths)}}
        parents = torch.tensor([-1, *(number[path[:-1]] for path in self.paths)])
        ancestors, depths = lineage(parents[None])
        return TreeBuffers(parents, depths[0], torch.tensor([0, *(path[-1] for path in self.paths)]), ancestors[0])

    def cut(self, depth: int, width: int) -> StaticTree:
        """The paths that ``depth`` heads of ``width`` candidates can fill."""
        return StaticTree(tuple(path for path in self.paths if len(path) <= depth and max(path) < width))

    def draft(self, root: Tensor, candidates: Tensor, log_probs: Tensor | None = None) -> DraftTree:
        """Fill the shape. root: B; candidates, log_probs: B K R, best first -> tree of N nodes a row.

        The score of a node is the sum of ``log_probs`` along its path.
        """
        rows, device = root.shape[0], root.device
        shape = self.buffers
        parents, depths, ranks = (x.to(device) for x in (shape.parents, shape.depths, shape.ranks))
        cells = ((depths - 1) * candidates.shape[2] + ranks).clamp(min=0).expand(rows, -1)  # B N into K * R
        tokens = candidates.flatten(1).gather(1, cells)
        tokens[:, 0] = root
        ancestors = shape.ancestors.to(device)
        scores = None
        if log_probs is not None:
            own = log_probs.flatten(1).gather(1, cells).float()
            own[:, 0] = 0.0
            scores = own @ ancestors.float().T  # B N: sum over the path
        return DraftTree(
            tokens,
            parents.expand(rows, -1),
            depths.expand(rows, -1),
            ancestors.expand(rows, -1, -1),
            torch.ones(rows, self.size, dtype=torch.bool, device=device),
            scores,
        )


def within(paths: Iterable[Sequence[int]], depth: int, width: int, nodes: int) -> StaticTree:
    """The first ``nodes`` - 1 of ``paths`` (in order of gain, parents first) that ``depth`` heads of ``width``
    candidates can fill: the best tree of these limits, since the trees that ``best_paths`` grows are nested."""
    fitting = [path for path in paths if len(path) <= depth and max(path) < width]
    return StaticTree.of(fitting[: nodes - 1])


def best_paths(rank_accuracy: Sequence[Sequence[float]] | Tensor, nodes: int) -> tuple[Path, ...]:
    """Greedy best-first search for the tree with the highest expected acceptance (Medusa, appendix on tree search).

    rank_accuracy: K R, [k][r] = how often head k's rank-r guess was the target's token; a node's value is the product
    along its path. ``nodes``: the most nodes, root included (less when the heads give fewer, or when no remaining path
    has any value). The paths come in order of gain, a parent before its children.

    Raises:
        InputError: nodes < 1, an empty table, or a table entry outside [0, 1].
    """
    table = [[float(value) for value in row] for row in rank_accuracy]
    if nodes < 1:
        raise InputError(f"tree nodes: got {nodes}, expected >= 1 (the root counts); raise it")
    if not table or any(not row or not all(0 <= value <= 1 for value in row) for row in table):
        raise InputError("rank_accuracy: expected K non-empty rows of shares in [0, 1]; measure the head again")
    # (-value, path): values of a frontier only fall, so nodes come out best first, and ties in path order
    frontier: list[tuple[float, Path]] = [(-value, (rank,)) for rank, value in enumerate(table[0])]
    heapq.heapify(frontier)
    chosen: list[Path] = []
    while len(chosen) + 1 < nodes and frontier and frontier[0][0] < 0:
        value, path = heapq.heappop(frontier)
        chosen.append(path)
        if len(path) < len(table):
            for rank, accuracy in enumerate(table[len(path)]):
                heapq.heappush(frontier, (value * accuracy, (*path, rank)))
    return tuple(chosen)
