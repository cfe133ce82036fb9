"""The record of a run: metrics.jsonl, callbacks and accelerate's trackers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from specheads.training.metrics import Totals
from specheads.training.settings import TrainCallbacks
from specheads.utils import disk_error, write_text


class TrainLog:
    """Writes one JSON object a line, ``{"kind": "train" | "eval" | "save", "step": ...}``, on the main process."""

    def __init__(self, folder: Path, accelerator: Accelerator, callbacks: TrainCallbacks) -> None:
        self.path = folder / "metrics.jsonl"
        self.accelerator = accelerator
        self.main = accelerator.is_main_process
        self.callbacks = callbacks
        self._fresh()

    def _fresh(self) -> None:
        self.totals, self.seconds = Totals(), 0.0

    def add(self, totals: Totals, seconds: float) -> None:
        """One optimiser step that took ``seconds``; shown with the next line."""
        self.totals.merge(totals)
        self.seconds += seconds

    def start(self, step: int, max_steps: int | None, settings: dict[str, Any]) -> None:
        """The run begins, or goes on behind ``step``: lines of steps that will be done again are dropped."""
        if not self.main:
            return
        kept = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:  # half a line of a killed run
                    continue
                if entry.get("step", 0) <= step and step:
                    kept.append(line)
        write_text(self.path, "".join(line + "\n" for line in kept))
        self.callbacks.on_start({"step": step, "max_steps": max_steps, "settings": settings})

    def line(self, step: int, max_steps: int | None, elapsed: float, numbers: dict[str, Any]) -> None:
        """The steps since the last line, in one."""
        speed = self.totals.tokens / max(self.seconds, 1e-9)
        progress = numbers["progress"]
        entry = {
            "step": step,
            "max_steps": max_steps,
            **numbers,
            **self.totals.summary(),
            "tokens_per_s": speed,
            "seconds": elapsed,
            "seconds_left": elapsed * (1 - progress) / max(progress, 1e-9),
        }
        self._fresh()
        if self.main:
            self._write("train", entry)
            self.callbacks.on_log(entry)

    def evaluation(self, step: int, result: dict[str, Any]) -> None:
        """Held-out numbers."""
        entry = {"step": step, **result}
        if self.main:
            self._write("eval", entry)
            self.callbacks.on_eval(entry)

    def saved(self, step: int, folder: Path, is_best: bool) -> None:
        """A checkpoint is complete."""
        if self.main:
            self._write("save", {"step": step, "folder": folder.name, "is_best": is_best})
            self.callbacks.on_save(step, folder, is_best)

    def _write(self, kind: str, entry: dict[str, Any]) -> None:
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"kind": kind, **entry}) + "\n")
        except OSError as error:
            raise disk_error(self.path, error) from error
        numbers = {f"{kind}/{k}": v for k, v in entry.items() if isinstance(v, (int, float)) and k != "step"}
        self.accelerator.log(numbers, step=entry["step"])
