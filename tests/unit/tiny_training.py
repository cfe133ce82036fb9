"""A head and a data set small enough to train in seconds, for the training and checkpoint tests.

As a program it trains them in a process of its own: ``python tiny_training.py OUT [field=value ...]``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specheads.data.dataset import RowSource
from specheads.data.feature_cache import FeatureRow
from specheads.heads.base import Drafter, Head
from specheads.training.launch import make_accelerator
from specheads.training.settings import TrainCallbacks, TrainResult, TrainSettings
from specheads.training.trainer import Trainer
from specheads.types import FeatureSpec, FrozenParts, HeadInputs, StepOutput, TargetConfig
from specheads.utils import InputError

H, V, DEPTH = 8, 16, 3

TARGET = TargetConfig(
    name="tiny", model_type="llama", hidden_size=H, intermediate_size=16, num_layers=3, num_heads=2, num_kv_heads=1,
    head_dim=4, vocab_size=V, context_limit=64, eos_ids=(2,), rms_norm_eps=1e-5, rope_theta=1e4, rope_scaling=None,
    fingerprint="f00d",
)  # fmt: skip


@dataclass(frozen=True)
class TinyConfig:
    """Sizes, and a dropout so that the random state matters."""

    hidden_size: int = H
    vocab_size: int = V
    dropout: float = 0.1


class TinyHead(Head):
    """Predicts the target's next DEPTH argmaxes from one feature vector, each with its own output rows."""

    name = "tiny"

    def __init__(self, config: TinyConfig = TinyConfig()) -> None:
        super().__init__()
        self.config = config
        self.feature_spec = FeatureSpec((1, 3))
        self.fc = nn.Linear(2 * H, H)
        self.unused = nn.Linear(H, H)  # takes part in the loss only where something is supervised
        self.norm = nn.LayerNorm(H)
        self.drop = nn.Dropout(config.dropout)
        self.lm_head = nn.Linear(H, DEPTH * V, bias=False)

    @classmethod
    def build(cls, target: TargetConfig, parts: FrozenParts, options: dict[str, Any], draft_ids: Tensor | None) -> Head:
        return cls()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Head:
        return cls(TinyConfig(**config))

    def config_dict(self) -> dict[str, Any]:
        return asdict(self.config)

    def training_step(self, inputs: HeadInputs, parts: FrozenParts, steps: int | None = None) -> StepOutput:
        hidden = self.norm(self.drop(self.fc(inputs.features.float())))
        length = inputs.input_ids.shape[1]
        zero = torch.zeros((), dtype=torch.int64)
        loss, count = hidden.new_zeros(()), zero.clone()
        numbers = []
        joint = torch.ones_like(inputs.loss_mask)
        if bool(inputs.loss_mask.any()):
            hidden = hidden + self.unused(hidden)
        logits = self.lm_head(hidden).unflatten(-1, (DEPTH, V))
        for depth in range(DEPTH):
            end = length - depth - 1
            mask = inputs.loss_mask[:, depth + 1 :]
            labels = inputs.target_argmax[:, depth : depth + end]
            got = logits[:, :end, depth]
            if bool(mask.any()):
                loss = loss + nn.functional.cross_entropy(got[mask].float(), labels[mask], reduction="sum")
            right = (got.argmax(-1) == labels) & mask
            joint = joint[:, :end] & right
            numbers.append(torch.stack([right.sum(), joint.sum(), mask.sum()]))
            count = count + (mask.sum() if depth == 0 else 0)
        hits, joints, judged = torch.stack(numbers, dim=1)
        return StepOutput(loss, count, hits, joints, judged)

    def tree_policy(self, depth: int | None, top_k: int | None, nodes: int) -> Any:
        raise NotImplementedError

    def drafter(self, parts: FrozenParts, policy: Any = None) -> Drafter:
        raise NotImplementedError


class TinyRows(RowSource):
    """Random features whose labels follow from them, so that there is something to learn."""

    def __init__(self, rows: int = 14, seed: int = 0, silent: tuple[int, ...] = ()) -> None:
        generator = torch.Generator().manual_seed(seed)
        mix = torch.randn(2 * H, V, generator=torch.Generator().manual_seed(99))
        self.layer_ids = (1, 3)
        self.stored = []
        for index in range(rows):
            length = int(torch.randint(5, 12, (), generator=generator))
            states = torch.randn(length, 2, H, generator=generator)
            mask = torch.arange(length) > 1
            if index in silent:
                mask = torch.zeros_like(mask)
            ids = torch.randint(V, (length,), generator=generator)
            self.stored.append(FeatureRow(ids, mask, states, (states.flatten(1) @ mix).argmax(-1)))
        self.lengths = [len(row.input_ids) for row in self.stored]
        self.prompt_ids = [f"{seed}-{index}" for index in range(rows)]
        self.categories = ["tiny"] * rows

    def rows(self, indices: Any) -> list[FeatureRow]:
        return [self.stored[index] for index in indices]


def frozen_parts() -> FrozenParts:
    embed = nn.Embedding(V, H).requires_grad_(False)
    return FrozenParts(embed, nn.Linear(H, V, bias=False), nn.Identity(), embed.weight)


class Record(TrainCallbacks):
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.evals: list[dict[str, Any]] = []

    def on_log(self, line: dict[str, Any]) -> None:
        self.logs.append(line)

    def on_eval(self, line: dict[str, Any]) -> None:
        self.evals.append(line)


def make_trainer(
    out: Path,
    dataset: RowSource | None = None,
    callbacks: TrainCallbacks | None = None,
    trackers: Sequence[str] = (),
    **settings: Any,
) -> Trainer:
    torch.manual_seed(7)
    values = {"max_steps": 12, "save_every": 4, "eval_every": 6, "eval_rows": 6, "log_every": 1, "warmup_steps": 2}
    dropout = float(os.environ.get("TINY_DROPOUT", "0.1"))  # ranks draw unlike masks, so comparisons switch it off
    return Trainer(
        TinyHead(TinyConfig(dropout=dropout)),
        frozen_parts(),
        dataset or TinyRows(),
        TinyRows(6, seed=1),
        TrainSettings(**{**values, **settings}),
        make_accelerator(cpu=True, trackers=trackers, folder=out),
        out,
        target_config=TARGET,
        callbacks=callbacks,
    )


def train(out: Path, dataset: RowSource | None = None, **settings: Any) -> tuple[Record, TrainResult]:
    record = Record()
    return record, make_trainer(out, dataset, record, **settings).run()


class Slow(Record):
    """Waits after a step, so that a test can kill the process in between."""

    def on_log(self, line: dict[str, Any]) -> None:
        print("step", line["step"], flush=True)
        time.sleep(float(os.environ.get("TINY_SLEEP", "0")))


def main() -> None:
    out, *pairs = sys.argv[1:]
    settings = {key: json.loads(value) for key, value in (pair.split("=") for pair in pairs)}
    silent = tuple(settings.pop("silent", ()))
    try:
        trainer = make_trainer(Path(out), TinyRows(silent=silent), Slow(), **settings)
        trainer.run()
    except InputError as error:
        raise SystemExit(f"InputError: {error}") from error


if __name__ == "__main__":
    main()
