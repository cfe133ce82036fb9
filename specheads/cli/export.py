"""``specheads export``: a checkpoint in the dialect of a serving engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specheads.cli.console import Console
from specheads.cli.options import Checkpoint, Json, Overrides


def run(
    checkpoint: Checkpoint,
    format: Annotated[str, typer.Option(help="Dialect: native, medusa or eagle3.")],
    out: Annotated[str, typer.Option(help="Folder to write.")],
    overrides: Overrides = None,
    dtype: Annotated[str | None, typer.Option(help="Of the tensors: bf16 or fp32 [export.dtype].")] = None,
    json: Json = False,
) -> None:
    """Write a checkpoint in another dialect, and read it back to be sure."""
    from specheads.build import load_checkpoint
    from specheads.jobs.export import export_checkpoint

    console = Console(json)
    chosen = [f"export.dtype={dtype}"] if dtype else []
    loaded = load_checkpoint(checkpoint, [*(overrides or ()), *chosen])
    folder = export_checkpoint(loaded, format, Path(out), console)
    if json:
        console.json({"format": format, "folder": str(folder), "files": sorted(path.name for path in folder.iterdir())})
