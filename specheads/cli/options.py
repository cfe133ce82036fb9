"""Arguments that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="Recipe keys to set, such as training.minutes=10."),
]
RecipeFile = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file such as recipes/smollm2-135m/eagle3.yaml.")
]
Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="A run folder, a checkpoint folder, or a hub id, in any dialect.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else there.")]
