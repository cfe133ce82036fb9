"""EAGLE-3 drafting: the same numbers as in training, at every step, path and round."""

from __future__ import annotations

import pytest
import torch
from test_heads_eagle3_training import PlainEagle
from tiny_heads import DRAFT_IDS, VOCAB, batch, build, frozen_parts, target_config
from torch import Tensor

from specheads.heads import HEADS
from specheads.heads.eagle3 import Eagle3Head
from specheads.heads.eagle3_drafter import Eagle3Drafter
from specheads.losses import align
from specheads.tree.build import check_tree
from specheads.tree.draft_tree import DraftTree
from specheads.tree.dynamic import DynamicTree
from specheads.tree.static import StaticTree
from specheads.types import FrozenParts
from specheads.utils import InputError


def drafter_of(head: Eagle3Head, parts: FrozenParts, **policy: int) -> Eagle3Drafter:
    drafter = head.drafter(parts, DynamicTree(**{"depth": 4, "top_k": 3, "total_nodes": 14, **policy}))
    assert isinstance(drafter, Eagle3Drafter)
    drafter.min_gain = 0.0
    return drafter


def sequence(length: int = 30, seed: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (1, length), generator=generator), torch.randn(1, length, 48, generator=generator)


def path_of(tree: DraftTree, row: int, node: int) -> list[int]:
    out = []
    while node > 0:
        out.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return out[::-1]


def check_paths(head: Eagle3Head, parts: FrozenParts, tree: DraftTree, row: int, ids: Tensor, features: Tensor) -> None:
    """Every node's score is the log-probability of its path, run as a chain by the slow implementation.

    ids: the verified tokens and the root; features: of the verified tokens.
    """
    plain, ended = PlainEagle(head, parts), len(ids) - 2
    draft_ids = head.vocab.ids.tolist()
    for node in range(1, int(tree.valid[row].sum())):
        path = path_of(tree, row, node)
        chain = plain.chain(torch.cat([ids, torch.tensor(path)]), features, ended, len(path))
        score = sum(
            float(torch.log_softmax(logits, 0)[draft_ids.index(token)])
            for logits, token in zip(chain, path, strict=True)
        )
        assert abs(score - float(tree.scores[row, node])) < 1e-4, (node, path)


@torch.no_grad()
def test_every_tree_path_scores_as_a_chain_over_several_rounds() -> None:
    parts, (ids, features) = frozen_parts(), sequence()
    head = build("eagle3", parts)
    drafter = drafter_of(head, parts)
    drafter.start(ids[:, :7], features[:, :7], torch.tensor([7]), 40)
    at = 7
    for accepted in (1, 4, 2, 3):
        tree = drafter.propose(ids[:, at])
        check_tree(tree)
        assert tree.size == 14
        assert tree.depths.max() > 1
        check_paths(head, parts, tree, 0, ids[0, : at + 1], features[0])
        drafter.accept(ids[:, at : at + accepted], features[:, at : at + accepted], torch.tensor([accepted]))
        at += accepted


@torch.no_grad()
def test_rows_of_unequal_length_draft_as_alone() -> None:
    parts = frozen_parts()
    head = build("eagle3", parts)
    rows = [sequence(seed=1), sequence(seed=2), sequence(seed=9)]
    starts, accepts = [4, 9, 1], [[2, 1, 3], [1, 4, 0], [3, 0, 1]]
    together = drafter_of(head, parts)
    ids, features = torch.cat([i for i, _ in rows]), torch.cat([f for _, f in rows])
    at = torch.tensor(starts)
    together.start(ids[:, :9], features[:, :9], at, 40)
    alone = [drafter_of(head, parts) for _ in rows]
    for row, drafter in enumerate(alone):
        drafter.start(ids[row : row + 1, : starts[row]], features[row : row + 1, : starts[row]], at[row : row + 1], 40)
    for step in range(3):
        roots = ids.gather(1, at[:, None])[:, 0]
        tree = together.propose(roots)
        check_tree(tree)
        counts = torch.tensor([accepts[row][step] for row in range(3)])
        index = at[:, None] + torch.arange(4)
        together.accept(ids.gather(1, index), features.gather(1, index[:, :, None].expand(-1, -1, 48)), counts)
        for row, drafter in enumerate(alone):
            if step and not accepts[row][step - 1]:
                continue  # finished: whatever it drafts is not looked at
            single = drafter.propose(roots[row : row + 1])
            assert torch.equal(single.tokens[0], tree.tokens[row])
            assert torch.allclose(single.scores[0], tree.scores[row], atol=1e-4)
            if counts[row]:
                end = int(at[row] + counts[row])
                drafter.accept(
                    ids[row : row + 1, at[row] : end], features[row : row + 1, at[row] : end], counts[row : row + 1]
                )
        at = at + counts


