"""``specheads evaluate``: how fast a checkpoint makes its target, and whether the words stay the same."""

from __future__ import annotations

from typing import Annotated

import typer

from specheads.cli.console import Console
from specheads.cli.options import Checkpoint, Overrides


def run(
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    suite: Annotated[str | None, typer.Option(help="Suite name or JSONL file of prompts [evaluation.suite].")] = None,
    json: Annotated[str | None, typer.Option(help="File for the report as JSON; - prints it on stdout.")] = None,
    out: Annotated[str | None, typer.Option(help="Folder for report.md, report.json and the pictures.")] = None,
) -> None:
    """Measure a checkpoint: A B A B against the target alone, same prompts, one process.

    Exits with an error where a token differs from the target's own for another reason than a near-tie of bf16.
    """
    from json import dumps as quote  # a JSON string is a YAML string, whatever the path holds

    from specheads.build import load_checkpoint
    from specheads.jobs.evaluate import evaluate

    console = Console(json=json == "-")
    chosen = [f"evaluation.suite={quote(suite, ensure_ascii=False)}"] if suite else []
    evaluate(load_checkpoint(checkpoint, [*(overrides or ()), *chosen]), console, json_file=json, folder=out)
