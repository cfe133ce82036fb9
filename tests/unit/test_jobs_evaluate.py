"""A report survives JSON, and the check in fp32 takes only prompts that can be answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evaluation_fakes import Clock, ScriptedDecoder, TableTarget, use_clock

from specheads.build import Loaded
from specheads.config.load import recipe_of
from specheads.evaluation.benchmark import run_benchmark
from specheads.evaluation.divergence import DivergenceError
from specheads.evaluation.report import markdown
from specheads.evaluation.suites import SuitePrompt
from specheads.jobs import evaluate as evaluation
from specheads.jobs.screen import NoScreen
from tests.fakes import tiny_target


def test_a_report_with_an_early_end_survives_json(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    use_clock(monkeypatch, clock)
    target = TableTarget(clock)
    early = ScriptedDecoder(target, 1, 0.5, lambda tokens, call: tokens[:4])
    suite = [SuitePrompt("a", "toy", "code", ({"role": "user", "content": "ab"},))]
    plain = ScriptedDecoder(target, 0, 0.5)
    report = run_benchmark(target, {"joined": early}, suite, plain=plain, max_new_tokens=9)
    again = evaluation.report_of(json.loads(json.dumps(report.to_json(), allow_nan=False)))
    assert markdown(again) == markdown(report)
    assert again.to_json() == report.to_json()
    with pytest.raises(DivergenceError):
        again.check()


def test_exact_tokens_skips_what_cannot_be_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(bytes_tokenizer=True)
    target.tokenizer.chat_template = (
        "{% if 'refuse' in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}{{ messages[0]['content'] }}"
    )
    texts = {"long": "x" * 300, "refused": "refuse", "first": "say 1", "second": "say 2", "last": "say 3"}
    suite = tmp_path / "suite.jsonl"
    suite.write_text("".join(json.dumps({"id": name, "turns": [text, "and"]}) + "\n" for name, text in texts.items()))
    base = {"head": {"type": "eagle3"}, "training": {"epochs": 1}, "evaluation": {"suite": str(suite)}}
    loaded = Loaded(tmp_path, recipe_of(base, ()), target, None)  # type: ignore[arg-type]
    monkeypatch.setattr(evaluation, "build_decoders", lambda *_: {})
    seen: list[list[str]] = []
    verify = evaluation.verify_identical

    def watched(*arguments: object, names: list[str], **options: object) -> object:
        seen.append(names)
        return verify(*arguments, names=names, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(evaluation, "verify_identical", watched)
    found = evaluation.exact_tokens(loaded, NoScreen(), prompts=2, max_new_tokens=3)
    assert seen == [["first", "second"]]
    assert found["prompts"] == 2
    assert found["identical"] == {"plain loop": 1.0}
