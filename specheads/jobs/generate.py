"""The target writes the training text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specheads.build import build_target
from specheads.config.schema import Recipe
from specheads.jobs.data import answers_file, chosen_prompts, write_answers
from specheads.jobs.screen import Screen


def generate(recipe: Recipe, output: str | None, screen: Screen) -> dict[str, Any]:
    """Answer the recipe's prompts (``data.live_rows`` of them, all if that is none); JSON-able summary.

    Raises:
        InputError: see ``read_prompts`` and ``distill``.
    """
    chosen, skipped = chosen_prompts(recipe)  # a broken file is told before the target is loaded
    with screen.stage("target"):
        target = build_target(recipe.target)
    screen.line(f"  {target.describe()}")
    path = Path(output) if output else answers_file(recipe)
    report = write_answers(recipe, target, chosen, path, screen)
    return {
        "file": str(path),
        "rows": report.rows,
        "reused": report.reused,
        "replaced": report.replaced,
        "tokens": report.tokens,
        "seconds": round(report.seconds, 2),
        "tokens_per_s": round(report.tokens_per_s, 1),
        "skipped": {**skipped, **report.skipped},
    }
