"""Verification: the walk against a plain loop, and the law of sampling against exact enumeration."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specheads.sampling import pick, probabilities
from specheads.tree.build import build_tree
from specheads.tree.draft_tree import DraftTree
from specheads.types import SamplingParams, Verdict
from specheads.verify import VERIFIERS, verifier_for
from specheads.verify.walk import walk

VOCABULARY = 6
DRAWS = 30_000
# root 0 with children 3, 5 and 1; under 3: 4 and 3; under 4: 2. Some drafts are likely, some are not.
TREE = build_tree(torch.tensor([[0, 3, 5, 1, 4, 3, 2]]), torch.tensor([[-1, 0, 0, 0, 1, 1, 4]]))
MODEL = torch.randn(VOCABULARY, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3))


def next_logits(before: Tensor, last: Tensor) -> Tensor:
    """The model of these tests: logits of the next token from the last two."""
    return MODEL[before, last]


def node_logits() -> Tensor:
    """1 N V: what the target says at every node of the tree (token 0 before the root)."""
    tokens, parents = TREE.tokens[0], TREE.parents[0]
    before = torch.where(parents >= 0, tokens[parents.clamp(min=0)], 0)
    return next_logits(before, tokens)[None]


def emitted_pairs(verify: Callable[..., Verdict], params: SamplingParams, draws: int = DRAWS) -> Tensor:
    """V V: how often the first two emitted tokens were (a, b). Rows that emitted one token draw the next plainly."""
    generator = torch.Generator().manual_seed(9)
    tree = DraftTree(*(getattr(TREE, name).expand(draws, *getattr(TREE, name).shape[1:]) for name in
                       ("tokens", "parents", "depths", "ancestors", "valid")))  # fmt: skip
    verdict = verify(tree, node_logits().expand(draws, -1, -1), params, generator)
    rows = torch.arange(draws)
    emitted = torch.cat([tree.tokens.gather(1, verdict.path)[:, 1:], torch.zeros(draws, 1, dtype=torch.int64)], 1)
    emitted[rows, verdict.counts - 1] = verdict.bonus
    first = emitted[:, 0]
    second = pick(next_logits(torch.zeros_like(first), first), params, generator)
    second = torch.where(verdict.counts >= 2, emitted[:, 1], second)
    return torch.bincount(first * VOCABULARY + second, minlength=VOCABULARY**2) / draws


def exact_pairs(params: SamplingParams) -> Tensor:
    first = probabilities(next_logits(torch.tensor(0), torch.tensor(0)), params)
    second = probabilities(next_logits(torch.zeros(VOCABULARY, dtype=torch.int64), torch.arange(VOCABULARY)), params)
    return (first[:, None] * second).flatten()


def distance(seen: Tensor, exact: Tensor) -> float:
    """Total variation in units of what sampling noise alone gives on average."""
    noise = 0.5 * (2 / torch.pi * exact * (1 - exact) / DRAWS).sqrt().sum()
    return float(0.5 * (seen - exact).abs().sum() / noise)


SETTINGS = [
    SamplingParams(1.0),
    SamplingParams(0.5),
    SamplingParams(2.0),
    SamplingParams(1.0, top_k=3),
    SamplingParams(1.0, top_p=0.7),
    SamplingParams(0.8, top_k=4, top_p=0.9),
]


@pytest.mark.parametrize("params", SETTINGS)
def test_sampling_keeps_the_targets_law(params: SamplingParams):
    exact = exact_pairs(params)
    seen = emitted_pairs(verifier_for(params), params)
    assert not seen[exact == 0].any()
    assert distance(seen, exact) < 1.6


def wrong_threshold(tree: DraftTree, logits: Tensor, params: SamplingParams, generator: torch.Generator) -> Verdict:
    """Accepts the first child that is likely enough (as in "typical acceptance")."""
    chances, choices = probabilities(logits, params), pick(logits, params, generator)
    for child in range(tree.size - 1, 0, -1):
        parent = int(tree.parents[0, child])
        likely = chances[:, parent].gather(1, tree.tokens[:, child : child + 1])[:, 0] > 0.15
        choices[:, parent] = torch.where(likely, tree.tokens[:, child], choices[:, parent])
    return walk(tree, choices)


def wrong_bonus(tree: DraftTree, logits: Tensor, params: SamplingParams, generator: torch.Generator) -> Verdict:
    """Accepts every child with its chance, but draws the bonus from the whole p: refused children are not zeroed."""
    chances, choices = probabilities(logits, params), pick(logits, params, generator)
    for child in range(tree.size - 1, 0, -1):
        parent = int(tree.parents[0, child])
        chance = chances[:, parent].gather(1, tree.tokens[:, child : child + 1])[:, 0]
        taken = torch.rand(chance.shape, generator=generator) < chance
        choices[:, parent] = torch.where(taken, tree.tokens[:, child], choices[:, parent])
    return walk(tree, choices)


@pytest.mark.parametrize("rule", [wrong_threshold, wrong_bonus, VERIFIERS["greedy"]])
def test_wrong_rules_fail_the_same_check(rule: Callable[..., Verdict]):
    params = SamplingParams(1.0)
    assert distance(emitted_pairs(rule, params), exact_pairs(params)) > 8


def test_options_must_reach_every_node():
    """Top-k on the bonus token alone, or at another temperature, is seen."""
    params = SamplingParams(0.7, top_k=3)
    assert distance(emitted_pairs(VERIFIERS["sampling"], SamplingParams(0.7)), exact_pairs(params)) > 8
    assert distance(emitted_pairs(VERIFIERS["sampling"], SamplingParams(1.0, top_k=3)), exact_pairs(params)) > 8


def slow_walk(tokens: list[int], parents: list[int], choices: list[int]) -> tuple[list[int], int]:
    path = [0]
    while True:
        want = choices[path[-1]]
        child = [node for node in range(1, len(tokens)) if parents[node] == path[-1] and tokens[node] == want]
        if not child:
            return path, want
        path.append(child[0])


@st.composite
def verified_rows(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    size = draw(st.integers(1, 14))
    tokens, parents, taken = [draw(st.integers(0, 3))], [-1], set()
    for node in range(1, size):
        parent, token = draw(st.integers(0, node - 1)), draw(st.integers(0, 3))
        if parent < len(tokens) and (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return tokens, parents, draw(st.lists(st.integers(0, 3), min_size=len(tokens), max_size=len(tokens)))


@given(st.lists(verified_rows(), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_walk_and_greedy_against_a_plain_loop(rows: list[tuple[list[int], list[int], list[int]]]):
    size = max(len(tokens) for tokens, _, _ in rows)
    tokens, parents, choices = (
        torch.tensor([row[part] + [fill] * (size - len(row[part])) for row in rows])
        for part, fill in ((0, 0), (1, -1), (2, 0))
    )
    tree = build_tree(tokens, parents)
    logits = torch.nn.functional.one_hot(choices, 4).float()
    for verdict in (
        walk(tree, choices),
        VERIFIERS["greedy"](tree, logits, SamplingParams(), None),
        VERIFIERS["sampling"](tree, logits * 1e4, SamplingParams(1.0), torch.Generator()),
    ):
        for index, row in enumerate(rows):
            path, bonus = slow_walk(*row)
            count = int(verdict.counts[index])
            assert verdict.path[index, :count].tolist() == path
            assert not verdict.path[index, count:].any()
            assert int(verdict.bonus[index]) == bonus
