"""Rows of unequal length to one padded batch.

Legend: B rows, T positions, n captured layers, H hidden size, F = H x layers of the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specheads.data.feature_cache import FeatureRow
from specheads.types import FeatureSpec, HeadInputs
from specheads.utils import InputError


def collate(rows: Sequence[FeatureRow], spec: FeatureSpec, layer_ids: Sequence[int]) -> HeadInputs:
    """``HeadInputs`` of ``rows``, padded on the right with zeros (and an all-False mask there).

    spec: the layers the head reads, in its order; layer_ids: what ``FeatureRow.states`` holds (sorted, the last is L).

    Raises:
        InputError: a layer of the spec was not captured.
    """
    lost = sorted(set(spec.layer_ids) - set(layer_ids))
    if lost:
        raise InputError(
            f"features: the head reads layers {spec.layer_ids}, the rows hold {tuple(layer_ids)}: {lost} missing; "
            "compute the features for this head"
        )
    chosen = [list(layer_ids).index(layer) for layer in spec.layer_ids]
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    shape = (len(rows), int(lengths.max()))
    hidden, dtype = rows[0].states.shape[-1], rows[0].states.dtype
    batch = HeadInputs(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        features=torch.zeros(*shape, len(chosen) * hidden, dtype=dtype),
        last_state=torch.zeros(*shape, hidden, dtype=dtype),
        target_argmax=torch.zeros(shape, dtype=torch.int64),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        lengths=lengths,
    )
    for index, row in enumerate(rows):
        end = len(row.input_ids)
        batch.input_ids[index, :end] = row.input_ids
        batch.loss_mask[index, :end] = row.loss_mask
        batch.target_argmax[index, :end] = row.target_argmax
        batch.last_state[index, :end] = row.states[:, -1]
        for place, layer in enumerate(chosen):
            batch.features[index, :end, place * hidden : (place + 1) * hidden] = row.states[:, layer]
    return batch
