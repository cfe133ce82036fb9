"""The training loop. It knows no head by name: a head turns a batch into sums (`StepOutput`), the rest is here.

The loss of an optimiser step is the sum over all its supervised positions, divided by their number over every
micro-batch and rank: how a batch is cut changes nothing. Weights are fp32; with ``dtype="bf16"`` the forward runs
under autocast. In a budget of steps or epochs a run is exactly reproducible with the same number of threads; in a
budget of minutes the schedule follows the clock.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from specheads.checkpoints.io import MODEL_FILE, load_strict, read_tensors
from specheads.checkpoints.native import write_native
from specheads.data.dataset import RowSource
from specheads.heads.base import Head
from specheads.training.batches import BatchCursor, evaluation_batches, load_batch, rows_fingerprint
from specheads.training.log import TrainLog
from specheads.training.metrics import Totals
from specheads.training.module import TrainingModule
from specheads.training.optim import build_optimizer, schedule_factor
from specheads.training.settings import HARMLESS, TrainCallbacks, TrainResult, TrainSettings
from specheads.training.state import CheckpointStore, load_state, refuse_changes, set_rng_state
from specheads.types import FrozenParts, TargetConfig
from specheads.utils import InputError


class Trainer:
    """Trains one head on one data set into one folder.

    Args:
        head: moved to the accelerator's device and trained in place, in fp32.
        parts: the target's frozen parts, on that device.
        dataset: rows to train on; evaluation_dataset: held-out rows that the best checkpoint is chosen by (None: the
            last is the best).
        settings: see ``TrainSettings``.
        accelerator: from ``launch.make_accelerator``.
        out_dir: gets ``checkpoints/`` and ``metrics.jsonl``; an unfinished training there is continued.
        target_config: of the target, recorded in every checkpoint.
        callbacks: told of every log line, evaluation and checkpoint (on the main process only).
        extra: recorded in every checkpoint's config.json (provenance).
    """

    def __init__(
        self,
        head: Head,
        parts: FrozenParts,
        dataset: RowSource,
        evaluation_dataset: RowSource | None,
        settings: TrainSettings,
        accelerator: Accelerator,
        out_dir: str | Path,
        *,
        target_config: TargetConfig,
        callbacks: TrainCallbacks | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        places = [(device.type, device.index or 0) for device in (parts.output_weight.device, accelerator.device)]
        if places[0] != places[1]:
            raise InputError(
                f"target.device: the target is on {parts.output_weight.device}, the training runs on "
                f"{accelerator.device}; leave target.device at auto, or choose the GPU with CUDA_VISIBLE_DEVICES"
            )
        self.head = head.float().to(accelerator.device)
        self.parts = parts
        self.dataset, self.evaluation_dataset = dataset, evaluation_dataset
        self.settings = settings
        self.accelerator = accelerator
        self.world = accelerator.num_processes
        module = TrainingModule(self.head, parts, anchored=self.world > 1)
        self.model: nn.Module = accelerator.prepare_model(module) if self.world > 1 else module
        self.low = settings.dtype == "bf16"
        self.optimizers = build_optimizer(
            self.head,
            settings.optimizer,
            learning_rate=settings.learning_rate,
            muon_learning_rate=settings.muon_learning_rate,
            weight_decay=settings.weight_decay,
            dtype=torch.bfloat16 if self.low else torch.float32,
        )
        self.cursor = BatchCursor(
            dataset, settings.seed, settings.rows_per_batch, accelerator.process_index, self.world
        )
        self.max_steps = settings.steps_for(self.cursor.batches_an_epoch)
        self.identity = {
            "target": target_config.fingerprint,
            "dataset": rows_fingerprint(dataset),
            "heldout": rows_fingerprint(evaluation_dataset) if evaluation_dataset is not None else None,
            "head": head.config_dict(),
            "processes": self.world,
        }
        folder = Path(out_dir)
        self.store = CheckpointStore(
            folder / "checkpoints",
            accelerator,
            partial(write_native, head=self.head, target=target_config, extra=extra),
            settings.keep_checkpoints,
        )
        self.log = TrainLog(folder, accelerator, callbacks or TrainCallbacks())
        self.step = 0
        self.tokens = 0
        self.best: dict[str, Any] | None = None
        self.clock_start = time.monotonic()

    # --- progress -------------------------------------------------------------------------------------------------

    def elapsed(self) -> float:
        """Seconds of training so far, those before a resume included; the main process's clock on every rank."""
        seconds = time.monotonic() - self.clock_start
        if self.world == 1 or self.settings.minutes is None:
            return seconds
        mine = torch.tensor([seconds if self.accelerator.is_main_process else 0.0], device=self.accelerator.device)
        return float(self.accelerator.reduce(mine, "sum"))

    def progress(self) -> float:
        """Share of the budget that is used: the larger of steps and time. A collective in a budget of minutes."""
        by_steps = self.step / self.max_steps if self.max_steps else 0.0
        minutes = self.settings.minutes
        return by_steps if minutes is None else max(by_steps, self.elapsed() / (60 * minutes))

    # --- one step -------------------------------------------------------------------------------------------------

    def autocast(self) -> Any:
        """bf16 autocast where it was chosen."""
        return torch.autocast(self.accelerator.device.type, torch.bfloat16) if self.low else nullcontext()

    def backward(self) -> Totals:
        """Gradients of the summed loss over this optimiser step's micro-batches, and the sums over all ranks."""
        totals = Totals()
        micro_batches = self.cursor.take(self.settings.accumulate)
        for index, rows in enumerate(micro_batches):
            inputs = load_batch(self.dataset, rows, self.head.feature_spec)
            last = index == len(micro_batches) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                with self.autocast():
                    out = self.model(inputs.to(self.accelerator.device))
                out.loss.backward()
            totals.add(out, int(inputs.lengths.sum()))
        totals.reduce(self.accelerator)
        return totals

    def scale_gradients(self, count: int) -> float:
        """Divide the summed gradients by the global ``count`` and clip; returns the norm before clipping.

        Data parallelism averages over ranks what should be summed, hence the factor ``world``.
        """
        gradients = [p.grad for p in self.optimizers.parameters if p.grad is not None]
        factor = self.world / max(1, count)
        norm = float(torch.nn.utils.get_total_norm(gradients)) * factor
        if self.settings.clip_norm and norm > self.settings.clip_norm:
            factor *= self.settings.clip_norm / norm
        torch._foreach_mul_(gradients, factor)
        return norm

    def train_step(self, progress: float) -> dict[str, Any]:
        """One optimiser step; returns its numbers.

        Raises:
            InputError: the loss or the gradient is not finite; the weights and the checkpoints are untouched.
        """
        settings, begin = self.settings, time.monotonic()
        factor = schedule_factor(settings.schedule, self.step, settings.warmup_steps, progress)
        rates = self.optimizers.set_factor(factor)
        totals = self.backward()
        norm = self.scale_gradients(totals.count)
        if not (math.isfinite(totals.loss) and math.isfinite(norm)):
            raise InputError(
                f"training: loss {totals.loss / max(1, totals.count):.4g}, gradient norm {norm:.4g} at step "
                f"{self.step + 1}, expected finite numbers; the last checkpoint is untouched "
                f"({self.store.last() or 'none yet'}). Lower the learning rates, or check the features for inf and nan"
            )
        if totals.count:  # a step without any supervised position leaves weights and momenta alone
            self.optimizers.step()
        self.optimizers.zero_grad()
        self.step += 1
        self.tokens += totals.tokens
        self.log.add(totals, time.monotonic() - begin)
        return {"learning_rate": rates, "gradient_norm": norm}

    # --- evaluation and checkpoints -------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> dict[str, Any] | None:
        """Simulated acceptance on the held-out rows (`Totals.summary`), None without any. A collective."""
        dataset = self.evaluation_dataset
        if dataset is None:
            return None
        batches = evaluation_batches(dataset, self.settings.eval_rows, self.settings.rows_per_batch // self.world)
        totals = Totals()
        self.head.eval()
        for rows in batches[self.accelerator.process_index :: self.world]:
            inputs = load_batch(dataset, rows, self.head.feature_spec)
            with self.autocast():
                out = self.head.training_step(
                    inputs.to(self.accelerator.device), self.parts, steps=self.settings.eval_draft_steps
                )
            totals.add(out, int(inputs.lengths.sum()))
        self.head.train()
        totals.reduce(self.accelerator)
        return totals.summary()

    def checkpoint(self, evaluate: bool, save: bool) -> None:
        """Evaluate and save as asked; a new best is always saved."""
        is_best = False
        if evaluate:
            result = self.evaluate()
            if result is not None:
                is_best = self.best is None or result["tau"] > self.best["tau"]
                if is_best:
                    self.best = {"step": self.step, "tau": result["tau"]}
                self.log.evaluation(self.step, {**result, "is_best": is_best, "best": self.best})
        if save or is_best:
            folder = self.store.save(self.state(), is_best)
            self.log.saved(self.step, folder, is_best)

    def depends_on(self) -> dict[str, Any]:
        """What must be the same for a resume to be exact."""
        settings = {f"training.{k}": v for k, v in asdict(self.settings).items() if k not in HARMLESS}
        return {**settings, **self.identity}

    def state(self) -> dict[str, Any]:
        """Everything but the weights and the random states."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "elapsed": time.monotonic() - self.clock_start,
            "cursor": self.cursor.state(),
            "best": self.best,
            "optimizer": self.optimizers.state_dict(),
            "depends_on": self.depends_on(),
        }

    def resume(self) -> None:
        """Go on from the last checkpoint of the output folder, if there is one.

        Raises:
            InputError: it was trained with other settings, target or data, or is damaged.
        """
        folder = self.store.last()
        if folder is None:
            return
        state = load_state(folder)
        refuse_changes(state["depends_on"], self.depends_on(), folder)
        load_strict(self.head, read_tensors(folder / MODEL_FILE), folder)
        self.optimizers.load_state_dict(state["optimizer"])
        self.cursor.restore(state["cursor"])
        self.step, self.tokens, self.best = state["step"], state["tokens"], state["best"]
        self.clock_start = time.monotonic() - state["elapsed"]
        set_rng_state(state["rng"][self.accelerator.process_index])

    # --- the run --------------------------------------------------------------------------------------------------

    def run(self) -> TrainResult:
        """Train to the end of the budget, from the last checkpoint if there is one.

        Raises:
            InputError: see ``resume`` and ``train_step``, or the disk is full.
        """
        settings = self.settings
        torch.manual_seed(settings.seed + self.accelerator.process_index)
        self.resume()
        self.log.start(self.step, self.max_steps, asdict(settings))
        self.head.train()
        progress = self.progress()
        while progress < 1 or not self.step:  # a budget of an instant is one step, so that there is a checkpoint
            numbers = self.train_step(progress)
            progress = self.progress()
            done = progress >= 1
            if done or self.step % settings.log_every == 0:
                numbers |= {"epoch": self.cursor.epoch_float, "progress": min(1.0, progress), "tokens": self.tokens}
                self.log.line(self.step, self.max_steps, time.monotonic() - self.clock_start, numbers)
            self.checkpoint(
                evaluate=done or self.step % settings.eval_every == 0,
                save=done or self.step % settings.save_every == 0,
            )
        return self.result()

    def result(self) -> TrainResult:
        """Where the run stands."""
        pointers = self.store.pointers()
        last = self.store.folder / pointers["last"]["folder"]
        best = pointers.get("best")
        return TrainResult(
            steps=self.step,
            tokens=self.tokens,
            seconds=time.monotonic() - self.clock_start,
            last=last,
            best=self.store.folder / best["folder"] if best else last,
            best_tau=best["tau"] if best else None,
            best_step=best["step"] if best else self.step,
        )
