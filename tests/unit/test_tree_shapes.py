"""Draft trees: literal masks, the validator, cutting, Medusa's search, EAGLE-2's rerank."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.tree.build import build_tree, check_tree, cut_depth, keep_nodes, lineage
from specheads.tree.draft_tree import DraftTree
from specheads.tree.dynamic import DynamicTree, best_children, next_beam, rerank
from specheads.tree.static import StaticTree, best_paths, within
from specheads.utils import InputError


def tree_of(tokens: list[int], parents: list[int]) -> DraftTree:
    return build_tree(torch.tensor([tokens]), torch.tensor([parents]))


def test_static_mask_is_the_worked_example():
    # REFERENCE of Medusa's buffers: tree {(0), (0,0), (1)} sorted by (length, ranks): root, 0, 1, 00
    buffers = StaticTree.of([[0], [0, 0], [1]]).buffers
    assert buffers.parents.tolist() == [-1, 0, 0, 1]
    assert buffers.depths.tolist() == [0, 1, 1, 2]
    assert buffers.ranks.tolist() == [0, 0, 1, 0]
    assert buffers.ancestors.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]


def test_static_tree_is_filled_by_rank_and_depth():
    tree = StaticTree.of([[0], [1], [0, 0], [0, 2], [1, 1]])
    candidates = torch.tensor([[[10, 11, 12], [20, 21, 22]], [[30, 31, 32], [40, 41, 42]]])
    log_probs = torch.tensor([[[0.5, 0.3, 0.1], [0.6, 0.2, 0.1]]]).log().expand(2, -1, -1)
    draft = tree.draft(torch.tensor([7, 8]), candidates, log_probs)
    check_tree(draft)
    assert draft.tokens.tolist() == [[7, 10, 11, 20, 22, 21], [8, 30, 31, 40, 42, 41]]
    torch.testing.assert_close(draft.scores.exp()[0], torch.tensor([1, 0.5, 0.3, 0.3, 0.05, 0.06]))
    assert (tree.size, tree.depth, tree.width) == (6, 2, 3)
    assert tree.cut(1, 1).paths == ((0,),)


@pytest.mark.parametrize("paths", [[[0, 1]], [[0], [0]], [[]], [[-1]], [["a"]], [[True]], [[0], [1, 0, 0], [1]]])
def test_static_tree_refuses(paths: list):
    with pytest.raises(InputError, match="tree"):
        StaticTree.of(paths)


def slow_search(table: list[list[float]], nodes: int) -> float:
    """Best total value of a prefix-closed set of ``nodes`` - 1 paths: with falling products, the highest values."""
    values = []
    for depth in range(1, len(table) + 1):
        for path in itertools.product(*(range(len(row)) for row in table[:depth])):
            values.append(math.prod(table[level][rank] for level, rank in enumerate(path)))
    return sum(sorted(values, reverse=True)[: nodes - 1])


@given(st.lists(st.lists(st.floats(0.01, 1), min_size=1, max_size=3), min_size=1, max_size=3), st.integers(1, 30))
@settings(max_examples=50, deadline=None)
def test_the_best_paths_are_the_most_valuable_nodes(table: list[list[float]], nodes: int):
    paths = best_paths(table, nodes)
    values = [math.prod(table[level][rank] for level, rank in enumerate(path)) for path in paths]
    assert values == pytest.approx(sorted(values, reverse=True))
    assert StaticTree(paths).size <= nodes
    assert sum(values) == pytest.approx(slow_search(table, nodes), rel=1e-5)


@given(
    st.lists(st.lists(st.floats(0.01, 1), min_size=3, max_size=3), min_size=3, max_size=3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 30),
)
@settings(max_examples=50, deadline=None)
def test_the_first_paths_within_limits_are_the_best_tree_of_these_limits(
    table: list[list[float]], depth: int, width: int, nodes: int
):
    tree = within(best_paths(table, 40), depth, width, nodes)
    assert tree == StaticTree(best_paths([row[:width] for row in table[:depth]], nodes))


def test_best_paths_hold_nothing_that_was_never_right_and_refuse_what_is_no_table():
    assert best_paths([[0.5, 0.0]], 9) == ((0,),)
    assert best_paths([[0.6, 0.4], [0.5, 0.1]], 4) == ((0,), (1,), (0, 0))
    for bad in ([], [[]], [[1.5]]):
        with pytest.raises(InputError, match="rank_accuracy"):
            best_paths(bad, 4)


def test_check_tree_accepts_and_refuses():
    check_tree(tree_of([7, 3, 9, 4, 0], [-1, 0, 0, 1, -1]))
    for tokens, parents, message in [
        ([7, 3, 3], [-1, 0, 0], "siblings"),
        ([7, 3, 4], [-1, 2, 0], "come before"),
        ([7, 3, 4], [-1, -1, 0], "padding"),
        ([7, 3], [0, 0], "root"),
        ([7, 3, 4], [-1, 0, 2], "come before"),
    ]:
        tree = tree_of([1, 2, 3][: len(tokens)], [-1, 0, 0][: len(tokens)])
        tree.tokens, tree.parents = torch.tensor([tokens]), torch.tensor([parents])
        tree.valid = tree.parents >= 0
        tree.valid[:, 0] = True
        with pytest.raises(ValueError, match=message):
            check_tree(tree)
    wrong = tree_of([7, 3, 9], [-1, 0, 1])
    wrong.ancestors = wrong.ancestors.clone()
    wrong.ancestors[0, 2, 1] = False
    with pytest.raises(ValueError, match="ancestors"):
        check_tree(wrong)


def test_cousins_may_share_a_token():
    check_tree(tree_of([7, 3, 9, 4, 4], [-1, 0, 0, 1, 2]))


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 20))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


@given(st.lists(parent_lists(), min_size=1, max_size=3), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_lineage_and_cut_against_plain_loops(rows: list[list[int]], depth: int):
    size = max(map(len, rows))
    parents = torch.tensor([row + [-1] * (size - len(row)) for row in rows])
    tree = build_tree(torch.arange(size).expand(len(rows), -1), parents)
    for index, row in enumerate(rows):
        lines = [{0}]
        for node in range(1, len(row)):
            lines.append(lines[row[node]] | {node})
        for node, line in enumerate(lines):
            assert set(tree.ancestors[index, node].nonzero()[:, 0].tolist()) == line
            assert int(tree.depths[index, node]) == len(line) - 1
    cut = cut_depth(tree, torch.full((len(rows),), depth))
    check_tree(cut)
    for index, row in enumerate(rows):
        kept = [node for node in range(len(row)) if int(tree.depths[index, node]) <= depth]
        assert cut.tokens[index][cut.valid[index]].tolist() == kept
        assert [kept[p] if p >= 0 else -1 for p in cut.parents[index][cut.valid[index]].tolist()] == [
            row[n] for n in kept
        ]


def test_keep_nodes_pads_rows_of_unequal_size():
    tree = build_tree(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[-1, 0, 1], [-1, 0, 0]]))
    kept = keep_nodes(tree, torch.tensor([[True, False, False], [True, False, True]]))
    check_tree(kept)
    assert kept.tokens.tolist() == [[1, 0], [4, 6]]
    assert kept.valid.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize(("depth", "top_k", "nodes"), list(itertools.product([1, 2, 5], [1, 3, 100], [1, 4, 999])))
def test_dynamic_budgets_on_a_vocabulary_of_16(depth: int, top_k: int, nodes: int):
    policy = DynamicTree(depth, top_k, nodes).fitted(16)
    generator = torch.Generator().manual_seed(depth * 1000 + top_k)
    tree = grow(policy, generator)
    check_tree(tree)
    width = min(top_k, 16)
    assert tree.size == min(nodes, 1 + width + (depth - 1) * width * width)
    assert int(tree.depths.max()) <= depth


def grow(policy: DynamicTree, generator: torch.Generator, rows: int = 2, vocab: int = 16) -> DraftTree:
    """EAGLE-2's expansion with random log-probabilities."""
    scores, offset, pool = torch.zeros(rows, 1), -1, []
    beam = torch.zeros(rows, 1, dtype=torch.int64)
    for _ in range(policy.depth):
        log_probs = torch.randn(rows, scores.shape[1], vocab, generator=generator).log_softmax(-1)
        tokens, new = best_children(log_probs, scores, policy.top_k)
        parents = (beam + offset)[:, :, None].expand_as(tokens)
        offset = offset + (pool[-1][0].shape[1] if pool else 1)
        pool.append((tokens.flatten(1), new.flatten(1), parents.flatten(1)))
        beam = next_beam(pool[-1][1], policy.top_k)
        scores = pool[-1][1].gather(1, beam)
    tokens, scores, parents = (torch.cat(column, 1) for column in zip(*pool, strict=True))
    return rerank(torch.tensor([1, 2]), tokens, scores, parents, policy.total_nodes)


