"""Tables, files and pictures of a report."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from evaluation_fakes import EOS, Clock, ScriptedDecoder, TableTarget, use_clock
from rich.console import Console

from specheads.evaluation.benchmark import run_benchmark
from specheads.evaluation.record import BenchmarkReport
from specheads.evaluation.report import COLUMNS, markdown, print_report, write_report
from specheads.evaluation.suites import SuitePrompt
from specheads.utils import InputError

SUITE = [
    SuitePrompt(f"{category}-{index}", "toy", category, ({"role": "user", "content": f"{category}{index}"},))
    for category in ("code", "summarization", "translation")
    for index in range(2)
]


def make(monkeypatch: pytest.MonkeyPatch, **decoders: Any) -> BenchmarkReport:
    clock = Clock()
    use_clock(monkeypatch, clock)
    target = TableTarget(clock)
    made = {name: ScriptedDecoder(target, *settings) for name, settings in decoders.items()}
    plain = ScriptedDecoder(target, 0, 0.5)
    return run_benchmark(target, made, SUITE, plain=plain, max_new_tokens=9, repeats=2, draft="runs/toy", head="toy")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> BenchmarkReport:
    return make(monkeypatch, lookup=(1, 0.5), head=(2, 0.6), joined=(7, 0.55))


def screen(report: BenchmarkReport, width: int) -> list[str]:
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=width))
    return stream.getvalue().splitlines()


def test_the_screen_fits_80_columns_and_hides_nothing(report: BenchmarkReport) -> None:
    lines = screen(report, 80)
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    text = "\n".join(lines)
    for name in ("lookup", "head", "joined (default)", "summarization", "overall", "100 %"):
        assert name in text
    assert sum(line.startswith("overall") for line in lines) == 3, "one overall line a drafter"


def test_two_suites_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SUITE", [SUITE[0], SuitePrompt("o", "other", "code", SUITE[1].messages)])
    report = make(monkeypatch, joined=(1, 0.5))
    assert report.suite == "other+toy"
    assert {"toy/code", "other/code"} <= {line.split()[0] for line in screen(report, 120) if line.strip()}


def test_files(report: BenchmarkReport, tmp_path: Path) -> None:
    paths = write_report(report, tmp_path / "deep" / "out")
    assert {path.name for path in (tmp_path / "deep" / "out").iterdir()} == {
        "report.json", "report.md", "acceptance_by_depth.png", "tokens_per_s.png",
    }  # fmt: skip
    assert json.loads(paths["json"].read_text(encoding="utf-8")) == json.loads(json.dumps(report.to_json()))
    for kind in ("acceptance", "speed"):
        picture = paths[kind].read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 5_000
    text = paths["markdown"].read_text(encoding="utf-8")
    assert "| " + " | ".join(COLUMNS) + " |" in text
    for expected in ("### joined (default)", "### lookup", "acceptance_by_depth.png", "commit:", "machine:", "τ"):
        assert expected in text


def test_divergences_are_shown_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    report = make(monkeypatch, joined=(1, 0.5, lambda tokens, call: [*tokens[:4], EOS, *tokens[5:]]))
    text = markdown(report)
    assert "## Where the tokens part" in text
    assert "**no**" in text
    assert "ERROR prompt code-0" in " ".join(screen(report, 200))
    assert "nearly tie" not in text, "an error is not excused"


def test_a_text_that_ends_early_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    report = make(monkeypatch, joined=(1, 0.5, lambda tokens, call: tokens[:4]))
    value = json.dumps(report.to_json(), allow_nan=False)
    assert json.loads(value)["overall"]["first_divergences"][0]["got"] is None
    assert "(end)" in markdown(report)


def test_an_unwritable_folder_is_one_line(report: BenchmarkReport, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(InputError, match="could not be written"):
        write_report(report, tmp_path / "file")


def test_a_drafter_without_any_draft_can_be_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = make(monkeypatch, off=(0, 0.5))
    assert write_report(report, tmp_path)["acceptance"].stat().st_size > 0
    assert "Warning: off never drafted" in "\n".join(screen(report, 120))
