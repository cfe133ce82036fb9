"""A recipe from data to checkpoint, on one process or several."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specheads import build
from specheads.checkpoints import export as write_export
from specheads.checkpoints import load_draft
from specheads.checkpoints.io import temporary_folder
from specheads.config.schema import Recipe
from specheads.data.dataset import RowSource
from specheads.hardware import DTYPES
from specheads.heads.base import Head
from specheads.jobs.data import Rows, features, gather_rows
from specheads.jobs.screen import Progress, Screen
from specheads.target.adapter import Target
from specheads.training.launch import make_accelerator
from specheads.training.settings import TrainCallbacks, TrainResult
from specheads.training.state import STATE_FILE
from specheads.utils import InputError

if TYPE_CHECKING:
    from accelerate import Accelerator

POLL_SECONDS = 1.0


class Shown(TrainCallbacks):
    """Training as a stage's progress: loss, acceptance on training text, best held-out acceptance so far."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.best: float | None = None

    def on_log(self, line: dict[str, Any]) -> None:
        """Steps, loss, tokens/s and the trainer's own time left (which knows of a resume)."""
        first = line["acceptance"][0] if line.get("acceptance") else None
        self.progress(
            line["progress"],
            1.0,
            step=line["step"],
            tokens_per_s=line["tokens_per_s"],
            loss=line["loss"],
            acceptance=first,
            heldout_tau=self.best,
            seconds_left=line["seconds_left"],
        )

    def on_eval(self, line: dict[str, Any]) -> None:
        """The best held-out acceptance length."""
        self.best = line["tau"] if self.best is None else max(self.best, line["tau"])


def train(recipe: Recipe, screen: Screen) -> dict[str, Any]:
    """Answers, features, training, checkpoint, exports; JSON-able summary. Interrupted runs continue.

    On several processes the main one prepares the data while the others wait for it.

    Raises:
        InputError: anything wrong with the recipe, its files, or the launch.
    """
    accelerator = make_accelerator()
    folder = Path(recipe.output_dir)
    with screen.stage("target"):
        target = build.build_target(recipe.target)
    screen.line(f"  {target.describe()}")
    rows, head, sources = prepare_together(recipe, target, screen, accelerator)
    result = run_trainer(recipe, target, head, sources, folder, screen, accelerator)
    summary: dict[str, Any] = {"checkpoint": str(folder / build.CHECKPOINT), "data": rows.report, **described(result)}
    if accelerator.is_main_process:
        keep(result.best, folder / build.CHECKPOINT)
        build.write_record(folder, recipe, target)
        screen.line(f"checkpoint: {folder / build.CHECKPOINT} (best of the run, step {result.best_step})")
        best = load_draft(folder / build.CHECKPOINT, target.config)
        summary["exports"] = {
            name: str(export(best, target, name, folder / "export" / name, screen, recipe.export.dtype))
            for name in recipe.export.formats
        }
    accelerator.wait_for_everyone()
    return summary


def prepare(recipe: Recipe, target: Target, screen: Screen) -> tuple[Rows, Head, tuple[RowSource, RowSource]]:
    """Rows, a fresh head (whose draft vocabulary comes of the rows) and the features it reads."""
    rows = gather_rows(recipe, target, screen)
    head = build.build_head(recipe, target, rows.train)
    return rows, head, features(recipe, target, rows, head.feature_spec.layer_ids, screen)


def prepare_together(
    recipe: Recipe, target: Target, screen: Screen, accelerator: Accelerator
) -> tuple[Rows, Head, tuple[RowSource, RowSource]]:
    """``prepare`` on every process, the main one first: the others then find everything on the (shared) disk.

    They wait for a file, not at a barrier: answering prompts may take hours, and barriers time out.
    """
    if accelerator.num_processes == 1:
        return prepare(recipe, target, screen)
    from accelerate.utils import broadcast_object_list

    name = [uuid.uuid4().hex]  # of this launch, so that a file of an earlier one is never taken for it
    broadcast_object_list(name)
    ready = Path(recipe.output_dir) / f".data-ready-{name[0]}"
    if accelerator.is_main_process:
        prepared = prepare(recipe, target, screen)
        ready.touch()
    else:
        while not ready.exists():
            if os.getppid() == 1:  # the launcher is gone, and with it the main process
                raise InputError("launch: the launcher ended before the data was ready; start the training again")
            time.sleep(POLL_SECONDS)
        prepared = prepare(recipe, target, screen)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        ready.unlink(missing_ok=True)
    return prepared


def run_trainer(
    recipe: Recipe,
    target: Target,
    head: Head,
    sources: tuple[RowSource, RowSource],
    folder: Path,
    screen: Screen,
    accelerator: Accelerator,
) -> TrainResult:
    """Train (or go on training) in ``folder``.

    Raises:
        InputError: see ``Trainer.run``.
    """
    trained = sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad)
    screen.line(f"head: {recipe.head.type}, {trained:,} trained parameters, features of layers {_layers(head)}")
    with screen.stage("training") as progress:
        trainer = build.build_trainer(recipe, target, head, *sources, accelerator, folder, Shown(progress))
        return trainer.run()


def described(result: TrainResult) -> dict[str, Any]:
    """A training's result, JSON-able."""
    return {
        "steps": result.steps,
        "tokens": result.tokens,
        "seconds": round(result.seconds, 1),
        "best_step": result.best_step,
        "best_tau": result.best_tau,
        "best": str(result.best),
    }


def keep(source: Path, goal: Path) -> Path:
    """A training checkpoint without the trainer's state, at ``goal``: whole or not at all."""
    with temporary_folder(goal) as part:
        for path in source.iterdir():
            if path.is_file() and path.name != STATE_FILE:
                shutil.copy2(path, part / path.name)
    return goal


def export(
    head: Head, target: Target, format: str, out: Path, screen: Screen, dtype: str = "bf16", numbers: Any = None
) -> Path:
    """Write a head in a dialect and read it back. ``numbers``: measured results for the model card.

    Raises:
        InputError: a dialect that is not known or cannot hold this head, or the disk is full.
    """
    write_export(head, target.config, target.parts, format, out, dtype=DTYPES[dtype], numbers=numbers)
    load_draft(out, target.config)
    screen.line(f"export: {format}, {dtype}, in {out} (read back)")
    return out


def _layers(head: Head) -> str:
    return ", ".join(map(str, head.feature_spec.layer_ids)) or "none"
