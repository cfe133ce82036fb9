"""The endless stream of micro-batches, the same for every number of processes, and the place in it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from specheads.data.collate import collate
from specheads.data.dataset import BatchPlan, FeatureDataset, OnlineFeatureDataset, RowSource, every_row_once
from specheads.types import FeatureSpec, HeadInputs
from specheads.utils import spread


def load_batch(dataset: RowSource, rows: list[int], spec: FeatureSpec) -> HeadInputs:
    """The rows as one padded batch on the CPU."""
    return collate(dataset.rows(rows), spec, dataset.layer_ids)


def rows_fingerprint(dataset: RowSource) -> str:
    """Identity of a data set: its rows in their order, and the cache their features are in."""
    cache = dataset.cache.index.get("fingerprint") if isinstance(dataset, FeatureDataset) else None
    online = dataset.encoded if isinstance(dataset, OnlineFeatureDataset) else []
    tokens = hashlib.sha256(json.dumps([[row.input_ids, row.loss_mask] for row in online]).encode()).hexdigest()
    facts = [cache, tokens, list(dataset.layer_ids), dataset.lengths, dataset.prompt_ids]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def evaluation_batches(dataset: RowSource, limit: int, rows_per_batch: int) -> list[list[int]]:
    """At most ``limit`` rows, evenly spread over the data set (which may be sorted by category), each once."""
    chosen = spread(range(len(dataset)), limit)
    groups = every_row_once([dataset.lengths[row] for row in chosen], rows_per_batch)
    return [[chosen[place] for place in group] for group in groups]


class BatchCursor:
    """Walks through the epochs of a `BatchPlan`. Rank r of W takes every W-th row of each micro-batch, so W processes
    see together exactly what one process sees. An epoch's tail shares an optimiser step with the next epoch's
    beginning: nothing is dropped.

    Raises:
        InputError: there is no row, or ``rows_per_batch`` cannot be shared evenly.
    """

    def __init__(self, dataset: RowSource, seed: int, rows_per_batch: int, rank: int, world: int) -> None:
        self.plan = BatchPlan(dataset.lengths, rows_per_batch, seed, rank, world)
        self.epoch = 0
        self.position = 0
        self._batches = self.plan.batches(0)

    @property
    def batches_an_epoch(self) -> int:
        """Micro-batches of an epoch."""
        return self.plan.steps_per_epoch

    @property
    def epoch_float(self) -> float:
        """Epochs done, with the fraction of the one at hand."""
        return self.epoch + self.position / len(self._batches)

    def take(self, count: int) -> list[list[int]]:
        """This rank's rows of the next ``count`` micro-batches."""
        taken: list[list[int]] = []
        while len(taken) < count:
            if self.position == len(self._batches):
                self.restore({"epoch": self.epoch + 1, "position": 0})
            some = self._batches[self.position : self.position + count - len(taken)]
            taken += some
            self.position += len(some)
        return taken

    def state(self) -> dict[str, Any]:
        """The place in the stream."""
        return {"epoch": self.epoch, "position": self.position}

    def restore(self, state: dict[str, Any]) -> None:
        """Go to a place."""
        if state["epoch"] != self.epoch:
            self._batches = self.plan.batches(state["epoch"])
        self.epoch, self.position = state["epoch"], state["position"]
