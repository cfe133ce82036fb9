"""``specheads generate``: the target writes the training text."""

from __future__ import annotations

from typing import Annotated

import typer

from specheads.cli.console import Console
from specheads.cli.options import Json, Overrides, RecipeFile


def run(
    recipe: RecipeFile,
    overrides: Overrides = None,
    output: Annotated[
        str | None, typer.Option(help="JSONL file to write or continue [output_dir/data/answers.jsonl].")
    ] = None,
    json: Json = False,
) -> None:
    """Let the target answer the recipe's prompts.

    Every answer is a line at once, with its provenance; a run that was stopped is continued by the same command.
    """
    from specheads.config.load import load_recipe

    plan = load_recipe(recipe, overrides or ())  # first: a mistake in it is told before seconds of imports
    from specheads.jobs.generate import generate

    console = Console(json)
    report = generate(plan, output, console)
    if json:
        console.json(report)
