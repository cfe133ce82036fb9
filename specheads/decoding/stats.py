"""Counting what a decoder did, from ids and verdicts, into ``DecodeStats``."""

from __future__ import annotations

import time

from specheads.types import DecodeStats


class Counter:
    """Fills the ``DecodeStats`` of one call of ``rows`` rows.

    Acceptance is counted as the verifier decided it, before a row was cut at its end. Without cuts
    ``sum(emitted) / sum(target_forwards) == 1 + sum(accepted_at_least) / sum(target_forwards)``.
    """

    def __init__(self, rows: int) -> None:
        self.stats = DecodeStats(target_forwards=[0] * rows, emitted=[0] * rows)
        self.started = self._mark = time.perf_counter()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to ``<name>_seconds``. On an accelerator the host waits for results only
        when it reads the verdict: the target's own run time is then under ``verify``."""
        now = time.perf_counter()
        setattr(self.stats, f"{name}_seconds", getattr(self.stats, f"{name}_seconds") + now - self._mark)
        self._mark = now

    def restart(self) -> None:
        """Begin a lap here: what came before (a caller reading a stream) belongs to nobody."""
        self._mark = time.perf_counter()

    def step(self, row: int, drafted: int, accepted: int, emitted: int, nodes: int) -> None:
        """One verify step of a row: depth of its tree, accepted drafts, new tokens kept, nodes sent."""
        stats = self.stats
        stats.target_forwards[row] += 1
        stats.emitted[row] += emitted
        stats.tree_nodes += nodes
        _count(stats.drafted_at_least, drafted)
        _count(stats.accepted_at_least, accepted)

    @property
    def seconds(self) -> float:
        """Wall time since the call began."""
        return time.perf_counter() - self.started


def _count(at_least: list[int], depth: int) -> None:
    at_least.extend([0] * (depth - len(at_least)))
    for index in range(depth):
        at_least[index] += 1
