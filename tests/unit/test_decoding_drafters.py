"""Look-up, the union of trees, and calibration."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specheads.decoding.controller import StepCosts
from specheads.decoding.drafters.feedback import PRIOR_WEIGHT, Calibration, continuation
from specheads.decoding.drafters.host_tree import HostTree, best_tree_of, merge
from specheads.decoding.drafters.joined import JoinedDrafter
from specheads.decoding.drafters.ngram import FIRST_RATES, HitRates, NgramDrafter
from specheads.heads.base import Drafter
from specheads.tree.build import build_tree, check_tree
from specheads.tree.draft_tree import DraftTree
from specheads.types import FeatureSpec
from specheads.utils import InputError

FREE = StepCosts({1: 10.0, 64: 10.0})


def started(drafter: Drafter, rows: list[list[int]], room: int = 50) -> Drafter:
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    drafter.start(tokens, None, torch.tensor([len(row) for row in rows]), width + room)
    return drafter


def slow_lookup(text: list[int], max_match: int, min_match: int, drafts: int) -> list[int]:
    """The definition: longest match first, then the most recent; periodic beyond the end."""
    last = len(text) - 1
    for length in range(min(max_match, last), min_match - 1, -1):
        ending = text[last + 1 - length :]
        for end in range(last - 1, length - 2, -1):
            if text[end + 1 - length : end + 1] == ending:
                follow, period = text[end + 1 :], last - end
                return [follow[step % period] for step in range(drafts)]
    return []


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=24), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 9),
)
@settings(max_examples=150, deadline=None)
def test_lookup_by_definition(rows: list[list[int]], max_match: int, more: int, drafts: int):
    min_match = min(more, max_match)
    drafter = started(NgramDrafter(max_match, min_match, drafts), [row[:-1] for row in rows])
    tree = drafter.propose(torch.tensor([row[-1] for row in rows]))
    check_tree(tree)
    for index, row in enumerate(rows):
        expected = slow_lookup(row, max_match, min_match, drafts)
        assert tree.tokens[index][tree.valid[index]].tolist() == [row[-1], *expected]


def test_lookup_searches_what_was_committed_and_nothing_else():
    drafter = started(NgramDrafter(4, 1, 3), [[5, 6, 7, 8], [5, 9]])
    drafter.propose(torch.tensor([1, 1]))
    # row 0 commits the root and two drafts, row 1 the root alone; the third column of row 1 means nothing
    drafter.accept(torch.tensor([[1, 2, 3], [1, 7, 7]]), None, torch.tensor([3, 1]))
    tree = drafter.propose(torch.tensor([7, 7]))
    assert tree.tokens[0].tolist() == [7, 8, 1, 2]
    assert tree.valid[1].tolist() == [True, False, False, False]
    check_tree(tree)


def test_lookup_example_of_the_docs():
    drafter = started(NgramDrafter(), [[1, 2, 3, 4, 1]])
    assert drafter.propose(torch.tensor([2])).tokens.tolist() == [[2, 3, 4, 1, 2, 3, 4, 1]]
    nothing = started(NgramDrafter(), [[1, 2, 3]]).propose(torch.tensor([9]))
    assert nothing.size == 1


def test_lookup_scores_are_hit_rates_and_learn():
    drafter = started(NgramDrafter(4, 1, 3), [[1, 2, 3, 4, 5, 1]], room=400)
    tree = drafter.propose(torch.tensor([2]))
    rates = FIRST_RATES[1]  # two tokens matched
    expected = [1.0, rates[0], rates[0] * rates[1], rates[0] * rates[1] * rates[2]]
    torch.testing.assert_close(tree.scores.exp()[0], torch.tensor(expected, dtype=torch.float32))
    # a look-up that always fails at its first draft loses its credit
    root = 2
    for step in range(60):
        drafter.accept(torch.tensor([[root]]), None, torch.tensor([1]))
        root = 2 if step % 2 else 1
        tree = drafter.propose(torch.tensor([root]))
    assert tree.size > 1
    table = HitRates(3)
    for _ in range(100):
        table.learn(np.array([2]), np.array([[True, False, True]]), np.array([[True, True, True]]))
    learnt = np.exp(table.log_chances(np.array([2])))[0]
    first, second = (rates[0] * 12 + 100) / 112, rates[1] * 12 / 112
    assert learnt == pytest.approx([first, first * second, first * second * rates[2]])  # the third was never judged
    assert np.exp(table.log_chances(np.array([3])))[0, 0] == pytest.approx(FIRST_RATES[2][0])  # other lengths are kept


def test_lookup_feedback_counts_the_bonus_token():
    drafter = started(NgramDrafter(4, 1, 2), [[1, 2, 3, 4, 1]])
    tree = drafter.propose(torch.tensor([2]))
    assert tree.tokens.tolist() == [[2, 3, 4]]
    before = drafter._rates._hits.copy()
    drafter.accept(torch.tensor([[2, 3]]), None, torch.tensor([2]))  # 3 was accepted
    drafter.propose(torch.tensor([4]))  # and the target's own next token is the second draft
    assert (drafter._rates._hits - before)[1].tolist() == [1, 1, 0, 0, 0, 0]


def test_continuation():
    tokens = np.array([[3, 4, 5], [3, 9, 9], [0, 0, 0]])
    truth = continuation(tokens, np.array([3, 1, 0]), np.array([6, 7, 8]))
    assert truth.tolist() == [[4, 5, 6], [7, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize("values", [(0, 0, 7), (2, 3, 7), (4, 1, 0)])
def test_lookup_refuses(values: tuple[int, int, int]):
    with pytest.raises(InputError, match="lookup: got"):
        NgramDrafter(*values)


# --- union of trees ---


@st.composite
def scored_trees(draw: st.DrawFn, rows: int) -> DraftTree:
    """Random trees over a vocabulary of 3, padded rows, with falling scores (ties with the parent included)."""
    size = draw(st.integers(1, 10))
    tokens, parents, scores = [[0] * size for _ in range(rows)], [[-1] * size for _ in range(rows)], []
    for row in range(rows):
        score, taken, node = [0.0] + [-math.inf] * (size - 1), set(), 1
        for _ in range(draw(st.integers(0, size - 1))):
            parent, token = draw(st.integers(0, node - 1)), draw(st.integers(1, 3))
            if (parent, token) not in taken:
                taken.add((parent, token))
                tokens[row][node], parents[row][node] = token, parent
                score[node] = score[parent] + math.log(draw(st.sampled_from([1.0, 0.6, 0.3])))
                node += 1
        scores.append(score)
    return build_tree(torch.tensor(tokens), torch.tensor(parents), torch.tensor(scores))


def as_paths(tree: DraftTree, row: int) -> dict[tuple[int, ...], float]:
    out: dict[tuple[int, ...], float] = {}
    lines: list[tuple[int, ...]] = []
    for node in range(tree.size):
        if not bool(tree.valid[row, node]):
            break
        parent = int(tree.parents[row, node])
        lines.append(() if parent < 0 else (*lines[parent], int(tree.tokens[row, node])))
        if lines[-1]:
            out[lines[-1]] = math.exp(float(tree.scores[row, node]))
    return out


@given(st.data(), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_merge_is_the_union_of_paths(data: st.DataObject, rows: int):
    first, second = data.draw(scored_trees(rows)), data.draw(scored_trees(rows))
    one, two = HostTree.of(first), HostTree.of(second)
    pool = merge(one, one.scores, two, two.scores)
    for size in (1, 2, 4, 30):
        tree = best_tree_of(np.zeros(rows, np.int64), pool, size).to(torch.device("cpu"))
        check_tree(tree)
        assert tree.size <= size
        for row in range(rows):
            left, right = as_paths(first, row), as_paths(second, row)
            union = {path: 1 - (1 - left.get(path, 0)) * (1 - right.get(path, 0)) for path in left | right}
            got = as_paths(tree, row)
            assert got == {path: pytest.approx(union[path], rel=1e-5) for path in got}
            assert len(got) == min(size - 1, len(union))
            best = sorted(union.values(), reverse=True)[: size - 1]
            assert sorted(got.values(), reverse=True) == pytest.approx(best, rel=1e-5)


def test_calibration_learns_by_depth_and_keeps_trees_closed():
    tree = build_tree(torch.tensor([[0, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 1]]))
    tree.scores = torch.tensor([[1.0, 0.8, 0.1, 0.72]]).log()
    host, calibration = HostTree.of(tree), Calibration()
    assert np.exp(calibration.corrected(host))[0] == pytest.approx([1, 0.8, 0.1, 0.72], rel=1e-6)
    assert calibration.learn(host, np.array([[5]])).tolist() == [0]  # nothing right: 0.9 claimed at depth 1, 0 seen
    factor = PRIOR_WEIGHT / (PRIOR_WEIGHT + 0.9)
    assert np.exp(calibration.corrected(host))[0] == pytest.approx([1, 0.8 * factor, 0.1 * factor, 0.72 * factor])
    assert calibration.learn(host, np.array([[1, 3, 9]])).tolist() == [2]
    deep = (PRIOR_WEIGHT + 1) / (PRIOR_WEIGHT + 0.9)  # depth 2: 0.9 claimed below node 1, 1 seen
    shallow = (PRIOR_WEIGHT + 1) / (PRIOR_WEIGHT + 1.8)
    chances = np.exp(calibration.corrected(host))[0]
    assert chances == pytest.approx([1, 0.8 * shallow, 0.1 * shallow, 0.8 * shallow * min(0.9 * deep, 1)])
    assert calibration.learn(host, np.array([[-1, -1]])).tolist() == [0]  # an ended row teaches nothing
    assert np.exp(calibration.corrected(host))[0] == pytest.approx(chances)


class Fixed(Drafter):
    """Always the same tree below the root."""

    def __init__(self, tokens: list[int], parents: list[int], chances: list[float] | None, layers=()) -> None:
        self.tokens, self.parents, self.chances = tokens, parents, chances
        self.feature_spec, self.max_nodes, self.asked = FeatureSpec(layers), len(tokens) + 1, 0

    def start(self, tokens: Tensor, features: Tensor | None, lengths: Tensor, capacity: int) -> None:
        self.accepts: list[list[int]] = []

    def accept(self, tokens: Tensor, features: Tensor | None, counts: Tensor) -> None:
        self.accepts.append(tokens[0, : int(counts[0])].tolist())

    def propose(self, root: Tensor) -> DraftTree:
        self.asked += 1
        rows = root.shape[0]
        tokens = torch.cat([root[:, None], torch.tensor([self.tokens]).expand(rows, -1)], 1)
        scores = None
        if self.chances is not None:
            scores = torch.tensor([[1.0, *self.chances]]).log().expand(rows, -1)
        return build_tree(tokens, torch.tensor([[-1, *self.parents]]).expand(rows, -1), scores)


def test_joined_takes_the_nodes_that_pay():
    chain = Fixed([1, 2, 3], [0, 1, 2], [0.5, 0.4, 0.3])
    bush = Fixed([1, 4, 5, 6], [0, 0, 1, 2], [0.3, 0.2, 0.1, 0.001])
    joined = started(JoinedDrafter(chain, bush, StepCosts({1: 10.0, 6: 10.5, 7: 100.0, 20: 400.0})), [[9, 9]])
    tree = joined.propose(torch.tensor([0]))
    check_tree(tree)
    assert sorted(as_paths(tree, 0)) == [(1,), (1, 2), (1, 2, 3), (1, 5), (4,)]
    assert as_paths(tree, 0)[(1,)] == pytest.approx(1 - 0.5 * 0.7)
    free = started(JoinedDrafter(chain, bush, FREE), [[9, 9]]).propose(torch.tensor([0]))
    assert free.size == 7
    dear = started(JoinedDrafter(chain, bush, StepCosts({1: 1.0, 2: 9.0, 3: 17.0})), [[9, 9]])
    assert dear.propose(torch.tensor([0])).size == 1
    assert joined.max_nodes == 8
    assert started(JoinedDrafter(chain, bush, FREE, most_nodes=3), [[9]]).propose(torch.tensor([0])).size == 3


def test_budgeted_alone_and_without_scores():
    drafter = started(JoinedDrafter(None, Fixed([1, 2], [0, 0], None), FREE), [[9], [8]])
    tree = drafter.propose(torch.tensor([3, 4]))
    check_tree(tree)
    assert tree.tokens.tolist() == [[3, 1, 2], [4, 1, 2]]
    torch.testing.assert_close(tree.scores.exp(), torch.tensor([[1, 0.5, 0.5]] * 2))


def test_joined_passes_the_head_over_where_the_lookup_is_sure():
    lookup, head = Fixed([1], [0], [0.99]), Fixed([2], [0], [0.3])
    slow = head.propose

    def propose(root: Tensor) -> DraftTree:
        time.sleep(0.0005)
        return slow(root)

    head.propose = propose  # type: ignore[method-assign]
    joined = started(JoinedDrafter(lookup, head, FREE), [[9]])
    for _ in range(20):
        joined.propose(torch.tensor([0]))
        joined.accept(torch.tensor([[0, 1]]), None, torch.tensor([2]))
    assert lookup.asked == 20
    assert 4 <= head.asked < 8
    assert head.accepts == [[0, 1]] * 20  # it is told everything all the same
    lookup.chances = [0.05]
    joined.propose(torch.tensor([0]))
    assert head.asked > 4


def test_joined_refuses():
    with pytest.raises(InputError, match="joined drafter"):
        JoinedDrafter(None, None, FREE)
    with pytest.raises(InputError, match="2 sets"):
        JoinedDrafter(Fixed([1], [0], [0.1], (1,)), Fixed([1], [0], [0.1], (2,)), FREE)
    assert JoinedDrafter(NgramDrafter(), Fixed([1], [0], [0.1], (2,)), FREE).feature_spec.layer_ids == (2,)
