"""How many nodes to verify: what a forward costs on this machine against what a node may bring.

Expected tokens of a step over N nodes are 1 (the bonus token) and, for every node but the root, the chance that it is
accepted. The best N depends on the machine (a forward over 16 nodes may cost as much as over 4, or three times that),
so the costs are measured, never assumed.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike

from specheads.target.adapter import Target
from specheads.utils import InputError

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48)
PROBE_CONTEXT = 128  # committed positions behind which the probe's nodes stand


class StepCosts:
    """Milliseconds of one target forward by the number of nodes: never falling, linear between the measured sizes.

    Raises:
        InputError: no sizes, or a size or time that is not positive.
    """

    def __init__(self, milliseconds_by_size: Mapping[int, float]) -> None:
        points = sorted(milliseconds_by_size.items())
        if not points or points[0][0] < 1 or any(not cost > 0 for _, cost in points):
            raise InputError(f"step costs: got {dict(points)}, expected milliseconds > 0 for sizes >= 1; measure again")
        self.sizes = [size for size, _ in points]
        self.costs = _never_falling([cost for _, cost in points])
        self._table = np.array([self.milliseconds(nodes) for nodes in range(1, 2 * self.sizes[-1] + 1)])

    @classmethod
    def probe(cls, target: Target, sizes: Sequence[int] = SIZES, seconds: float = 2.0) -> StepCosts:
        """Time forwards of every size in turn, the best of as many rounds as ``seconds`` allow (at least one forward
        each of the two smallest sizes; the sizes that a slow target leaves out follow the last slope)."""
        context = max(1, min(PROBE_CONTEXT, target.config.context_limit - max(sizes)))
        sizes = sorted({min(size, target.config.context_limit - context) for size in sizes})
        ids = torch.arange(context + max(sizes), device=target.device)[None] % target.config.vocab_size
        best: dict[int, float] = {}
        start = time.perf_counter()
        with torch.inference_mode():
            cache = target.new_cache(1, context + max(sizes))
            target.forward(ids[:, :context], cache=cache, logits="none")
            cache.commit(
                ids[:, :context] * 0 + torch.arange(context, device=ids.device), cache.lengths + context, context
            )
            while True:
                round_start = time.perf_counter()
                for size in sizes:
                    began = time.perf_counter()
                    logits = target.forward(ids[:, :size], cache=cache).logits
                    assert logits is not None
                    float(logits[0, -1, 0])  # an accelerator answers only when a value is read
                    now = time.perf_counter()
                    best[size] = min(best.get(size, float("inf")), 1000 * (now - began))
                    if now - start > seconds and len(best) >= min(2, len(sizes)):
                        return cls(best)
                if 2 * time.perf_counter() - round_start - start > seconds:
                    return cls(best)

    def milliseconds(self, nodes: int) -> float:
        """A forward over ``nodes`` tokens (all rows together)."""
        if len(self.sizes) == 1:
            return self.costs[0]
        right = min(max(bisect_right(self.sizes, nodes), 1), len(self.sizes) - 1)
        low, high = self.sizes[right - 1], self.sizes[right]
        slope = (self.costs[right] - self.costs[right - 1]) / (high - low)
        return max(self.costs[right - 1] + slope * (nodes - low), self.costs[0])

    def table(self, largest: int, rows: int = 1) -> np.ndarray:
        """[N-1] = milliseconds of a forward over ``rows`` trees of N nodes, N = 1..largest."""
        if rows * largest > len(self._table):
            return np.array([self.milliseconds(rows * nodes) for nodes in range(1, largest + 1)])
        return self._table[rows - 1 : rows * largest : rows]


def best_size(
    chances: ArrayLike, costs: StepCosts, draft_ms: float = 0.0, rows: int = 1, rate: float | None = None
) -> int:
    """The number of nodes a row, root included, that brings the most tokens per millisecond.

    chances: that a node is accepted, best first, the root's 1.0 included; of several rows the mean chance by rank. It
    maximises ``tokens / (milliseconds + draft_ms)`` of this step alone. With ``rate`` (tokens per millisecond of the
    whole call so far) it maximises ``tokens - rate * milliseconds`` instead: the time of a step is time taken from the
    others, so a promising step may spend more than a poor one.
    """
    expected = np.asarray(chances, dtype=np.float64).cumsum() * rows
    cost = costs.table(len(expected), rows)
    worth = expected / (cost + draft_ms) if rate is None else expected - rate * cost
    return int(worth.argmax()) + 1


def _never_falling(values: list[float]) -> list[float]:
    """The closest sequence that never falls (pool adjacent violators): timing noise is shared, not passed on."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
            (high, many), (low, few) = blocks[-2], blocks[-1]
            blocks[-2:] = [((high * many + low * few) / (many + few), many + few)]
    return [mean for mean, count in blocks for _ in range(count)]
