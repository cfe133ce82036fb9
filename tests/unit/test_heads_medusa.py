"""Medusa-1 against loops over rows, positions and heads; its drafter against its own logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_heads import DRAFT_IDS, HIDDEN, VOCAB, apart, batch, build, frozen_parts, row_of, target_config
from torch import Tensor
from torch.nn import functional as F

from specheads.heads.medusa import MedusaHead
from specheads.tree.build import check_tree
from specheads.tree.static import StaticTree
from specheads.types import FrozenParts, HeadInputs
from specheads.utils import InputError


def plain_logits(head: MedusaHead, parts: FrozenParts, raw: Tensor, index: int) -> Tensor:
    """Head ``index`` at one position: raw last state [H] -> [D]."""
    p, x = dict(head.named_parameters()), parts.norm(raw)
    for block in range(head.config.num_blocks):
        y = p[f"blocks.{index}.{block}.linear.weight"] @ x + p[f"blocks.{index}.{block}.linear.bias"]
        x = x + y * torch.sigmoid(y)
    rows = p.get(f"lm_heads.{index}.weight")
    return (parts.output_weight[head.vocab.ids] if rows is None else rows) @ x


def plain_step(head: MedusaHead, parts: FrozenParts, inputs: HeadInputs) -> dict[str, object]:
    ids, c = head.vocab.ids, head.config
    loss, count = torch.zeros(()), 0
    hits, joint, judged = [0] * c.num_heads, [0] * c.num_heads, [0] * c.num_heads
    ranks = torch.zeros(c.num_heads, 10, dtype=torch.int64)
    for b, length in enumerate(inputs.lengths.tolist()):
        for t in range(length):
            so_far = seen = True
            for i in range(c.num_heads):
                if t + 2 + i >= length or not inputs.loss_mask[b, t + 2 + i]:
                    seen = False
                    continue
                count += i == 0
                logits = plain_logits(head, parts, inputs.last_state[b, t], i)
                best = int(inputs.target_argmax[b, t + 1 + i])
                if seen:
                    judged[i] += 1
                    order = ids[logits.argsort(descending=True)].tolist()
                    so_far = so_far and order[0] == best
                    hits[i] += order[0] == best
                    joint[i] += so_far
                    if best in order[:10]:
                        ranks[i, order.index(best)] += 1
                label = int(inputs.input_ids[b, t + 2 + i])
                if c.objective == "teacher" and best in ids.tolist():
                    p = torch.softmax(parts.lm_head(parts.norm(inputs.last_state[b, t + 1 + i]))[ids], 0)
                    loss = loss - c.head_decay**i * (p * torch.log_softmax(logits, 0)).sum()
                if c.objective == "labels" and label in ids.tolist():
                    loss = loss + c.head_decay**i * F.cross_entropy(logits, torch.tensor(ids.tolist().index(label)))
    return {"loss": loss, "count": count, "hits": hits, "joint": joint, "judged": judged, "ranks": ranks}


def gradients(head: MedusaHead, loss: Tensor) -> dict[str, Tensor]:
    head.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in head.named_parameters()}


@pytest.mark.parametrize("layout", ["own", "shared"])
@pytest.mark.parametrize("objective", ["teacher", "labels"])
@pytest.mark.parametrize(("draft_ids", "blocks"), [(DRAFT_IDS, 1), (None, 2)], ids=["reduced-1", "full-2"])
def test_training_step_is_that_of_the_slow_loops(
    layout: str, objective: str, draft_ids: Tensor | None, blocks: int
) -> None:
    parts = frozen_parts()
    head = build("medusa", parts, draft_ids, num_heads=3, num_blocks=blocks, layout=layout, objective=objective)
    inputs = batch("medusa", (10, 7), masks=(3, 2))
    for b in range(2):  # some hits, some among the next ranks
        for t in range(6):
            order = plain_logits(head, parts, inputs.last_state[b, t], 0).argsort(descending=True)
            inputs.target_argmax[b, t + 1] = head.vocab.ids[order[0 if t % 2 else 4]]
    want = plain_step(head, parts, inputs)
    expected = gradients(head, want["loss"])
    got = head.training_step(inputs, parts)
    assert torch.allclose(got.loss, want["loss"], rtol=1e-5)
    assert int(got.count) == want["count"] > 0
    for name, gradient in gradients(head, got.loss).items():
        assert apart(gradient, expected[name]) < 1e-5, name
        assert gradient.abs().max() > 0, name
    with torch.no_grad():
        judged = head.training_step(inputs, parts)
    for out in (got, judged):
        counters = [out.hits.tolist(), out.joint_hits.tolist(), out.steps.tolist()]
        assert counters == [want["hits"], want["joint"], want["judged"]]
    assert want["hits"][0] > 1
    assert torch.equal(judged.rank_hits, want["ranks"])


def test_cutting_the_batch_changes_nothing() -> None:
    parts = frozen_parts()
    head = build("medusa", parts)
    inputs = batch("medusa", (10, 4), width=13)
    whole = head.training_step(inputs, parts)
    found = gradients(head, whole.loss)
    parts_of = [gradients(head, head.training_step(row_of(inputs, row), parts).loss) for row in (0, 1)]
    for name, gradient in found.items():
        assert apart(gradient, parts_of[0][name] + parts_of[1][name]) < 3e-6, name


def test_a_fresh_heads_output_is_nearly_the_targets() -> None:
    parts = frozen_parts()
    for layout in ("own", "shared"):
        torch.manual_seed(0)
        head = MedusaHead.build(target_config(), parts, {"layout": layout}, DRAFT_IDS)
        with torch.no_grad():
            for name, parameter in head.blocks.named_parameters():
                assert name.endswith("bias") or not parameter.any(), name
                if name.endswith("bias"):
                    parameter.zero_()
        raw = torch.randn(HIDDEN)
        assert torch.allclose(plain_logits(head, parts, raw, 2), parts.lm_head(parts.norm(raw))[DRAFT_IDS], atol=1e-5)
        assert not any(parameter is parts.output_weight for parameter in head.parameters())


@pytest.mark.parametrize("layout", ["own", "shared"])
@torch.no_grad()
def test_the_drafters_tree_is_filled_from_the_heads(layout: str) -> None:
    parts = frozen_parts()
    head = build("medusa", parts, num_heads=3, layout=layout)
    tree = StaticTree(((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 1)))
    drafter = head.drafter(parts, tree)
    features = torch.randn(2, 6, HIDDEN)
    drafter.start(torch.zeros(2, 6, dtype=torch.int64), features, torch.tensor([6, 3]), 40)
    states = torch.stack([features[0, 5], features[1, 2]])
    for step in range(2):
        draft = drafter.propose(torch.tensor([5, 6]))
        check_tree(draft)
        assert draft.tokens[:, 0].tolist() == [5, 6]
        for row in range(2):
            for node, path in enumerate(tree.paths, start=1):
                score = 0.0
                for depth, rank in enumerate(path):
                    log_probs = torch.log_softmax(plain_logits(head, parts, states[row], depth), 0)
                    best = log_probs.argsort(descending=True)[rank]
                    score += float(log_probs[best])
                assert int(draft.tokens[row, node]) == int(DRAFT_IDS[best])
                assert abs(float(draft.scores[row, node]) - score) < 1e-4
        new = torch.randn(2, 4, HIDDEN)
        drafter.accept(torch.zeros(2, 4, dtype=torch.int64), new, torch.tensor([3, step]))
        states = torch.stack([new[0, 2], new[1, 0] if step else states[1]])


def test_measured_tree_paths_travel_in_the_configuration() -> None:
    parts = frozen_parts()
    head = build("medusa", parts)
    head.config = replace(head.config, tree_paths=((0,), (1,), (0, 0)))
    again = MedusaHead.from_config(head.config_dict())
    again.load_state_dict(head.state_dict())
    assert again.config == head.config
    assert again.drafter(parts).max_nodes == 4
    assert again.tree_policy(None, None, 3).paths == ((0,), (1,))  # the first of them, as they were stored
    assert again.tree_policy(1, None, 16).paths == ((0,), (1,))
    assert again.tree_policy(None, 1, 16).paths == ((0,), (0, 0))
    assert head.feature_spec.layer_ids == again.feature_spec.layer_ids == (6,)


@pytest.mark.parametrize(
    "options", [{"num_heads": 0}, {"layout": "mine"}, {"objective": "x"}, {"head_decay": 2.0}, {"heads": 3}]
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        MedusaHead.build(target_config(), frozen_parts(), options, DRAFT_IDS)


@torch.no_grad()
def test_a_tree_deeper_than_the_heads_is_cut() -> None:
    parts = frozen_parts(vocab=VOCAB)
    drafter = build("medusa", parts, num_heads=2).drafter(parts, StaticTree(((0,), (0, 0), (0, 0, 0), (30,))))
    drafter.start(torch.zeros(1, 2, dtype=torch.int64), torch.randn(1, 2, HIDDEN), torch.tensor([2]), 9)
    assert drafter.propose(torch.tensor([1])).size == drafter.max_nodes == 3
