"""A head in the dialect of a serving engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specheads import build
from specheads.checkpoints import export as write_export
from specheads.checkpoints import load_draft
from specheads.checkpoints.io import MODEL_FILE
from specheads.evaluation.report import REPORT_FILE
from specheads.hardware import DTYPES
from specheads.heads.base import Head
from specheads.jobs.screen import Screen
from specheads.jobs.stages import file_digest
from specheads.target.adapter import Target
from specheads.utils import InputError


def export(
    head: Head,
    target: Target,
    format: str,
    out: Path,
    screen: Screen,
    dtype: str,
    numbers: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
) -> Path:
    """Write a head in a dialect and read it back. ``numbers``: measured rows by drafter, for the model card.

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
    """``export`` of a checkpoint as it is stored, in its recipe's ``export.dtype``, with what was measured of it.

    Raises:
        InputError: see ``export``; or ``out`` is the checkpoint itself.
    """
    if out.expanduser().resolve() == loaded.folder.resolve():
        raise InputError(f"--out: {out} is the checkpoint that is exported, expected another folder; it would be lost")
    head = load_draft(loaded.folder, loaded.target.config)  # the loaded one is rounded to the target's dtype
    run, dtype = build.provenance(loaded.folder), loaded.recipe.export.dtype
    return export(head, loaded.target, format, out, screen, dtype, measured(loaded.folder, screen), run)


def measured(folder: Path, screen: Screen) -> dict[str, Any] | None:
    """Rows by drafter of the report beside a checkpoint; None without one of these very weights."""
    run = folder.parent if folder.name == build.CHECKPOINT else folder
    report = build.json_object(run / REPORT_FILE)
    if (folder / MODEL_FILE).is_file() and report.get("draft_digest") == file_digest(folder / MODEL_FILE):
        screen.line(f"  numbers on its card: of {run / REPORT_FILE}")
        return report["by_drafter"]
    screen.line(
        f"  no numbers on its card: {run} has no report of these weights (specheads evaluate {run} --out {run})"
    )
    return None
