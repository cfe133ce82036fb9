"""A recipe from data to checkpoint, on one process or several."""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specheads import build
from specheads.checkpoints import load_draft, save_native
from specheads.config.schema import Recipe
from specheads.data.collate import collate
from specheads.data.dataset import RowSource, every_row_once
from specheads.hardware import choose_dtype, dtype_name
from specheads.heads.base import Head
from specheads.jobs.data import Rows, features, gather_rows
from specheads.jobs.export import export
from specheads.jobs.screen import Progress, Screen
from specheads.target.adapter import Target
from specheads.training.launch import make_accelerator, share_dtype_probe, tracking
from specheads.training.settings import TrainCallbacks, TrainResult
from specheads.tree.static import best_paths
from specheads.utils import InputError

if TYPE_CHECKING:
    from accelerate import Accelerator

POLL_SECONDS = 1.0
KEPT_NODES = 64  # of a static tree, root included: more than any step of a small batch pays for


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
    folder = Path(recipe.output_dir)
    accelerator = make_accelerator(cpu=on_cpu(recipe), trackers=recipe.training.trackers, folder=folder)
    if accelerator.is_main_process:
        build.settle_auto(recipe, folder)
    share_dtype_probe(accelerator)
    with screen.stage("target"):
        target = build.build_target(recipe.target)
    screen.line(f"  {target.describe()}")
    rows, head, sources = prepare_together(recipe, target, screen, accelerator)
    result = run_trainer(recipe, target, head, sources, folder, screen, accelerator)
    summary: dict[str, Any] = {"checkpoint": str(folder / build.CHECKPOINT), "data": rows.report, **described(result)}
    if accelerator.is_main_process:
        best = keep(recipe, target, result.best, sources[1], folder / build.CHECKPOINT)
        build.write_record(folder, recipe, target)
        run = build.provenance(folder / build.CHECKPOINT)
        screen.line(f"checkpoint: {folder / build.CHECKPOINT} (best of the run, step {result.best_step})")
        summary["exports"] = {
            name: str(export(best, target, name, folder / "export" / name, screen, recipe.export.dtype, run=run))
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
    launcher = os.getppid()
    if accelerator.is_main_process:
        prepared = prepare(recipe, target, screen)
        ready.parent.mkdir(parents=True, exist_ok=True)
        ready.touch()
    else:
        while not ready.exists():
            if os.getppid() != launcher:  # it is gone, and with it the main process
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
    choice = choose_dtype(recipe.training.dtype, accelerator.device)
    screen.line(f"  trained in {dtype_name(choice.dtype)}: {choice.reason}")
    with screen.stage("training") as progress, tracking(accelerator, tracked(recipe)):
        trainer = build.build_trainer(recipe, target, head, *sources, accelerator, folder, Shown(progress))
        return trainer.run()


def on_cpu(recipe: Recipe) -> bool | None:
    """Whether the training has to stay where the target was asked to be: on the CPU. None: the launcher chooses."""
    return True if recipe.target.device.startswith("cpu") else None


def tracked(recipe: Recipe) -> dict[str, Any]:
    """What a tracker is told of a run: the sections of its resolved recipe, nothing of machine, user or environment."""
    return {name: value for name, value in recipe.resolved().items() if isinstance(value, dict)}


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


def keep(recipe: Recipe, target: Target, best: Path, heldout: RowSource, goal: Path) -> Head:
    """The best training checkpoint as the run's checkpoint at ``goal`` (whole or not at all), its tree chosen."""
    head = load_draft(best, target.config)
    measure_paths(head, target, heldout, max(recipe.decoding.tree_nodes, KEPT_NODES))
    save_native(goal, head, target.config, {"run": {**build.record(recipe, target), **build.trained_in(best)}})
    return head


@torch.no_grad()
def measure_paths(head: Head, target: Target, heldout: RowSource, nodes: int) -> None:
    """For a head of static trees: the paths of ``nodes`` nodes that its hits by rank on held-out rows speak for.

    Decoding takes the first of them that its own limits allow, so it may ask for less or more without training again.
    """
    if not hasattr(head.config, "tree_paths"):
        return
    hits: Tensor | None = None
    judged: Tensor | None = None
    head.to(target.device).eval()
    for rows in every_row_once(heldout.lengths, 4):
        inputs = collate(heldout.rows(rows), head.feature_spec, heldout.layer_ids).to(target.device)
        out = head.training_step(inputs, target.parts)
        if out.rank_hits is not None:
            hits = out.rank_hits if hits is None else hits + out.rank_hits
            judged = out.steps if judged is None else judged + out.steps
    if hits is None or judged is None or not int(judged.min()):
        return
    paths = best_paths(hits.double() / judged.double()[:, None], nodes)
    head.config = replace(head.config, tree_paths=paths)


def _layers(head: Head) -> str:
    return ", ".join(map(str, head.feature_spec.layer_ids)) or "none"
