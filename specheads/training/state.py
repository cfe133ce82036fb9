"""Checkpoints of a training run: complete, atomic, and enough to go on bit by bit as if nothing had happened.

    <out>/checkpoints/step-000123/model.safetensors   the head, fp32 master weights (a native checkpoint,
                                  config.json         which `load_draft` reads as it is)
                                  trainer_state.pt    optimiser, step, data position, RNG of every rank, best metric
    <out>/checkpoints/pointers.json                   {"last": {...}, "best": {...}}

A checkpoint is written under a temporary name and renamed when it is whole, so a kill leaves the one before.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from specheads.checkpoints.io import read_json, temporary_folder
from specheads.utils import InputError, disk_error, write_json

POINTERS = "pointers.json"
STATE_FILE = "trainer_state.pt"
STATE_VERSION = 1


def step_name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step-{step:06d}"


def rng_state() -> dict[str, Any]:
    """This rank's random states (torch's CPU and GPU generators, Python's)."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """The inverse of ``rng_state``."""
    torch.set_rng_state(state["torch"])
    version, values, gauss = state["python"]
    random.setstate((version, tuple(values), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def on_main(accelerator: Accelerator, action: Callable[[], None]) -> None:
    """Run ``action`` on the main process while the others wait; its error is raised on every rank, so none hangs.

    Raises:
        InputError: what ``action`` raised.
    """
    failure: list[str | None] = [None]
    if accelerator.is_main_process:
        try:
            action()
        except InputError as error:
            failure = [str(error)]
    if accelerator.num_processes > 1:
        broadcast_object_list(failure)
    if failure[0] is not None:
        raise InputError(failure[0])


class CheckpointStore:
    """The checkpoints folder of one training run.

    ``write_model(folder)`` writes the head into an existing folder. ``keep``: newest checkpoints kept beside the best.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, write_model: Callable[[Path], None], keep: int) -> None:
        self.folder = folder
        self.accelerator = accelerator
        self.write_model = write_model
        self.keep = keep

    def pointers(self) -> dict[str, Any]:
        """``{"last": {"folder", "step"}, "best": {"folder", "step", "tau"}}``; empty before the first save."""
        path = self.folder / POINTERS
        return read_json(path) if path.exists() else {}

    def save(self, state: dict[str, Any], is_best: bool) -> Path:
        """Write the checkpoint of ``state["step"]``. A collective: every rank calls it.

        Raises:
            InputError: the disk is full; the checkpoints there before are untouched.
        """
        name = step_name(state["step"])
        states = [rng_state()]
        if self.accelerator.num_processes > 1:
            states = gather_object(states)
        on_main(self.accelerator, lambda: self._write(name, {**state, "rng": states}, is_best))
        return self.folder / name

    def _write(self, name: str, state: dict[str, Any], is_best: bool) -> None:
        goal = self.folder / name
        with temporary_folder(goal) as part:
            self.write_model(part)
            try:
                torch.save({"format_version": STATE_VERSION, **state}, part / STATE_FILE)
            except RuntimeError as error:  # torch's writer reports a full disk so
                raise disk_error(goal, OSError(str(error).splitlines()[0])) from error
        pointers = self.pointers()
        pointers["last"] = {"folder": name, "step": state["step"]}
        if is_best:
            pointers["best"] = {"folder": name, **state["best"]}
        write_json(self.folder / POINTERS, pointers)
        self._prune({entry["folder"] for entry in pointers.values()})

    def _prune(self, needed: set[str]) -> None:
        """Remove the oldest checkpoints beyond ``keep``, and what an interrupted write left."""
        for leftover in self.folder.glob(".step-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        folders = sorted(path.name for path in self.folder.glob("step-*") if path.is_dir())
        for name in folders[: -self.keep] if self.keep else folders:
            if name not in needed:
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def last(self) -> Path | None:
        """Folder of the checkpoint to go on from, None before the first."""
        entry = self.pointers().get("last")
        return None if entry is None else self.folder / entry["folder"]


def load_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The trainer state of a checkpoint folder.

    Raises:
        InputError: there is none, it is damaged, or of an unknown version.
    """
    path = Path(folder) / STATE_FILE
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise InputError(
            f"resume: {path} does not exist, expected a training checkpoint; a published draft cannot be resumed, "
            "start a new training"
        ) from error
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise InputError(
            f"resume: {path} is damaged ({str(error).splitlines()[0]}); remove its folder and point "
            f"{POINTERS} to an older step"
        ) from error
    if not isinstance(state, dict) or state.get("format_version") != STATE_VERSION:
        raise InputError(f"resume: {path} is not a trainer state of version {STATE_VERSION}; start a new training")
    return state


def refuse_changes(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Compare what a run depends on, field by field.

    Raises:
        InputError: a field differs, named with both values.
    """
    for field in sorted(saved.keys() | now.keys()):
        if saved.get(field) != now.get(field):
            raise InputError(
                f"resume: {field} is {now.get(field)!r}, but {folder} was trained with {saved.get(field)!r}; go back "
                "to that value, or train into another output folder"
            )
