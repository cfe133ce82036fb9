"""``specheads export``: a checkpoint in the dialect of a serving engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specheads.cli.console import Console, print_json
from specheads.cli.options import Checkpoint, Json, Overrides
from specheads.utils import InputError


def run(
    checkpoint: Checkpoint,
    format: Annotated[str, typer.Option(help="Dialect: native, medusa or eagle3.")],
    out: Annotated[str, typer.Option(help="Folder to write.")],
    overrides: Overrides = None,
    dtype: Annotated[str, typer.Option(help="Of the tensors: bf16 or fp32.")] = "bf16",
    json: Json = False,
) -> None:
    """Write a checkpoint in another dialect, and read it back to be sure."""
    from specheads.build import load_checkpoint, provenance
    from specheads.jobs.train import export

    console = Console(json)
    if dtype not in ("bf16", "fp32"):
        raise InputError(f"--dtype: got {dtype!r}, expected bf16 or fp32")
    loaded = load_checkpoint(checkpoint, overrides or ())
    folder = export(loaded.head, loaded.target, format, Path(out), console, dtype, run=provenance(loaded.folder))
    if json:
        print_json({"format": format, "folder": str(folder), "files": sorted(path.name for path in folder.iterdir())})
