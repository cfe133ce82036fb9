"""Measure a checkpoint against its target alone, and leave a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from specheads.build import Loaded, build_decoders, build_plain
from specheads.checkpoints.io import MODEL_FILE
from specheads.evaluation.benchmark import run_benchmark
from specheads.evaluation.divergence import Divergence, Identity, raise_for_errors, verify_identical
from specheads.evaluation.record import BenchmarkReport, Row
from specheads.evaluation.report import REPORT_FILE, print_report, write_report
from specheads.evaluation.runs import encode_suite
from specheads.evaluation.suites import load_suite
from specheads.jobs.screen import Screen
from specheads.jobs.stages import file_digest
from specheads.utils import check_writable, spread, write_json


def evaluate(
    loaded: Loaded, screen: Screen, *, json_file: str | None = None, folder: str | None = None
) -> BenchmarkReport:
    """Benchmark, show, write what was asked for, and only then fail on tokens that are not the target's own.

    Args:
        json_file: file for the report, ``-`` for stdout.
        folder: for report.md, report.json and the pictures.

    Raises:
        InputError: an unusable suite, a full disk, or (after everything is written) a divergence that is no near tie.
    """
    files = [Path(folder, REPORT_FILE)] if folder else []
    files += [Path(json_file)] if json_file not in (None, "-") else []
    for file in files:
        check_writable(file)  # before minutes are spent
    report = measure(loaded, screen, default=loaded.recipe.decoding.drafter)
    screen.draw(lambda console: print_report(report, console))
    if folder is not None:
        paths = write_report(report, folder)
        screen.line("written: " + ", ".join(str(path) for path in paths.values()))
    if json_file == "-":
        screen.json(report.to_json())
    elif json_file is not None:
        write_json(json_file, report.to_json())
        screen.line(f"written: {json_file}")
    report.check()
    return report


def measure(loaded: Loaded, screen: Screen, default: str | None = "fastest") -> BenchmarkReport:
    """The benchmark of a recipe's section ``evaluation``. ``default``: drafter of the overall line.

    Raises:
        InputError: see ``load_suite`` and ``run_benchmark``.
    """
    section = loaded.recipe.evaluation
    suite = load_suite(section.suite, per_category=section.prompts_per_category)
    with screen.stage("machine"):
        decoders = build_decoders(loaded, section.drafters)
    with screen.stage("evaluation") as progress:
        report = run_benchmark(
            loaded.target,
            decoders,
            suite,
            plain=build_plain(loaded.target),
            max_new_tokens=section.max_new_tokens,
            repeats=section.repeats,
            default=default if default in (None, "fastest", *decoders) else None,
            draft=str(loaded.folder),
            head=loaded.head.name,
            progress=progress,
        )
    report.draft_digest = file_digest(loaded.folder / MODEL_FILE)
    return report


def exact_tokens(loaded: Loaded, screen: Screen, prompts: int, max_new_tokens: int) -> dict[str, Any]:
    """Tokens of every decoder against the target's own over a few usable prompts of the suite; meant for fp32.

    Raises:
        InputError: no usable prompt, or a divergence that is no exact tie.
    """
    first_turns = [replace(prompt, later_turns=()) for prompt in load_suite(loaded.recipe.evaluation.suite)]
    usable, _ = encode_suite(loaded.target, first_turns, max_new_tokens)
    chosen = spread(usable, prompts)
    decoders = {"plain loop": build_plain(loaded.target), **build_decoders(loaded, loaded.recipe.evaluation.drafters)}
    ids = [prompt.ids for prompt in chosen]
    names = [prompt.id for prompt in chosen]
    with screen.stage("the same in fp32") as progress:
        found = verify_identical(loaded.target, decoders, ids, max_new_tokens, names=names, progress=progress)
    raise_for_errors(found)
    return {
        "dtype": "fp32",
        "prompts": len(ids),
        "tokens_each": max_new_tokens,
        "identical": {one.name: one.identical for one in found},
    }


def report_of(value: dict[str, Any]) -> BenchmarkReport:
    """The report that ``to_json`` made ``value`` of, to show it again."""
    plain = value["plain"]
    return BenchmarkReport(
        **{
            **{name: value[name] for name in BenchmarkReport.__dataclass_fields__ if name in value},
            "rows": [_row(row) for row in value["rows"]],
            "by_drafter": {name: _row(row) for name, row in value["by_drafter"].items()},
            "plain": _identity("plain loop", {**plain, "prompts": value["overall"]["prompts"]}),
            "identities": {name: _identity(name, row) for name, row in value["by_drafter"].items()},
        }
    )


def _row(row: dict[str, Any]) -> Row:
    return Row(**{**row, "first_divergences": [_with_infinity(one) for one in row["first_divergences"]]})


def _identity(name: str, row: dict[str, Any]) -> Identity:
    parted = [Divergence(**_with_infinity(one)) for one in row["first_divergences"]]
    return Identity(name, row["prompts"], row["identical"], parted)


def _with_infinity(one: dict[str, Any]) -> dict[str, Any]:
    """A divergence as it was before JSON, which has no infinity: a gap of None was an end too early or too late."""
    return {**one, "gap": float("inf") if one["gap"] is None else one["gap"]}