@torch.no_grad()
def test_cache_after_accepts_is_the_cache_built_in_one_pass() -> None:
    parts, (ids, features) = frozen_parts(), sequence()
    head = build("eagle3", parts)
    grown, fresh = drafter_of(head, parts), drafter_of(head, parts)
    grown.start(ids[:, :5], features[:, :5], torch.tensor([5]), 40)
    at = 5
    for count in (3, 1, 4):
        grown.propose(ids[:, at])
        grown.accept(ids[:, at : at + count], features[:, at : at + count], torch.tensor([count]))
        at += count
    one, _ = grown.first_pass(ids[:, at])
    fresh.start(ids[:, :at], features[:, :at], torch.tensor([at]), 40)
    two, _ = fresh.first_pass(ids[:, at])
    assert grown.cache is not None
    assert fresh.cache is not None
    assert grown.cache.width == fresh.cache.width == at
    assert torch.allclose(grown.cache.storage[..., :at, :], fresh.cache.storage[..., :at, :], atol=1e-5)
    assert torch.allclose(one, two, atol=1e-5)


@torch.no_grad()
def test_accepts_without_a_propose_are_one_longer_accept() -> None:
    """As a joined drafter does that skips the head where look-up is sure."""
    parts = frozen_parts()
    head = build("eagle3", parts)
    ids, features = (torch.cat(pair) for pair in zip(sequence(seed=1), sequence(seed=2), strict=True))
    once, often = drafter_of(head, parts), drafter_of(head, parts)
    for drafter in (once, often):
        drafter.start(ids[:, :6], features[:, :6], torch.tensor([6, 3]), 16)
    often.accept(ids[:, 6:9], features[:, 6:9], torch.tensor([3, 0]))
    mixed, mixed_features = ids[:, 3:5].clone(), features[:, 3:5].clone()
    mixed[0], mixed_features[0] = ids[0, 9:11], features[0, 9:11]
    often.accept(mixed, mixed_features, torch.tensor([2, 2]))
    rows, row_features = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, 48)
    rows[0], row_features[0] = ids[0, 6:11], features[0, 6:11]
    rows[1, :2], row_features[1, :2] = ids[1, 3:5], features[1, 3:5]
    once.accept(rows, row_features, torch.tensor([5, 2]))
    root = torch.stack([ids[0, 11], ids[1, 5]])
    first, second = once.propose(root), often.propose(root)
    assert torch.equal(first.tokens, second.tokens)
    assert torch.allclose(first.scores, second.scores, atol=1e-5)
    check_paths(head, parts, second, 0, ids[0, :12], features[0])
    check_paths(head, parts, second, 1, ids[1, :6], features[1])


