"""The chunked loss against the plain formula, its gradients, and what is ever whole in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_heads import DRAFT_IDS, apart, batch, build, frozen_parts, large_problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specheads.heads import HEADS
from specheads.losses import Workspace, align, chunked_cross_entropy
from specheads.types import FrozenParts, HeadInputs


def plain(hidden: Tensor, weights: list[Tensor], target: Tensor, row_weights: Tensor) -> Tensor:
    """sum over j, k of w CE(target j, hidden j k)."""
    loss = hidden.new_zeros(())
    for k in range(hidden.shape[1]):
        log_q = torch.log_softmax(hidden[:, k] @ weights[k if len(weights) > 1 else 0].T, -1)
        p = torch.nn.functional.one_hot(target, log_q.shape[1]) if target.dtype == torch.int64 else target.softmax(-1)
        loss = loss - (row_weights[:, k] * (p * log_q).sum(-1)).sum()
    return loss


def problem(
    dtype: torch.dtype, heads: int, hard: bool, rows: int = 7
) -> tuple[Tensor, list[Tensor], Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden = draw(rows, 3, 4).requires_grad_()
    weights = [draw(5, 4).requires_grad_() for _ in range(heads)]
    target = torch.randint(0, 5, (rows,), generator=generator) if hard else draw(rows, 5)
    row_weights = torch.rand(rows, 3, generator=generator).to(dtype)
    row_weights[1, 1] = 0
    return hidden, weights, target, torch.randint(-1, 5, (rows,), generator=generator), row_weights


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("chunk", [1, 200, 1 << 20])
def test_loss_and_gradients_are_those_of_the_plain_formula(heads: int, hard: bool, chunk: int) -> None:
    hidden, weights, target, judge, row_weights = problem(torch.float64, heads, hard)
    want = plain(hidden, weights, target, row_weights)
    expected = torch.autograd.grad(3 * want, [hidden, *weights])
    got = chunked_cross_entropy(hidden, weights, target.__getitem__, judge, row_weights, chunk_bytes=chunk)
    found = torch.autograd.grad(3 * got.loss, [hidden, *weights])
    assert torch.allclose(got.loss, want, rtol=1e-12)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("hard", [False, True])
def test_gradcheck(heads: int, hard: bool) -> None:
    hidden, weights, target, judge, row_weights = problem(torch.float64, heads, hard, rows=2)

    def loss(hidden: Tensor, *weights: Tensor) -> Tensor:
        return chunked_cross_entropy(hidden, weights, target.__getitem__, judge, row_weights, chunk_bytes=130).loss

    assert torch.autograd.gradcheck(loss, (hidden, *weights))


def test_frozen_rows_get_no_gradient_and_no_rows_give_zero() -> None:
    hidden, weights, target, judge, row_weights = problem(torch.float32, 1, False)
    frozen = [weights[0].detach()]
    chunked_cross_entropy(hidden, frozen, target.__getitem__, judge, row_weights).loss.backward()
    assert hidden.grad is not None
    assert frozen[0].grad is None
    empty = chunked_cross_entropy(hidden[:0], weights, target.__getitem__, judge[:0], row_weights[:0])
    empty.loss.backward()
    assert empty.loss.item() == 0
    assert (weights[0].grad == 0).all()


def test_hits_and_ranks() -> None:
    hidden, weights, target, judge, row_weights = problem(torch.float32, 3, False)
    logits = torch.stack([hidden[:, k] @ weights[k].T for k in range(3)], 1)
    order = logits.argsort(-1, descending=True)
    want = torch.where(judge[:, None] >= 0, (order == judge[:, None, None]).float().argmax(-1), 4).clamp(max=4)
    for ranks in (0, 4):
        got = chunked_cross_entropy(
            hidden, weights, target.__getitem__, judge, row_weights, ranks=ranks, chunk_bytes=90
        )
        assert torch.equal(got.hits, want == 0)
    assert torch.equal(got.ranks, want)


def test_bf16_agrees_with_fp32() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 2, 32, generator=generator).requires_grad_()
    weight = (torch.randn(100, 32, generator=generator) / 4).requires_grad_()
    target, judge = 3 * torch.randn(50, 100, generator=generator), torch.randint(0, 100, (50,), generator=generator)
    args = ([weight], target.__getitem__, judge, torch.ones(50, 2))
    exact = chunked_cross_entropy(hidden, *args)
    want = torch.autograd.grad(exact.loss, [hidden, weight])
    half = target.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        got = chunked_cross_entropy(hidden, [weight], half.__getitem__, judge, torch.ones(50, 2))
    found = torch.autograd.grad(got.loss, [hidden, weight])
    assert torch.allclose(got.loss, exact.loss, rtol=5e-3)
    for one, other in zip(found, want, strict=True):
        assert one.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), 0) > 0.999


def test_alignment_example() -> None:
    ids = torch.arange(5)[None]
    mask = torch.tensor([[False, False, False, True, True]])
    inputs = HeadInputs(ids, ids, ids, ids, mask, torch.tensor([5]))
    plan = align(inputs, 2)
    assert plan.teachers.tolist() == [2, 3]
    assert plan.anchors.tolist() == [0, 1, 2]
    assert plan.source.tolist() == [[1, 0], [2, 1]]
    assert plan.supervised.tolist() == [[True, True], [True, True]]
    assert plan.judged.tolist() == [[True, False], [True, True]]  # anchor 0 has no step 0
    assert int(plan.count) == 2


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.is_contiguous():
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize(
    ("kind", "reduced"), [("eagle3", True), ("eagle3", False), ("medusa", True), ("medusa", False)]
)
def test_no_tensor_of_tokens_by_vocabulary_is_ever_made(kind: str, reduced: bool) -> None:
    """512 supervised tokens, vocabulary 3,000: nothing larger than a chunk, the output rows or the features."""
    target, parts, inputs = large_problem(kind)
    ids = torch.arange(0, 3000, 2) if reduced else None
    options = {"layer_ids": (1, 2, 3)} if kind == "eagle3" else {}
    head = HEADS[kind].build(target, parts, options, ids)
    head.chunk_bytes = 1 << 18
    with Largest() as seen:
        head.training_step(inputs, parts).loss.backward()
    size = 1500 if reduced else 3000
    assert seen.elements <= max(3000 * 16, (1 << 18) // 4, inputs.features.numel())
    assert seen.elements < inputs.input_ids.numel() * size / 4
    assert all(parameter.grad is not None for parameter in head.parameters())


def test_the_hook_sees_a_whole_tensor() -> None:
    target, parts, inputs = large_problem("medusa")
    head = HEADS["medusa"].build(target, parts, {}, None)
    with Largest() as seen:
        head.training_step(inputs, parts)
    assert seen.elements >= 400 * 3000  # the default chunk is larger than this whole problem


def test_a_chunk_size_changes_no_gradient() -> None:
    parts: FrozenParts = frozen_parts()
    head = build("eagle3", parts, DRAFT_IDS)
    inputs = batch("eagle3", (9, 6))
    found = []
    for chunk in (1, 1 << 20):
        head.chunk_bytes = chunk
        head.zero_grad()
        head.training_step(inputs, parts).loss.backward()
        found.append([parameter.grad.clone() for parameter in head.parameters()])
    for one, other in zip(*found, strict=True):
        assert apart(one, other) < 1e-5


def test_a_kept_workspace_changes_nothing() -> None:
    """Chunks and problems of other sizes write over it, evaluation under inference mode may have made it."""
    workspace = Workspace()
    hidden, weights, target, judge, row_weights = problem(torch.float64, 1, False)
    with torch.inference_mode():
        chunked_cross_entropy(hidden, weights, target.__getitem__, judge, row_weights, ranks=2, workspace=workspace)
    for chunk in (1 << 20, 200):
        fresh = chunked_cross_entropy(hidden, weights, target.__getitem__, judge, row_weights, chunk_bytes=chunk)
        kept = chunked_cross_entropy(
            hidden, weights, target.__getitem__, judge, row_weights, chunk_bytes=chunk, workspace=workspace
        )
        assert torch.equal(fresh.loss, kept.loss)
        leaves = [hidden, *weights]
        found, wanted = (torch.autograd.grad(out.loss, leaves) for out in (kept, fresh))
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
