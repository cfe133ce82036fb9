"""The decoder's words are the target's: token for token at temperature 0, by its law above, for any draft and tree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from decoding_fakes import Liar, Oracle, RandomTrees, Scripted, greedy_by_hand, prompts_of
from fakes import tiny_target
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specheads.decoding.baseline import PlainDecoder
from specheads.decoding.controller import StepCosts
from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.drafters.joined import JoinedDrafter
from specheads.decoding.drafters.ngram import NgramDrafter
from specheads.heads.base import Drafter
from specheads.sampling import probabilities
from specheads.target.adapter import Target
from specheads.types import SamplingParams

NEW = 64
PROMPTS = prompts_of(40)
COSTS = StepCosts({1: 10.0, 4: 11.0, 8: 12.0, 16: 15.0, 32: 30.0})


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(seed=3)


@pytest.fixture(scope="module")
def answers(target: Target) -> list[list[int]]:
    """Prompt and the target's own greedy words (no EOS), longer than any test asks for."""
    return [prompt + target.generate([prompt], max_new_tokens=NEW + 12, eos_ids=()).tokens[0] for prompt in PROMPTS]


def new_words(answers: list[list[int]], count: int = NEW) -> list[list[int]]:
    return [row[len(prompt) : len(prompt) + count] for row, prompt in zip(answers, PROMPTS, strict=True)]


def drafters(answers: list[list[int]]) -> dict[str, Callable[[], Drafter]]:
    """Drafters of the rows of ``answers``."""
    return {
        "oracle 5": lambda: Oracle(answers, 5),
        "oracle 1": lambda: Oracle(answers, 1, layer_ids=(0, 3)),
        "liar": lambda: Liar(answers, 4, 64),
        "random trees of 2": lambda: RandomTrees(answers, 2, 64),
        "random trees of 12": lambda: RandomTrees(answers, 12, 64, seed=1),
        "random trees of 40": lambda: RandomTrees(answers, 40, 64, seed=2, right=0.9),
        "look-up": lambda: NgramDrafter(),
        "budgeted look-up": lambda: JoinedDrafter(None, NgramDrafter(drafts=12), COSTS),
        "joined": lambda: JoinedDrafter(NgramDrafter(), RandomTrees(answers, 16, 64, seed=3), COSTS),
        "budgeted head": lambda: JoinedDrafter(None, RandomTrees(answers, 16, 64, seed=4), COSTS, most_nodes=6),
    }


def test_references_agree(target: Target, answers: list[list[int]]):
    """transformers' generate, the plain loop (alone and batched), and a loop without any cache."""
    for index in (0, 1, 2):
        assert greedy_by_hand(target, PROMPTS[index], NEW) == new_words(answers)[index]
    plain = PlainDecoder(target).generate(PROMPTS, max_new_tokens=NEW, eos_ids=())
    assert plain.tokens == new_words(answers)
    assert plain.finish == ["length"] * len(PROMPTS)
    assert plain.stats.target_forwards == plain.stats.emitted == [NEW - 1] * len(PROMPTS)


@pytest.mark.parametrize("name", list(drafters([])))
def test_greedy_is_the_targets_own(name: str, target: Target, answers: list[list[int]]):
    """40 prompts x 64 tokens, B=1 and in batches of 3 rows of unequal length."""
    for size in (1, 3):
        for begin in range(0, len(PROMPTS), size):
            if size == 3 and begin >= 15:
                break
            chosen = slice(begin, begin + size)
            decoder = SpeculativeDecoder(target, drafters(answers[chosen])[name])
            out = decoder.generate(PROMPTS[chosen], max_new_tokens=NEW, eos_ids=())
            assert out.tokens == new_words(answers)[chosen]
            check_stats(out.stats, NEW)


def check_stats(stats, new_tokens: int) -> None:
    steps = sum(stats.target_forwards)
    assert stats.emitted == [new_tokens - 1] * len(stats.emitted)  # the first token is the prefill's
    # no round is cut: the tree never holds a draft that could not be emitted
    assert sum(stats.emitted) == steps + sum(stats.accepted_at_least)  # tau == 1 + sum(accepted_at_least) / steps
    assert stats.accepted_at_least == sorted(stats.accepted_at_least, reverse=True)
    assert all(a <= d for a, d in zip(stats.accepted_at_least, stats.drafted_at_least, strict=False))
    assert stats.tree_nodes >= steps


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_perfect_draft_reaches_depth_plus_one(depth: int, target: Target, answers: list[list[int]]):
    new = 1 + 6 * (depth + 1)  # six full rounds after the prefill's token
    for begin, size in ((0, 1), (1, 3)):
        rows = slice(begin, begin + size)
        out = SpeculativeDecoder(target, lambda rows=rows: Oracle(answers[rows], depth)).generate(
            PROMPTS[rows], max_new_tokens=new, eos_ids=()
        )
        assert out.stats.target_forwards == [6] * size
        assert sum(out.stats.emitted) / sum(out.stats.target_forwards) == depth + 1
        assert out.stats.accepted_at_least == [6 * size] * depth


def test_liar_costs_no_words(target: Target, answers: list[list[int]]):
    out = SpeculativeDecoder(target, lambda: Liar(answers, 3, 64)).generate(PROMPTS[:1], max_new_tokens=20, eos_ids=())
    assert out.stats.target_forwards == [19]
    assert out.stats.accepted_at_least in ([], [0], [0, 0], [0, 0, 0])


