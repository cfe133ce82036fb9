"""Rows of features for training: random access, and batches that follow from (seed, epoch) alone."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from specheads.data.feature_cache import FeatureCache, FeatureRow
from specheads.data.features import row_features, stored_layers
from specheads.data.tokenize import Encoded
from specheads.target.adapter import Target
from specheads.utils import InputError

WINDOW = 32  # batches whose rows are sorted by length together: little padding, batches still random


class RowSource(ABC):
    """What the trainer knows of data: rows with features, their lengths and where they come from."""

    layer_ids: tuple[int, ...]  # layers of FeatureRow.states, sorted; the last is L
    lengths: list[int]
    prompt_ids: list[str]
    categories: list[str]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> FeatureRow:
        return self.rows([index])[0]

    @abstractmethod
    def rows(self, indices: Sequence[int]) -> list[FeatureRow]:
        """The rows of a batch, in the order asked for."""


class FeatureDataset(RowSource):
    """Rows of a cache (or some of them: ``indices`` into it)."""

    def __init__(self, cache: FeatureCache, indices: Sequence[int] | None = None) -> None:
        self.cache = cache
        self.indices = list(range(len(cache))) if indices is None else list(indices)
        self.layer_ids = cache.layer_ids
        self.lengths = [cache.lengths[index] for index in self.indices]
        self.prompt_ids = [cache.prompt_ids[index] for index in self.indices]
        self.categories = [cache.categories[index] for index in self.indices]

    def rows(self, indices: Sequence[int]) -> list[FeatureRow]:
        """Rows from the mapped shards."""
        return [self.cache.row(self.indices[index]) for index in indices]


class OnlineFeatureDataset(RowSource):
    """The same, with the target at hand instead of a cache: features are computed when a batch is asked for."""

    def __init__(self, target: Target, rows: Sequence[Encoded], layer_ids: Sequence[int]) -> None:
        self.target, self.encoded = target, list(rows)
        self.layer_ids = stored_layers(target, layer_ids)
        self.lengths = [len(row.input_ids) for row in rows]
        self.prompt_ids = [row.prompt_id for row in rows]
        self.categories = [row.category for row in rows]

    def rows(self, indices: Sequence[int]) -> list[FeatureRow]:
        """One forward of the target over the batch."""
        return row_features(self.target, [self.encoded[index] for index in indices], self.layer_ids)


@dataclass(frozen=True)
class BatchPlan:
    """Which rows make up which step: a function of (seed, epoch), the same for every number of processes.

    An epoch visits every row once, shuffled, in batches of like length. The last batch, when short, is filled up with
    rows from the start of the epoch's order (so those are seen twice), never dropped. A rank takes every ``world``-th
    row of each batch: equal numbers of batches and of rows on all ranks.
    """

    lengths: Sequence[int]
    rows_per_batch: int  # over all ranks
    seed: int = 0
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not self.lengths or self.rows_per_batch < 1 or self.rows_per_batch % self.world:
            raise InputError(
                f"rows_per_batch: got {self.rows_per_batch} for {len(self.lengths)} rows and {self.world} processes, "
                "expected at least one row and a multiple of the number of processes"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Batches an epoch, the same on every rank."""
        return -(-len(self.lengths) // self.rows_per_batch)

    def batches(self, epoch: int) -> list[list[int]]:
        """This rank's row indices of every step of ``epoch``. To resume at step i, go on at ``batches(epoch)[i:]``."""
        shuffler = random.Random(f"{self.seed}/{epoch}")
        order = list(range(len(self.lengths)))
        shuffler.shuffle(order)
        missing = self.steps_per_epoch * self.rows_per_batch - len(order)
        order += [order[index % len(self.lengths)] for index in range(missing)]
        window = WINDOW * self.rows_per_batch
        grouped = [
            index
            for start in range(0, len(order), window)
            for index in sorted(order[start : start + window], key=lambda row: self.lengths[row])
        ]
        size = self.rows_per_batch
        batches = [grouped[start : start + size] for start in range(0, len(grouped), size)]
        shuffler.shuffle(batches)
        return [batch[self.rank :: self.world] for batch in batches]


def every_row_once(lengths: Sequence[int], rows_per_batch: int) -> list[list[int]]:
    """Batches for evaluation: each row exactly once, in order of length, the last batch as short as it comes."""
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], row))
    return [order[start : start + rows_per_batch] for start in range(0, len(order), rows_per_batch)]
