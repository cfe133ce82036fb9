"""The size of a step: measured costs, and the size that brings the most tokens per millisecond."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest
import torch
from fakes import tiny_target
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specheads.decoding.controller import SIZES, StepCosts, best_size
from specheads.types import TargetOutput
from specheads.utils import InputError


def test_costs_never_fall_and_are_linear_between():
    costs = StepCosts({1: 24.0, 2: 22.0, 4: 23.0, 8: 31.0})
    assert costs.costs == [23.0, 23.0, 23.0, 31.0]
    assert [costs.milliseconds(nodes) for nodes in (1, 3, 6, 8, 12)] == [23, 23, 27, 31, 39]
    assert costs.table(12).tolist() == [costs.milliseconds(nodes) for nodes in range(1, 13)]
    assert costs.table(12, 3).tolist() == [costs.milliseconds(3 * nodes) for nodes in range(1, 13)]
    assert StepCosts({4: 7.0}).milliseconds(40) == 7.0
    for bad in ({}, {0: 1.0}, {1: 0.0}, {1: float("nan")}):
        with pytest.raises(InputError, match="step costs"):
            StepCosts(bad)


@given(
    st.lists(st.floats(0, 1), min_size=0, max_size=12),
    st.lists(st.floats(0.1, 50), min_size=3, max_size=3),
    st.floats(0, 20),
    st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_best_size_by_trying_all(chances: list[float], times: list[float], draft_ms: float, rows: int):
    costs = StepCosts(dict(zip((1, 4, 16), times, strict=True)))
    ranked = [1.0, *sorted(chances, reverse=True)]
    sums = list(itertools.accumulate(ranked))
    rates = [rows * total / (costs.milliseconds(rows * (size + 1)) + draft_ms) for size, total in enumerate(sums)]
    assert rates[best_size(ranked, costs, draft_ms, rows) - 1] == pytest.approx(max(rates))
    worth = [rows * total - 0.1 * costs.milliseconds(rows * (size + 1)) for size, total in enumerate(sums)]
    assert worth[best_size(ranked, costs, draft_ms, rows, rate=0.1) - 1] == pytest.approx(max(worth), abs=1e-9)


def test_probe_of_a_tiny_target_and_of_a_short_context():
    costs = StepCosts.probe(tiny_target(), seconds=0.3)
    assert costs.sizes == list(SIZES)
    assert costs.costs == sorted(costs.costs)
    short = StepCosts.probe(tiny_target(max_position_embeddings=40), seconds=0.1)
    assert max(short.sizes) <= 40


@pytest.mark.parametrize("forward_seconds", [0.02, 0.3])
def test_probe_keeps_to_its_time(forward_seconds: float):
    """A slow target: the sizes that were not reached follow the last slope."""

    def forward(tokens: Tensor, **rest: object) -> TargetOutput:
        time.sleep(forward_seconds * (1 + tokens.shape[1] / 100))
        return TargetOutput(torch.zeros(1, tokens.shape[1], 4), None)

    real = tiny_target()
    target = SimpleNamespace(config=real.config, device=real.device, new_cache=real.new_cache, forward=forward)
    begun = time.perf_counter()
    costs = StepCosts.probe(target, seconds=0.5)  # type: ignore[arg-type]
    assert time.perf_counter() - begun < 0.5 + 4 * forward_seconds
    assert costs.milliseconds(64) >= costs.milliseconds(1) > 900 * forward_seconds