@given(
    st.integers(1, 30), st.integers(0, 10_000), st.floats(0, 1), st.lists(st.integers(0, 39), min_size=1, max_size=4)
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tree_any_batch(
    target: Target, answers: list[list[int]], nodes: int, seed: int, right: float, rows: list[int]
):
    known = [answers[row] for row in rows]
    decoder = SpeculativeDecoder(target, lambda: RandomTrees(known, nodes, 64, seed, right))
    out = decoder.generate([PROMPTS[row] for row in rows], max_new_tokens=20, eos_ids=())
    assert out.tokens == [new_words(answers, 20)[row] for row in rows]


@pytest.mark.parametrize("kind", ["gpt2", "mistral_window", "qwen3"])
def test_other_families(kind: str):
    other = tiny_target(kind, seed=5)
    prompts = prompts_of(6, seed=8)
    plain = other.generate(prompts, max_new_tokens=40, eos_ids=()).tokens
    answers = [prompt + words for prompt, words in zip(prompts, plain, strict=True)]
    out = SpeculativeDecoder(other, lambda: RandomTrees(answers, 12, 64)).generate(
        prompts, max_new_tokens=40, eos_ids=()
    )
    assert out.tokens == plain


class Watched(SpeculativeDecoder):
    """Keeps the session, so that a test can look at the cache after every round."""

    def _open(self, rows, sampling):
        self.session = super()._open(rows, sampling)
        return self.session


@pytest.mark.parametrize("size", [1, 3])
def test_cache_after_every_round_is_a_fresh_prefill(size: int, target: Target, answers: list[list[int]]):
    decoder = Watched(target, lambda: RandomTrees(answers[:size], 12, 64, seed=6))
    rows = decoder._rows(PROMPTS[:size], 24, SamplingParams(), (), (), False)
    session = decoder._open(rows, SamplingParams())
    rounds = 0
    for _ in decoder._rounds(session):
        rounds += 1
        lengths = [len(prompt) + len(new) - 1 for prompt, new in zip(PROMPTS[:size], rows.tokens, strict=True)]
        assert session.cache.lengths.tolist() == lengths
        for row, length in enumerate(lengths):
            fresh = target.new_cache(1, 64)
            ids = (PROMPTS[row] + rows.tokens[row])[:length]
            target.forward(torch.tensor([ids]), cache=fresh, logits="none")
            kept = session.cache.storage[:, :, row, :, :length]
            torch.testing.assert_close(kept, fresh.storage[:, :, 0, :, :length], atol=1e-4, rtol=0)
    assert 2 <= rounds <= 25


def test_drafter_is_told_features_of_what_was_committed(target: Target, answers: list[list[int]]):
    made: list[Scripted] = []

    def make() -> Scripted:
        made.append(Oracle(answers[:3], 2, layer_ids=(1, 3)))
        return made[-1]

    SpeculativeDecoder(target, make).generate(PROMPTS[:3], max_new_tokens=12, eos_ids=())
    for row, features in enumerate(made[0].features):
        text = made[0].text[row]
        assert text == answers[row][: len(text)]
        expected = target.forward(torch.tensor([text]), layer_ids=(1, 3), logits="none").features
        torch.testing.assert_close(features, expected[0], atol=1e-4, rtol=1e-5)


def test_two_tokens_of_the_decoder_follow_the_targets_law():
    """T > 0 through the whole decoder: 3,000 rows, the first two tokens after the prefill's, against enumeration."""
    small = tiny_target(seed=1, vocab_size=8)
    params = SamplingParams(1.0, top_k=5, top_p=0.95, seed=11)
    rows, prompt = 3000, [3, 4, 5]

    class Fixed(Scripted):
        def nodes(self, row: int, text: list[int]) -> tuple[list[int], list[int]]:
            return [1, 6, 3, 4, 1, 7], [0, 0, 0, 1, 1, 2]

    out = SpeculativeDecoder(small, lambda: Fixed(7)).generate(
        [prompt] * rows, max_new_tokens=2, sampling=params, eos_ids=()
    )
    three = SpeculativeDecoder(small, lambda: Fixed(7)).generate(
        [prompt] * rows, max_new_tokens=3, sampling=params, eos_ids=()
    )
    first = chances(small, [prompt], params)[0]
    pairs = first[:, None] * chances(small, [[*prompt, token] for token in range(8)], params)
    near(torch.tensor(out.tokens), pairs)
    following = chances(small, [[*prompt, a, b] for a in range(8) for b in range(8)], params).view(8, 8, 8)
    near(torch.tensor(three.tokens)[:, 1:], (pairs[:, :, None] * following).sum(0))
    assert three.stats.accepted_at_least[0] > 100  # drafts did take part


def chances(target: Target, prefixes: list[list[int]], params: SamplingParams):
    logits = target.forward(torch.tensor(prefixes)).logits
    assert logits is not None
    return probabilities(logits[:, -1], params)


def near(tokens: torch.Tensor, exact: torch.Tensor) -> None:
    exact = exact.flatten()
    seen = torch.bincount(tokens[:, 0] * 8 + tokens[:, 1], minlength=64) / len(tokens)
    noise = 0.5 * (2 / torch.pi * exact * (1 - exact) / len(tokens)).sqrt().sum()
    assert not seen[exact == 0].any()
    assert 0.5 * (seen - exact).abs().sum() < 1.6 * noise


def test_seed(target: Target, answers: list[list[int]]):
    decoder = SpeculativeDecoder(target, lambda: RandomTrees(answers, 8, 64))
    before = torch.random.get_rng_state()
    seeded = [
        decoder.generate(PROMPTS[:2], max_new_tokens=20, sampling=SamplingParams(1.5, seed=4), eos_ids=()).tokens
        for _ in range(2)
    ]
    fresh = [
        decoder.generate(PROMPTS[:2], max_new_tokens=20, sampling=SamplingParams(1.5), eos_ids=()).tokens
        for _ in range(2)
    ]
    assert torch.equal(before, torch.random.get_rng_state())
    assert seeded[0] == seeded[1]
    assert fresh[0] != fresh[1]
