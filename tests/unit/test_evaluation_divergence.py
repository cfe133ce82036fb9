"""Near ties, errors, and everything in between."""

from __future__ import annotations

import pytest
import torch
from evaluation_fakes import EOS, Clock, ScriptedDecoder, TableTarget

from specheads.evaluation.divergence import (
    DivergenceError,
    first_difference,
    judge,
    raise_for_errors,
    tolerance,
    verify_identical,
)
from specheads.utils import InputError
from tests.fakes import tiny_target

PROMPT = [3, 4]


def parted(target: TableTarget, place: int, token: str) -> tuple[list[int], list[int]]:
    """The target's text, and one that takes the second best (or a far) token at ``place``."""
    expected = target.text(PROMPT, 8)
    prefix = [*PROMPT, *expected[:place]]
    other = target.second(prefix) if token == "second" else EOS
    return expected, [*expected[:place], other, *expected[place + 1 :]]


@pytest.mark.parametrize(
    ("left", "right", "place"),
    [([1, 2], [1, 2], None), ([], [], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([5], [6], 0)],
)
def test_first_difference(left: list[int], right: list[int], place: int | None) -> None:
    assert first_difference(left, right) == place


@pytest.mark.parametrize(
    ("dtype", "below", "near"),
    [
        (torch.bfloat16, 0.0, True),
        (torch.bfloat16, 0.4, True),  # 4 roundings of 2^-7 at 16 are 0.5
        (torch.bfloat16, 0.6, False),
        (torch.float32, 0.0, True),  # an exact tie
        (torch.float32, 5e-5, True),
        (torch.float32, 1e-3, False),  # what bf16 would excuse
    ],
)
def test_the_margin_decides(dtype: torch.dtype, below: float, near: bool) -> None:
    target = TableTarget(Clock(), dtype, runner_up=below)
    expected, got = parted(target, 3, "second")
    found = judge(target, "p", PROMPT, expected, got)
    assert found is not None
    assert (found.position, found.expected, found.got, found.near_tie) == (3, expected[3], got[3], near)
    assert found.margin == pytest.approx(below, abs=1e-5)
    assert found.tolerance == pytest.approx(tolerance(16.0, dtype))


def test_a_tie_of_the_two_best_excuses_no_third_token() -> None:
    target = TableTarget(Clock(), torch.bfloat16, runner_up=0.0)
    expected, got = parted(target, 2, "far")
    found = judge(target, "p", PROMPT, expected, got)
    assert found is not None
    assert found.margin == 0
    assert found.gap == 16
    assert not found.near_tie


def test_small_logits_are_no_more_exact_than_their_neighbours() -> None:
    class Shifted(TableTarget):
        def logits(self, ids: list[int]) -> torch.Tensor:  # type: ignore[override]
            return super().logits(ids) - 16.0  # the best is 0, the rest reach down to -16

    target = Shifted(Clock(), torch.bfloat16, runner_up=0.4)
    expected, got = parted(target, 3, "second")
    found = judge(target, "p", PROMPT, expected, got)
    assert found is not None
    assert found.near_tie
    assert found.tolerance == pytest.approx(0.5)


def test_an_end_that_is_missing_or_early_is_no_matter_of_rounding() -> None:
    target = TableTarget(Clock(), torch.bfloat16, runner_up=0.0)
    expected = target.text(PROMPT, 8)
    for got, want, have in (
        (expected[:5], expected[5], None),
        ([*expected, 4], None, 4),
    ):
        found = judge(target, "p", PROMPT, expected, got)
        assert found is not None
        assert (found.expected, found.got, found.near_tie) == (want, have, False)


def test_verify_names_the_guilty_decoder() -> None:
    target = TableTarget(Clock(), torch.bfloat16, runner_up=0.25)
    right = ScriptedDecoder(target, 1, 1.0)
    near = ScriptedDecoder(target, 1, 1.0, lambda tokens, call: [*tokens[:-1], target_second(target, tokens)])
    wrong = ScriptedDecoder(target, 1, 1.0, lambda tokens, call: [*tokens[:2], EOS] if call == 1 else tokens)
    told: list[tuple[int, int]] = []
    results = verify_identical(
        target, {"right": right, "near": near, "wrong": wrong}, [PROMPT, [5, 6]], 6,
        names=["a", "b"], progress=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert [(one.name, one.identical, one.near_ties, len(one.errors)) for one in results] == [
        ("right", 1.0, 0, 0),
        ("near", 0.5, 1, 0),  # the second best token is judged on prompt a's prefix only
        ("wrong", 0.5, 0, 1),
    ]
    assert told == [(1, 2), (2, 2)]
    raise_for_errors(results[:2])
    with pytest.raises(
        DivergenceError, match=r"wrong leaves .*prompt b, token 2: expected \d+, got 1; NOT a near"
    ) as e:
        raise_for_errors(results)
    assert isinstance(e.value, InputError)
    assert "\n" not in str(e.value)
    assert "near tie" in results[1].describe()


def target_second(target: TableTarget, tokens: list[int]) -> int:
    """The runner-up for the last token of prompt a's text; any other text keeps its own."""
    mine = target.text(PROMPT, 6)
    return target.second([*PROMPT, *mine[:-1]]) if tokens == mine else tokens[-1]


def test_the_stock_model_is_the_judge() -> None:
    target = tiny_target("llama", lean="off")
    expected = target.generate([PROMPT], max_new_tokens=6, eos_ids=()).tokens[0]
    logits = target.forward(torch.tensor([[*PROMPT, *expected[:4]]])).logits
    assert logits is not None
    best, second = logits[0, -1].topk(2).indices.tolist()
    assert best == expected[4]
    found = judge(target, "p", PROMPT, expected, [*expected[:4], second, 0])
    assert found is not None
    assert found.margin == pytest.approx(float(logits[0, -1, best] - logits[0, -1, second]), abs=1e-4)
    assert not found.near_tie