def test_rerank_takes_the_best_and_stays_closed_under_ties():
    # a chain of certain drafts (score 0 all along) and better-placed strangers: children tie with their parents
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    parents = torch.tensor([[-1, -1, 0, 2, 1]])
    scores = torch.tensor([[0.0, -1.0, 0.0, 0.0, -1.0]])
    for nodes in range(1, 7):
        tree = rerank(torch.tensor([9]), tokens, scores, parents, nodes)
        check_tree(tree)
        assert tree.size == nodes
    assert rerank(torch.tensor([9]), tokens, scores, parents, 4).tokens.tolist() == [[9, 1, 3, 4]]


def test_rerank_pads_rows_that_have_fewer_candidates():
    tokens = torch.tensor([[1, 2, 3], [1, 2, 3]])
    parents = torch.tensor([[-1, 0, -1], [-1, 0, 1]])
    scores = torch.tensor([[-0.1, -torch.inf, -0.5], [-0.1, -0.2, -0.3]])
    tree = rerank(torch.tensor([8, 9]), tokens, scores, parents, 10)
    check_tree(tree)
    assert tree.tokens.tolist() == [[8, 1, 3, 0], [9, 1, 2, 3]]
    assert tree.parents.tolist() == [[-1, 0, 0, -1], [-1, 0, 1, 2]]


def test_dynamic_tree_refuses():
    for values in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (1.5, 1, 1)):
        with pytest.raises(InputError, match=r"tree\."):
            DynamicTree(*values)


def test_root_only():
    tree = DraftTree.root_only(torch.tensor([3, 4]))
    check_tree(tree)
    ancestors, depths = lineage(tree.parents)
    assert ancestors.all()
    assert not depths.any()
