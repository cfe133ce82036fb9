"""A head in the dialect of a serving engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specheads import build
from specheads.checkpoints import export as write_export
from specheads.checkpoints import load_draft
from specheads.hardware import DTYPES
from specheads.heads.base import Head
from specheads.jobs.screen import Screen
from specheads.target.adapter import Target


def export(
    head: Head,
    target: Target,
    format: str,
    out: Path,
    screen: Screen,
    dtype: str,
    numbers: Any = None,
    run: dict[str, Any] | None = None,
) -> Path:
    """Write a head in a dialect and read it back. ``numbers``: measured results for the model card.

    ``run``: the record of the run that made the head (``build.provenance``), kept in the export.

    Raises:
        InputError: a dialect that is not known or cannot hold this head, or the disk is full.
    """
    extra = {"run": run} if run else None
    write_export(head, target.config, target.parts, format, out, dtype=DTYPES[dtype], numbers=numbers, extra=extra)
    load_draft(out, target.config)
    screen.line(f"export: {format}, {dtype}, in {out} (read back)")
    return out


def export_checkpoint(loaded: build.Loaded, format: str, out: Path, screen: Screen) -> Path:
    """``export`` of a checkpoint as it is stored, in its recipe's ``export.dtype``.

    Raises:
        InputError: see ``export``.
    """
    head = load_draft(loaded.folder, loaded.target.config)  # the loaded one is rounded to the target's dtype
    run, dtype = build.provenance(loaded.folder), loaded.recipe.export.dtype
    return export(head, loaded.target, format, out, screen, dtype, run=run)
