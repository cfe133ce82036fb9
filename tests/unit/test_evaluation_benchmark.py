"""The benchmark on a table target with a clock of its own: every number can be worked out by hand."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evaluation_fakes import EOS, Clock, ScriptedDecoder, TableTarget, use_clock

from specheads.decoding.baseline import PlainDecoder
from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.drafters.ngram import NgramDrafter
from specheads.evaluation.benchmark import run_benchmark
from specheads.evaluation.divergence import DivergenceError
from specheads.evaluation.record import BenchmarkReport
from specheads.evaluation.suites import SuitePrompt
from specheads.utils import InputError
from tests.fakes import tiny_target

TOP = ["target", "draft", "head", "dtype", "device", "threads", "suite", "rows", "overall"]
OVERALL = [
    "prompts", "tokens", "tau", "acceptance_by_depth", "hf_tokens_per_s", "baseline_tokens_per_s", "tokens_per_s",
    "speedup_vs_hf", "speedup", "identical", "near_ties", "first_divergences",
]  # fmt: skip


def prompt(name: str, category: str, text: str, *later: str) -> SuitePrompt:
    return SuitePrompt(name, "toy", category, ({"role": "user", "content": text},), later)


SUITE = [prompt("a", "code", "ab"), prompt("b", "math", "cd"), prompt("c", "code", "ef")]


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> TableTarget:
    clock = Clock()
    use_clock(monkeypatch, clock)
    return TableTarget(clock)


def bench(
    target: TableTarget, decoders: dict[str, Any], suite: list[SuitePrompt] = SUITE, **options: Any
) -> BenchmarkReport:
    plain = ScriptedDecoder(target, accepted=0, step_seconds=0.5)
    return run_benchmark(target, decoders, suite, plain=plain, max_new_tokens=9, draft="runs/x", head="toy", **options)


def test_numbers_by_hand(target: TableTarget) -> None:
    """9 tokens: HF 9 s; plain 9 forwards of 0.5 s; the draft 1 prefill and 4 steps of 2 tokens, 0.5 s each."""
    report = bench(target, {"joined": ScriptedDecoder(target, 1, 0.5)}, repeats=3)
    row = report.overall
    assert (row.prompts, row.tokens, row.target_forwards) == (3, 27, 3 * 3 * 4)
    assert row.hf_tokens_per_s == pytest.approx(1.0)
    assert row.baseline_tokens_per_s == pytest.approx(2.0)
    assert row.tokens_per_s == pytest.approx(9 / 2.5)
    assert row.speedup_vs_hf == pytest.approx(3.6)
    assert row.speedup == pytest.approx(1.8)
    assert row.tau == row.tau_macro == 2.0
    assert row.acceptance_by_depth == [1.0]
    assert row.cut_tokens == 0
    assert (row.identical, row.near_ties, row.first_divergences) == (1.0, 0, [])
    assert row.digest == row.reference_digest
    assert row.target_ms == pytest.approx(500)
    assert row.draft_ms == pytest.approx(125)
    assert row.plain_target_ms == pytest.approx(500)
    assert row.verify_ms == pytest.approx(62.5)
    assert row.prefill_ms == pytest.approx(500)
    assert row.nodes_per_step == 2
    assert report.warnings == []
    assert [(one.category, one.prompts, one.tokens) for one in report.rows] == [("code", 2, 18), ("math", 1, 9)]
    report.check()


def test_the_names_that_others_build_on(target: TableTarget) -> None:
    report = bench(target, {"joined": ScriptedDecoder(target, 1, 0.5), "lookup": ScriptedDecoder(target, 1, 0.6)})
    value = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert list(value)[: len(TOP)] == TOP
    assert set(OVERALL) <= set(value["overall"])
    for row in value["rows"]:
        assert {"drafter", "suite", "category", *OVERALL} <= set(row)
    assert [(row["drafter"], row["category"]) for row in value["rows"]] == [
        ("joined", "code"), ("joined", "math"), ("lookup", "code"), ("lookup", "math"),
    ]  # fmt: skip
    assert set(value["by_drafter"]) == {"joined", "lookup"}
    assert value["overall"] == value["by_drafter"]["joined"]
    assert value["overall"]["category"] == "all"
    assert value["plain"]["identical"] == 1.0
    assert (value["target"], value["draft"], value["head"], value["dtype"]) == ("table", "runs/x", "toy", "fp32")
    assert {"processor", "threads", "packages", "date", "git", "command"} <= set(value["machine"])


def test_systems_take_turns_and_the_first_pass_is_warm_up(target: TableTarget) -> None:
    order: list[str] = []

    class Spy:
        def __init__(self, name: str, inner: Any) -> None:
            self.name, self.inner = name, inner

        def generate(self, prompts: Any, **options: Any) -> Any:
            order.append(self.name)
            return self.inner.generate(prompts, **options)

    target.generate = Spy("H", SimpleNamespace(generate=target.generate)).generate  # type: ignore[method-assign]
    run_benchmark(
        target,
        {"one": Spy("1", ScriptedDecoder(target, 1, 0.5)), "two": Spy("2", ScriptedDecoder(target, 1, 0.5))},
        SUITE[:2],
        plain=Spy("P", ScriptedDecoder(target, 0, 0.5)),
        max_new_tokens=4,
        repeats=2,
    )
    assert "".join(order) == "HP12" + "HP12" * 4


def test_the_ratio_is_a_median_with_its_spread(target: TableTarget) -> None:
    decoder = ScriptedDecoder(target, 1, 0.5)
    slow = {2 * 3: 10.0}  # the second repeat's first call (one warm-up call before, three prompts a repeat) is slow
    inner = decoder.generate

    def generate(prompts: Any, **options: Any) -> Any:
        target.clock.now += slow.get(decoder.calls, 0.0)
        return inner(prompts, **options)

    decoder.generate = generate  # type: ignore[method-assign]
    row = bench(target, {"joined": decoder}, repeats=3).overall
    assert row.speedup_vs_hf == pytest.approx(3.6)
    least, greatest = row.speedup_vs_hf_spread
    assert greatest == pytest.approx(3.6)
    assert least == pytest.approx(27 / (3 * 2.5 + 10))
    assert row.tokens_per_s == pytest.approx(3 * 27 / (9 * 2.5 + 10)), "the rate is all tokens over all time"


def test_outputs_that_differ_on_purpose_fail_after_the_report(target: TableTarget) -> None:
    liar = ScriptedDecoder(target, 3, 0.01, lambda tokens, call: [*tokens[:4], EOS, *tokens[5:]])
    report = bench(target, {"joined": liar, "honest": ScriptedDecoder(target, 1, 0.5)})
    assert report.overall.identical == 0.0
    assert len(report.overall.first_divergences) == 3
    assert report.overall.first_divergences[0]["position"] == 4
    assert report.by_drafter["honest"].identical == 1.0
    assert report.overall.digest != report.overall.reference_digest
    with pytest.raises(DivergenceError, match=r"joined leaves the target's own greedy text \(3 prompts\)"):
        report.check()


def test_a_plain_loop_that_lies_fails_too(target: TableTarget) -> None:
    plain = ScriptedDecoder(target, 0, 0.5, lambda tokens, call: [*tokens[:4], EOS])
    report = run_benchmark(
        target, {"joined": ScriptedDecoder(target, 1, 0.5)}, SUITE, plain=plain, max_new_tokens=9, repeats=1
    )
    assert report.plain.identical == 0.0
    with pytest.raises(DivergenceError, match="plain loop leaves"):
        report.check()


def test_one_repeat_that_differs_is_seen(target: TableTarget) -> None:
    liar = ScriptedDecoder(target, 1, 0.5, lambda tokens, call: [*tokens[:-1], EOS] if call == 5 else tokens)
    report = bench(target, {"joined": liar}, repeats=2)
    assert report.overall.identical == pytest.approx(2 / 3)
    assert [one.category for one in report.rows if one.identical < 1] == ["math"]


def test_near_ties_are_counted_and_do_not_fail(target: TableTarget) -> None:
    target.dtype, target.runner_up = torch.bfloat16, 0.25

    def flip(tokens: list[int], call: int) -> list[int]:
        if call not in (2, 5):  # after one call of warm-up, prompt b is the second of three in both repeats
            return tokens
        ids = target.tokenizer("cd\n\n", add_special_tokens=False)["input_ids"]
        return [*tokens[:3], target.second([*ids, *tokens[:3]]), *tokens[4:]]

    report = bench(target, {"joined": ScriptedDecoder(target, 1, 0.5, flip)})
    row = report.overall
    assert (row.identical, row.near_ties) == (pytest.approx(2 / 3), 1)
    assert row.first_divergences[0]["margin"] == pytest.approx(0.25)
    report.check()


def test_warnings(target: TableTarget) -> None:
    report = bench(target, {"slow": ScriptedDecoder(target, 1, 5.0), "off": ScriptedDecoder(target, 0, 0.4)})
    told = " | ".join(report.warnings)
    assert "slow is slower than the plain loop" in told
    assert "slow is slower than the HF generate" in told
    assert "off never drafted a token" in told


def test_default_drafter(target: TableTarget) -> None:
    decoders = {"lookup": ScriptedDecoder(target, 1, 0.9), "head": ScriptedDecoder(target, 1, 0.1)}
    assert bench(target, decoders, repeats=1).default_drafter == "lookup"
    assert bench(target, decoders, repeats=1, default="fastest").default_drafter == "head"
    with pytest.raises(InputError, match="default drafter: got 'joined', expected one of lookup, head or fastest"):
        bench(target, decoders, default="joined")


def test_later_turns_follow_the_reference_s_answer(target: TableTarget) -> None:
    heard: list[list[int]] = []
    decoder = ScriptedDecoder(target, 1, 0.5)
    inner = decoder.generate

    def generate(prompts: Any, **options: Any) -> Any:
        heard.append(prompts[0])
        return inner(prompts, **options)

    decoder.generate = generate  # type: ignore[method-assign]
    report = bench(target, {"joined": decoder}, [prompt("mt", "writing", "ab", "cd")], repeats=1)
    assert report.overall.prompts == 2
    first, second = heard[1:]  # after the warm-up
    answer = target.tokenizer.decode(target.text(first, 9), skip_special_tokens=True)
    assert second == target.tokenizer(f"ab\n\n{answer}\n\ncd\n\n", add_special_tokens=False)["input_ids"]


def test_prompts_that_do_not_fit_are_counted(target: TableTarget) -> None:
    suite = [*SUITE, prompt("long", "code", "x" * 70)]
    report = bench(target, {"joined": ScriptedDecoder(target, 1, 0.5)}, suite)
    assert report.overall.prompts == 3
    assert report.skipped == {"longer than the target's context": 1}
    assert any("prompts left out: 1 longer" in text for text in report.warnings)
    with pytest.raises(InputError, match="no usable prompt among 1"):
        bench(target, {"joined": ScriptedDecoder(target, 1, 0.5)}, suite[3:])


def test_nothing_to_measure(target: TableTarget) -> None:
    for options in ({"suite": []}, {"decoders": {}}, {"repeats": 0}):
        arguments: dict[str, Any] = {"decoders": {"a": ScriptedDecoder(target, 1, 0.5)}, **options}
        with pytest.raises(InputError, match="expected at least 1 of each"):
            bench(target, **arguments)


def test_counters_that_lie_stop_the_benchmark(target: TableTarget) -> None:
    decoder = ScriptedDecoder(target, 1, 0.5)
    inner = decoder.generate

    def generate(prompts: Any, **options: Any) -> Any:
        output = inner(prompts, **options)
        output.stats.emitted[0] += 5
        return output

    decoder.generate = generate  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="decoding counters"):
        bench(target, {"joined": decoder})


def test_the_real_decoders_on_a_tiny_model() -> None:
    target = tiny_target("llama")
    report = run_benchmark(
        target,
        {"lookup": SpeculativeDecoder(target, NgramDrafter)},
        SUITE,
        plain=PlainDecoder(target),
        max_new_tokens=24,
        repeats=1,
    )
    assert report.overall.identical == report.plain.identical == 1.0
    assert report.overall.tau is not None
    assert report.overall.tau >= 1
    assert report.overall.prefill_ms > 0
    report.check()
