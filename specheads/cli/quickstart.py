"""``specheads quickstart``: from nothing to a measured speed-up in a quarter of an hour."""

from __future__ import annotations

from typing import Annotated

import typer

from specheads.cli.console import Console
from specheads.cli.options import Json


def run(
    head: Annotated[str, typer.Option(help="Draft head to train: eagle3 or medusa.")] = "eagle3",
    minutes: Annotated[float, typer.Option(min=0.05, help="Minutes of training.")] = 6.0,
    target: Annotated[
        str, typer.Option(help="Embedded default, hub id, or folder of a causal language model.")
    ] = "smollm2-135m",
    output: Annotated[
        str | None, typer.Option(help="Folder for everything that is made [runs/quickstart-HEAD].")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start again instead of reusing what is there.")] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Recipe key to set; may be repeated.")
    ] = None,
    json: Json = False,
) -> None:
    """Train a draft head for a small model and measure what it is worth: at most 15 minutes on two cores.

    A second run reuses what is there and continues what was interrupted.
    """
    from specheads.jobs import quickstart

    console = Console(json)
    recipe = quickstart.recipe_for(head, minutes, target, output, tuple(overrides or ()))
    report = quickstart.run(recipe, console, fresh=fresh, overrides=tuple(overrides or ()))
    if json:
        console.json(report)
