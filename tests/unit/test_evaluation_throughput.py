"""Counted operations, probes, and shares of a step."""

from __future__ import annotations

import pytest
import torch
from evaluation_fakes import Clock, ScriptedDecoder, TableTarget
from torch.nn.functional import scaled_dot_product_attention

from specheads.evaluation.throughput import ProductLog, draft_costs, training_rate

M, K, N = 6, 5, 4


def test_products_of_a_linear_layer_forward_and_backward() -> None:
    layer, inputs = torch.nn.Linear(K, N), torch.randn(M, K, requires_grad=True)
    with ProductLog() as log:
        layer(inputs).sum().backward()
    assert dict(log.products) == {
        (M, K, N, torch.float32): 1,  # forward
        (M, N, K, torch.float32): 1,  # gradient of the input
        (N, M, K, torch.float32): 1,  # gradient of the weight
    }


def test_flops_of_a_step_by_hand() -> None:
    layer = torch.nn.Linear(K, N, bias=False)
    inputs = torch.randn(M, K, requires_grad=True)
    calls: list[int] = []

    def step() -> None:
        calls.append(1)
        layer(inputs).sum().backward()

    found = training_rate(step, steps=3, warmup=1)
    assert len(calls) == 1 + 2 * 3
    assert found.flops == 3 * 2 * M * K * N
    assert found.rate == pytest.approx(found.flops / found.seconds / 1e9)
    assert found.share == pytest.approx(found.rate / found.probe)
    assert found.probe > 0
    assert sum(share for _, share, _ in found.products) >= 0.95


def test_attention_is_counted_on_the_processor_too() -> None:
    query, key, value = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))
    weight = torch.randn(8, 8, requires_grad=True)

    def step() -> None:
        scaled_dot_product_attention(query, key, value @ weight).sum().backward()

    linear = 3 * 2 * (2 * 3 * 16) * 8 * 8
    attention = (4 + 10) * 2 * 3 * 16 * 16 * 8
    assert training_rate(step, steps=1).flops == linear + attention


def test_products_into_given_memory_are_probed_too() -> None:
    a, b, out = torch.randn(16, 8), torch.randn(8, 32), torch.empty(16, 32)
    found = training_rate(lambda: torch.mm(a, b, out=out), steps=1)
    assert found.flops == 2 * 16 * 8 * 32
    assert [(shape, share) for shape, share, _ in found.products] == [("16x8x32 fp32", 1.0)]


def test_a_step_without_products_is_an_error() -> None:
    with pytest.raises(ValueError, match="no matrix product"):
        training_rate(lambda: None, steps=1)


def test_draft_costs_by_hand() -> None:
    target = TableTarget(Clock())
    plain, draft = ScriptedDecoder(target, 0, 0.5), ScriptedDecoder(target, 1, 0.8)
    (cost,) = draft_costs(target, {"head": draft}, plain, [[3, 4], [5, 6]], max_new_tokens=9, repeats=3)
    assert (cost.name, cost.tau) == ("head", 2.0)
    assert cost.draft_ms == pytest.approx(200)  # a quarter of the scripted step
    assert cost.target_ms == pytest.approx(800)
    assert cost.plain_target_ms == pytest.approx(500)
    assert cost.verify_ms == pytest.approx(100)
    assert cost.share == pytest.approx((200 + 100) / 500)
    assert draft.calls == plain.calls == 1 + 2 * 3
