"""``specheads train``: a recipe from data to checkpoint; also under ``accelerate launch -m specheads train``."""

from __future__ import annotations

from specheads.cli.console import Console
from specheads.cli.options import Json, Overrides, RecipeFile


def run(recipe: RecipeFile, overrides: Overrides = None, json: Json = False) -> None:
    """Train a draft head: answers, features, training, checkpoint, export.

    What is already there is reused, and an interrupted training continues from its last saved step. On several
    processes: accelerate launch --config_file configs/accelerate/cpu-2.yaml -m specheads train RECIPE
    """
    from specheads.config.load import load_recipe

    plan = load_recipe(recipe, overrides or ())  # first: a mistake in it is told before seconds of imports
    from specheads.jobs.train import train

    console = Console(json)
    result = train(plan, console)
    if json:
        console.json(result)
