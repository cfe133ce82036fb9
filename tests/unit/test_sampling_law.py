"""Logits to probabilities to tokens: options, edges, and the same law in ``pick`` and ``probabilities``."""

from __future__ import annotations

import math

import pytest
import torch

from specheads.sampling import greedy, new_generator, pick, probabilities, validate
from specheads.types import SamplingParams
from specheads.utils import InputError


def slow_probabilities(logits: list[float], params: SamplingParams) -> list[float]:
    """One row, by the definition: temperature, the top_k best, the smallest set that reaches top_p."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    weights = [math.exp((logit - max(logits)) / params.temperature) for logit in logits]
    kept = order[: params.top_k] if params.top_k else order
    total, running, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if running >= params.top_p * total and nucleus:
            break
        nucleus.append(token)
        running += weights[token]
    return [weights[token] / running if token in nucleus else 0.0 for token in range(len(logits))]


SETTINGS = [
    SamplingParams(temperature, top_k, top_p)
    for temperature in (0.3, 1.0, 2.5)
    for top_k in (0, 1, 3, 500)
    for top_p in (1.0, 0.9, 0.4, 1e-6)
]


@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("vocabulary", [7, 64])
def test_probabilities_by_definition(params: SamplingParams, vocabulary: int):
    logits = torch.randn(2, 3, vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    got = probabilities(logits, params)
    for row, expected in zip(got.flatten(0, 1), logits.flatten(0, 1).tolist(), strict=True):
        torch.testing.assert_close(row, torch.tensor(slow_probabilities(expected, params)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "params", [SamplingParams(1.0), SamplingParams(0.7, 5), SamplingParams(1.3, 0, 0.8), SamplingParams(2.0, 20, 0.2)]
)
@pytest.mark.parametrize("vocabulary", [7, 128])
def test_pick_follows_probabilities(params: SamplingParams, vocabulary: int):
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(2)) * 2
    draws = 40_000
    tokens = pick(logits.expand(draws, -1), params, torch.Generator().manual_seed(3))
    expected = probabilities(logits, params)
    seen = torch.bincount(tokens, minlength=vocabulary) / draws
    assert not seen[expected == 0].any()
    noise = (expected * (1 - expected) / draws).sqrt().sum()  # expected total variation is about 0.4 of this
    assert 0.5 * (seen - expected).abs().sum() <= noise


def test_tokens_of_chance_zero_never_come():
    logits = torch.full((64,), -torch.inf)
    logits[5], logits[63] = 0.0, -1.0
    tokens = pick(logits.expand(20_000, -1), SamplingParams(1.0), torch.Generator().manual_seed(0))
    assert set(tokens.tolist()) == {5, 63}


@pytest.mark.parametrize("vocabulary", [5, 64, 128, 384])
def test_greedy_takes_the_lowest_of_equals(vocabulary: int):
    generator = torch.Generator().manual_seed(4)
    logits = torch.randint(0, 4, (50, 3, vocabulary), generator=generator).float()
    assert torch.equal(greedy(logits), logits.argmax(-1))
    assert greedy(torch.zeros(2, vocabulary)).tolist() == [0, 0]
    assert torch.equal(greedy(logits.bfloat16()), logits.argmax(-1))
    assert torch.equal(pick(logits, SamplingParams()), logits.argmax(-1))
    assert probabilities(logits, SamplingParams()).sum(-1).eq(1).all()


@pytest.mark.parametrize("temperature", [1e-8, 5e-324, 1e30])
def test_extreme_temperatures_give_no_nan(temperature: float):
    logits = torch.tensor([[1.0, 3.0, 2.0, -1e4]])
    chances = probabilities(logits, SamplingParams(temperature, top_p=0.9))
    assert torch.isfinite(chances).all()
    assert chances.sum().item() == pytest.approx(1)
    if temperature < 1:
        assert chances.tolist() == [[0, 1, 0, 0]]


def test_equals_at_the_border_stay():
    logits = torch.tensor([0.0, 0.0, 0.0, -5.0])
    assert probabilities(logits, SamplingParams(1.0, top_k=2)).tolist() == pytest.approx([1 / 3] * 3 + [0])
    assert probabilities(logits, SamplingParams(1.0, top_p=0.1)).tolist() == pytest.approx([1 / 3] * 3 + [0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "1"),
        ("temperature", True), ("top_k", -1), ("top_k", 1.5), ("top_p", 0), ("top_p", 1.1), ("top_p", float("nan")),
        ("seed", -1), ("seed", 2**63), ("seed", 0.5),
    ],
)  # fmt: skip
def test_invalid_values_are_refused_by_name(field: str, value: object):
    with pytest.raises(InputError, match=f"^{field}: got"):
        validate(SamplingParams(**{field: value}))


def test_generators_leave_the_global_state_alone():
    before = torch.random.get_rng_state()
    seeds = {new_generator(SamplingParams(seed=None)).initial_seed() for _ in range(4)}
    assert len(seeds) == 4  # fresh entropy
    assert new_generator(SamplingParams(seed=7)).initial_seed() == 7
    assert torch.equal(before, torch.random.get_rng_state())
