"""What a training run is told (`TrainSettings`), what it tells (`TrainCallbacks`) and what it returns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specheads.utils import InputError

HARMLESS = frozenset({"log_every", "save_every", "keep_checkpoints"})  # may change at a resume: weights don't


@dataclass(frozen=True)
class TrainSettings:
    """Plain arguments of a run. The budget is the one of ``max_steps``, ``epochs``, ``minutes`` that ends first.

    Raises:
        InputError: a value out of range, or no budget.
    """

    learning_rate: float = 1e-3  # AdamW: output rows, norms, biases (everything with optimizer "adamw")
    muon_learning_rate: float = 0.02  # Muon: hidden 2-D weights
    optimizer: str = "muon"  # muon | adamw
    schedule: str = "cosine"  # cosine | linear, to 0 at the end of the budget
    warmup_steps: int = 20
    weight_decay: float = 0.0
    clip_norm: float = 1.0  # of all gradients together; 0 = off
    rows_per_batch: int = 2  # rows of one micro-batch, over all processes together
    accumulate: int = 1  # micro-batches per optimiser step
    max_steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None  # wall clock; the schedule follows it
    log_every: int = 10
    save_every: int = 200
    eval_every: int = 200
    eval_rows: int = 64
    eval_draft_steps: int | None = 7  # draft steps of the simulated acceptance; None = the head's own
    keep_checkpoints: int = 3  # newest ones, beside the best
    seed: int = 0
    dtype: str = "fp32"  # fp32 | bf16 (autocast over fp32 weights)

    def __post_init__(self) -> None:
        for name, known in (
            ("optimizer", ("muon", "adamw")),
            ("schedule", ("cosine", "linear")),
            ("dtype", ("fp32", "bf16")),
        ):
            if getattr(self, name) not in known:
                raise InputError(f"training.{name}: got {getattr(self, name)!r}, expected one of {', '.join(known)}")
        for name in ("rows_per_batch", "accumulate", "log_every", "save_every", "eval_every", "eval_rows"):
            self._at_least(name, 1)
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            self._at_least(name, 0)
        self._at_least("keep_checkpoints", 1)
        for name in ("learning_rate", "muon_learning_rate", "max_steps", "epochs", "minutes", "eval_draft_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"training.{name}: got {value!r}, expected a number above 0")
        if self.max_steps is None and self.epochs is None and self.minutes is None:
            raise InputError("training: got no budget, expected max_steps, epochs or minutes; set one")

    def _at_least(self, name: str, least: int) -> None:
        if not getattr(self, name) >= least:
            raise InputError(f"training.{name}: got {getattr(self, name)!r}, expected at least {least}")

    def steps_for(self, batches_an_epoch: int) -> int | None:
        """Optimiser steps of the budget, None in a budget of minutes alone."""
        bounds = [] if self.max_steps is None else [self.max_steps]
        if self.epochs is not None:
            bounds.append(math.ceil(self.epochs * batches_an_epoch / self.accumulate))
        return min(bounds) if bounds else None


class TrainCallbacks:
    """What a run tells while it goes; override what is wanted. Called on the main process only."""

    def on_start(self, info: dict[str, Any]) -> None:
        """``step`` (0, or where a resume goes on), ``max_steps`` (None in a budget of minutes), ``settings``."""

    def on_log(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl: ``step``, ``max_steps``, ``epoch``, ``progress`` (0..1), ``loss``, ``tau``,
        ``acceptance``, ``hits``, ``learning_rate`` (by optimiser), ``gradient_norm``, ``tokens``, ``tokens_per_s``,
        ``seconds``, ``seconds_left``."""

    def on_eval(self, line: dict[str, Any]) -> None:
        """Held-out numbers: ``step``, ``loss``, ``tau``, ``acceptance``, ``hits``, ``is_best``, ``best``."""

    def on_save(self, step: int, folder: Path, is_best: bool) -> None:
        """A checkpoint is complete."""


@dataclass(frozen=True)
class TrainResult:
    """Where a run ended. ``best`` is the checkpoint with the highest held-out acceptance (the last without held-out
    rows), ``seconds`` includes those before a resume."""

    steps: int
    tokens: int
    seconds: float
    last: Path
    best: Path
    best_tau: float | None
    best_step: int