@torch.no_grad()
def test_training_and_decoding_see_the_same_numbers_at_every_step() -> None:
    """Pre-norm outputs of ``unroll`` at one anchor against a drafter fed the same true continuation."""
    parts = frozen_parts()
    head = build("eagle3", parts)
    inputs, steps = batch("eagle3", (12,), masks=(3,)), 4
    plan = align(inputs, steps)
    outputs = head.unroll(inputs, parts, plan, steps, torch.float32)
    ids, features = inputs.input_ids, inputs.features
    for row, t in enumerate(plan.anchors.tolist()):
        drafter = drafter_of(head, parts, depth=steps, top_k=1)
        drafter.start(ids[:, : t + 1], features[:, : t + 1], torch.tensor([t + 1]), 40)
        if t + 1 >= 12:
            continue
        state, _ = drafter.first_pass(ids[:, t + 1])
        assert torch.allclose(state[0, 0], outputs[0][row], atol=1e-5)
        lines = torch.ones(1, 1, 0, dtype=torch.bool)
        for k in range(1, min(steps, 11 - t)):
            lines = torch.ones(1, 1, k, dtype=torch.bool)
            cos, sin = drafter.rotary(torch.tensor([[t + k]]), torch.float32)
            queries, keys, values = drafter._project(ids[:, t + 1 + k][:, None], state, cos, sin)
            keys, values = drafter._scratch(k - 1, keys, values)
            mask = torch.cat([drafter._committed()[:, None], lines], dim=2)
            state, log_probs = drafter._finish(state, queries, keys, values, mask)
            assert torch.allclose(state[0, 0], outputs[k][row], atol=1e-4), (t, k)
            logits = head.lm_head(head.norm(outputs[k][row]))
            assert torch.allclose(log_probs[0, 0], torch.log_softmax(logits, 0), atol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
@pytest.mark.parametrize("draft_ids", [DRAFT_IDS, None], ids=["reduced", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_fresh_head_drafts_within_its_vocabulary(kind: str, draft_ids: Tensor | None, dtype: torch.dtype) -> None:
    parts = frozen_parts(dtype=dtype)
    options = {"layer_ids": (3, 5, 6)} if kind == "eagle3" else {}
    head = HEADS[kind].build(target_config(), parts, options, draft_ids)
    drafter = head.drafter(parts)
    ids, features = sequence()
    features = features[..., : 48 if kind == "eagle3" else 16].to(dtype)
    drafter.start(ids[:, :5], features[:, :5], torch.tensor([5]), 40)
    tree = drafter.propose(ids[:, 5])
    check_tree(tree)
    assert 1 < tree.size <= drafter.max_nodes
    allowed = set(range(VOCAB) if draft_ids is None else draft_ids.tolist())
    assert set(tree.tokens[0, 1:].tolist()) <= allowed
    assert tree.scores is not None
    assert (tree.scores <= 1e-6).all()


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("top_k", [1, 3, 100])
@pytest.mark.parametrize("total", [1, 4, 999])
@torch.no_grad()
def test_limits_larger_than_the_tree(depth: int, top_k: int, total: int) -> None:
    parts, (ids, features) = frozen_parts(), sequence()
    drafter = drafter_of(build("eagle3", parts), parts, depth=depth, top_k=top_k, total_nodes=total)
    drafter.start(ids[:, :5], features[:, :5], torch.tensor([5]), 12)
    tree = drafter.propose(ids[:, 5])
    check_tree(tree)
    assert tree.size <= min(total, drafter.max_nodes)
    assert int(tree.depths.max()) <= depth


@torch.no_grad()
def test_growth_stops_where_nothing_is_likely() -> None:
    parts, (ids, features) = frozen_parts(), sequence()
    head = build("eagle3", parts)
    drafter = drafter_of(head, parts)
    drafter.min_gain = 2.0  # no chance reaches this
    drafter.start(ids[:, :5], features[:, :5], torch.tensor([5]), 40)
    assert int(drafter.propose(ids[:, 5]).depths.max()) == 1


@torch.no_grad()
def test_trained_weights_reach_the_next_drafter() -> None:
    parts, (ids, features) = frozen_parts(), sequence()
    head = build("eagle3", parts)

    def propose() -> Tensor:
        drafter = drafter_of(head, parts)
        drafter.start(ids[:, :5], features[:, :5], torch.tensor([5]), 40)
        scores = drafter.propose(ids[:, 5]).scores
        assert scores is not None
        return scores

    before = propose()
    assert head.drafter(parts).weights is head.drafter(parts).weights
    head.layer.mlp.down_proj.weight.mul_(2)
    assert not torch.allclose(before, propose())


def test_a_tree_of_the_other_kind_is_refused() -> None:
    parts = frozen_parts()
    with pytest.raises(InputError, match="DynamicTree"):
        build("eagle3", parts).drafter(parts, StaticTree(((0,),)))
    with pytest.raises(InputError, match="StaticTree"):
        build("medusa", parts).drafter(parts, DynamicTree())
