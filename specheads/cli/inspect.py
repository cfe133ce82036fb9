"""``specheads inspect``: what a recipe would do, what a checkpoint is, what is supervised in a row."""

from __future__ import annotations

from typing import Annotated

import typer

from specheads.cli.console import Console
from specheads.cli.options import Json, Overrides


def run(
    what: Annotated[
        str, typer.Argument(metavar="RECIPE|CHECKPOINT|DATA", help="A .yaml, a checkpoint, or a .jsonl(.gz).")
    ],
    overrides: Overrides = None,
    row: Annotated[str | None, typer.Option(help="Of data: the row's number (from 0) or id.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Of a recipe: train two steps, export, reload and decode at small size.")
    ] = False,
    json: Json = False,
) -> None:
    """Look before you spend: sizes, memory, disk and time of a recipe; facts of a checkpoint; a row's loss mask."""
    from specheads.jobs.inspect import inspect

    console = Console(json)
    found = inspect(what, overrides or (), row=row, dry_run=dry_run, screen=console)
    if json:
        console.json(found)
