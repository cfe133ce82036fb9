"""Acceptance numbers against a step-by-step trace, and counters that contradict one another."""

from __future__ import annotations

import random

import pytest

from specheads.evaluation import acceptance
from specheads.types import DecodeStats


def trace(steps: list[int], depth: int, cut: int = 0) -> DecodeStats:
    """One row's counters from its accepted drafts by step; ``cut`` tokens of the last step are not emitted."""
    return DecodeStats(
        target_forwards=[len(steps)],
        emitted=[sum(steps) + len(steps) - cut],
        accepted_at_least=[sum(accepted >= d for accepted in steps) for d in range(1, depth + 1)],
        drafted_at_least=[len(steps)] * depth,
    )


@pytest.mark.parametrize("seed", range(5))
def test_tau_is_one_plus_the_joint_acceptance(seed: int) -> None:
    random.seed(seed)
    rows = [[random.randint(0, 4) for _ in range(random.randint(1, 9))] for _ in range(6)]
    stats = acceptance.merge(trace(steps, 4) for steps in rows)
    flat = [accepted for steps in rows for accepted in steps]
    assert acceptance.tau(stats) == pytest.approx(1 + sum(flat) / len(flat))
    assert acceptance.tau(stats) == pytest.approx(1 + sum(acceptance.acceptance_by_depth(stats)))
    assert acceptance.cut_tokens(stats) == 0
    per_row = [1 + sum(steps) / len(steps) for steps in rows]
    assert acceptance.tau_macro(stats) == pytest.approx(sum(per_row) / len(per_row))


def test_joint_and_conditional_acceptance_are_not_the_same() -> None:
    stats = trace([0, 1, 2, 2], depth=3)
    assert acceptance.acceptance_by_depth(stats) == [0.75, 0.5, 0.0]
    assert acceptance.conditional_acceptance(stats) == pytest.approx([0.75, 2 / 3, 0.0])
    stats.drafted_at_least = [3, 2, 0]  # the tree was not always that deep
    assert acceptance.acceptance_when_drafted(stats) == [1.0, 1.0, 0.0]


def test_a_cut_last_step_is_explained() -> None:
    stats = trace([1, 3], depth=3, cut=2)
    assert acceptance.cut_tokens(stats) == 2
    joint = sum(acceptance.acceptance_by_depth(stats))
    assert acceptance.tau(stats) == pytest.approx(1 + joint - 2 / 2)


def test_depths_of_unequal_trees_are_added() -> None:
    merged = acceptance.merge([trace([1], depth=1), trace([3], depth=3)])
    assert merged.accepted_at_least == [2, 1, 1]
    assert merged.target_forwards == [1, 1]


def test_no_step_no_tau() -> None:
    stats = DecodeStats([0], [0])
    assert acceptance.tau(stats) is None
    assert acceptance.tau_macro(stats) is None
    assert acceptance.acceptance_by_depth(stats) == []
    assert acceptance.cut_tokens(stats) == 0


@pytest.mark.parametrize(
    "stats",
    [
        DecodeStats([4], [9], [4], [4]),  # more tokens than accepted drafts and bonus tokens
        DecodeStats([4], [4], [3], [3]),  # three accepted drafts lost, one cut step explains one
        DecodeStats([4], [7], [1, 2], [4, 4]),  # deeper is more frequent
        DecodeStats([4], [6], [2], [1]),  # accepted what was never drafted
        DecodeStats([2], [5], [3], [3]),  # more accepting steps than steps
    ],
)
def test_counters_that_contradict_one_another(stats: DecodeStats) -> None:
    with pytest.raises(ValueError, match="decoding counters"):
        acceptance.cut_tokens(stats)
