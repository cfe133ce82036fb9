"""Muon against a plain implementation, who trains what, and the schedule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from specheads.modules.decoder_layer import DecoderLayer, LayerShape
from specheads.training.optim import Muon, build_optimizer, fused_rows, orthogonalise, schedule_factor
from specheads.utils import InputError

SHAPE = LayerShape(8, 12, num_heads=2, num_kv_heads=1, head_dim=4, rms_norm_eps=1e-5, attention_input=16)


def plain_newton_schulz(g: torch.Tensor) -> torch.Tensor:
    x = g / g.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    return x


@pytest.mark.parametrize("shape", [(6, 6), (4, 10), (10, 4)])
def test_orthogonalise_equals_the_plain_iteration(shape: tuple[int, int]) -> None:
    g = torch.randn(3, *shape, dtype=torch.float64)
    got = orthogonalise(g, torch.float64)
    want = torch.stack([plain_newton_schulz(matrix) for matrix in g])
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert ((torch.linalg.svdvals(got) > 0.5) & (torch.linalg.svdvals(got) < 1.3)).all()


@pytest.mark.parametrize("shape", [(24, 24), (24, 64), (64, 24)])
def test_fp32_and_bf16_products_stay_near_the_exact_iteration(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    g = torch.randn(2, *shape, dtype=torch.float64) * torch.logspace(0, -3, shape[1])  # badly scaled columns
    want = orthogonalise(g, torch.float64)
    exact = orthogonalise(g.float(), torch.float32)
    assert (exact - want).norm() < 1e-3 * want.norm()
    rough = orthogonalise(g.float(), torch.bfloat16)
    assert rough.dtype == torch.bfloat16
    assert float(torch.linalg.svdvals(rough.float()).max()) < 1.35


def test_muon_equals_a_plain_loop_with_each_fused_map_on_its_own() -> None:
    torch.manual_seed(0)
    layer = DecoderLayer(SHAPE).double()
    weight = layer.attention.qkv_proj.weight
    other = layer.mlp.gate_up_proj.weight
    plain = {p: p.detach().clone() for p in (weight, other)}
    momenta = {p: torch.zeros_like(p) for p in (weight, other)}
    rows = {weight: [8, 4, 4], other: [12, 12]}
    assert {p: fused_rows(layer)[p] for p in rows} == rows
    optimizer = Muon([weight, other], lr=0.1, weight_decay=0.01, dtype=torch.float64, parts=fused_rows(layer))
    for _ in range(3):
        for p in (weight, other):
            p.grad = torch.randn_like(p)
            momenta[p] = 0.95 * momenta[p] + 0.05 * p.grad
            step = 0.05 * p.grad + 0.95 * momenta[p]
            pieces = [plain_newton_schulz(x) * max(1, x.shape[0] / x.shape[1]) ** 0.5 for x in step.split(rows[p])]
            plain[p] = plain[p] * (1 - 0.1 * 0.01) - 0.1 * torch.cat(pieces)
        optimizer.step()
    for p in rows:
        torch.testing.assert_close(p.detach(), plain[p], rtol=1e-9, atol=1e-9)


def test_output_rows_norms_and_biases_go_to_adamw() -> None:
    head = nn.ModuleDict({"fc": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "lm_head": nn.Linear(4, 9, bias=False)})
    frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
    head["frozen"] = frozen
    members = build_optimizer(head, "muon").members
    groups = {name: [id(p) for g in m.param_groups for p in g["params"]] for name, m in members.items()}
    assert groups["muon"] == [id(head["fc"].weight)]
    assert set(groups["adamw"]) == {id(head["fc"].bias), *(id(p) for p in head["norm"].parameters())} | {
        id(head["lm_head"].weight)
    }
    assert "muon" not in build_optimizer(head, "adamw").members


def test_bad_optimizers_are_refused() -> None:
    with pytest.raises(InputError, match="optimizer: got 'sgd'"):
        build_optimizer(nn.Linear(2, 2), "sgd")
    with pytest.raises(InputError, match="no parameter is trainable"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False))


def test_schedule() -> None:
    assert [schedule_factor("linear", step, 4, 0.0) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule_factor("linear", 9, 0, 0.25) == 0.75
    assert math.isclose(schedule_factor("cosine", 9, 0, 0.5), 0.5)
    assert schedule_factor("cosine", 9, 2, 1.0) == schedule_factor("linear", 9, 2, 1.7) == 0.0
