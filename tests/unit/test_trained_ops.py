"""Operations with a hand-written backward: values against the plain formula, gradients by gradcheck."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_heads import apart
from torch import Tensor

from specheads.modules.anchored_attention import anchor_mask, anchored_attention, concatenated_attention
from specheads.modules.norm import rms_norm
from specheads.modules.rotary import Rotary, turn
from specheads.modules.trained_ops import rotated_heads, trained_rms_norm, trained_swiglu

Own = list[tuple[Tensor, Tensor]]


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = draw(*shape), draw(*shape[1 - (len(shape) == 2) :] if len(shape) == 3 else shape[1:])
    assert torch.autograd.gradcheck(lambda x, w: trained_rms_norm(x, w, 1e-2, torch.float64), (x, weight))
    single, gains = x.detach().float(), weight.detach().float()
    assert torch.allclose(trained_rms_norm(single, gains, 1e-5, torch.float32), rms_norm(single, gains, 1e-5))
    half = trained_rms_norm((single * 22_574).bfloat16(), gains, 1e-5, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()


def test_a_frozen_input_gets_no_gradient() -> None:
    x, weight = torch.randn(3, 4), torch.ones(4, requires_grad=True)
    trained_rms_norm(x, weight, 1e-5, torch.float32).sum().backward()
    assert weight.grad is not None
    assert x.grad is None


def test_swiglu() -> None:
    torch.manual_seed(0)
    x = draw(3, 8)
    assert torch.autograd.gradcheck(trained_swiglu, (x,))
    assert torch.allclose(trained_swiglu(x), x[:, :4] * torch.sigmoid(x[:, :4]) * x[:, 4:])


def test_rotated_heads() -> None:
    torch.manual_seed(0)
    qkv, angles = draw(5, 7 * 4), torch.randn(5, 1, 2, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    assert torch.autograd.gradcheck(lambda x: rotated_heads(x, cos, sin, 3, 2), (qkv,))
    x = torch.randn(5, 7 * 6)
    cos, sin = Rotary(6, 100.0)(torch.arange(5)[None], torch.float32)  # 1 5 1 6
    queries, keys, values = rotated_heads(x, cos[0, ..., 3:], sin[0, ..., 3:], 3, 2)
    want = turn(x.view(1, 5, 7, 6)[:, :, :5], cos, sin)[0]
    assert torch.allclose(torch.cat([queries, keys], dim=1), want, atol=1e-6)
    assert torch.equal(values, x.view(5, 7, 6)[:, 5:])


def attention_problem(steps: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Own, Tensor]:
    torch.manual_seed(0)
    own = [(draw(2, 2, 3, 4, dtype=dtype), draw(2, 2, 3, 4, dtype=dtype)) for _ in range(steps)]
    positions = torch.tensor([[0, 2, 4], [1, 3, 0]])
    return draw(2, 4, 3, 4, dtype=dtype), draw(2, 2, 5, 4, dtype=dtype), draw(2, 2, 5, 4, dtype=dtype), own, positions


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_anchored_attention_is_that_of_a_chain(steps: int) -> None:
    """Every query by hand: step-0 keys up to its anchor, its own anchor's key of each step."""
    queries, keys, values, own, positions = attention_problem(steps)
    out = anchored_attention(queries, keys, values, own, anchor_mask(positions, 5, 2, torch.float64))
    for b in range(2):
        for h in range(4):
            for m in range(3):
                end = int(positions[b, m]) + 1
                seen = torch.cat([keys[b, h // 2, :end], *(key[b, h // 2, m : m + 1] for key, _ in own)])
                given = torch.cat([values[b, h // 2, :end], *(value[b, h // 2, m : m + 1] for _, value in own)])
                weights = torch.softmax(seen @ queries[b, h, m] / math.sqrt(4), 0)
                assert torch.allclose(out[b, h, m], weights @ given)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_anchored_attention_gradients(steps: int) -> None:
    queries, keys, values, own, positions = attention_problem(steps)
    mask = anchor_mask(positions, 5, 2, torch.float64)
    flat = [tensor for pair in own for tensor in pair]

    def attention(queries: Tensor, keys: Tensor, values: Tensor, *flat: Tensor) -> Tensor:
        return anchored_attention(queries, keys, values, list(zip(flat[::2], flat[1::2], strict=True)), mask)

    assert torch.autograd.gradcheck(attention, (queries, keys, values, *flat))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_route_of_other_devices_agrees(dtype: torch.dtype) -> None:
    queries, keys, values, own, positions = attention_problem(2, dtype)
    mask = anchor_mask(positions, 5, 2, dtype)
    leaves = [queries, keys, values, *(tensor for pair in own for tensor in pair)]
    one = anchored_attention(queries, keys, values, own, mask)
    other = concatenated_attention(queries.reshape(2, 2, 6, 4), keys, values, own, mask).reshape(one.shape)
    room = 1e-5 if dtype == torch.float32 else 3e-2
    assert apart(one, other) < room
    pull = torch.randn_like(one)
    for a, b in zip(torch.autograd.grad(one, leaves, pull), torch.autograd.grad(other, leaves, pull), strict=True):
        assert apart(a.float(), b.float()) < room


@pytest.mark.parametrize("row_bytes", [0, 32 << 20])  # the flash kernel's backward, and the one by rows
def test_anchored_attention_gradients_in_bf16(row_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd in fp64 at the same numbers, with scores up to about 30: what bf16 alone would round away."""
    monkeypatch.setattr("specheads.modules.anchored_attention.ROW_BYTES", row_bytes)
    rows, width, slots = 3, 48, 20
    positions = torch.stack([torch.randperm(width)[:slots].sort().values for _ in range(rows)])
    shapes = [(rows, 4, slots, 16), (rows, 2, width, 16), (rows, 2, width, 16), *[(rows, 2, slots, 16)] * 4]
    low = [(torch.randn(shape) * 3).bfloat16().requires_grad_() for shape in shapes]
    pull = torch.randn(shapes[0]).bfloat16()

    def gradients(leaves: list[Tensor]) -> tuple[Tensor, ...]:
        mask = anchor_mask(positions, width, 2, leaves[0].dtype)
        own = list(zip(leaves[3::2], leaves[4::2], strict=True))
        return torch.autograd.grad(anchored_attention(*leaves[:3], own, mask), leaves, pull.to(leaves[0].dtype))

    exact = gradients([tensor.detach().double().requires_grad_() for tensor in low])
    for got, want in zip(gradients(low), exact, strict=True):
        assert float((got.double() - want).norm() / want.norm()) < 0.01
