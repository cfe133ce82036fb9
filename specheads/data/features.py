"""The target's states and argmaxes for training rows: computed once into a cache, or for a batch at a time.

Legend: B rows, T positions, n captured layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from specheads.data.feature_cache import SHARD_ROWS, CacheKey, FeatureCache, FeatureRow
from specheads.data.tokenize import Encoded, template_hash
from specheads.sampling import greedy
from specheads.target.adapter import Target
from specheads.utils import InputError

ARGMAX_CHUNK = 256  # positions whose logits are held at once: 256 x V fp32 is 50 MB at V = 49,152


def stored_layers(target: Target, layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Layers a cache holds for a head that reads ``layer_ids``: those, sorted, and the last one (id L)."""
    return tuple(sorted({*layer_ids, target.config.num_layers}))


def estimate_bytes(target: Target, rows: Sequence[Encoded], layer_ids: Sequence[int]) -> int:
    """Size of the cache of ``rows`` on disk: states in the target's dtype plus ids, masks and argmaxes."""
    width = len(stored_layers(target, layer_ids)) * target.config.hidden_size
    return sum(len(row.input_ids) for row in rows) * (width * target.dtype.itemsize + 9)


@torch.inference_mode()
def row_features(target: Target, rows: Sequence[Encoded], layers: Sequence[int]) -> list[FeatureRow]:
    """Features of a few rows in one forward (padded right; causality keeps the padding out).

    ``target_argmax`` is computed where a later position is supervised and 0 elsewhere: no label of any draft step
    ever reads it there.

    Raises:
        InputError: a state is not finite (the dtype overflows on this target).
    """
    lengths = [len(row.input_ids) for row in rows]
    tokens = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens[index, : lengths[index]] = torch.tensor(row.input_ids)
    out = target.forward(tokens.to(target.device), layer_ids=tuple(layers), logits="none")
    assert out.features is not None
    states = out.features.unflatten(-1, (len(layers), target.config.hidden_size))  # B T n H
    results: list[FeatureRow] = []
    for index, row in enumerate(rows):
        kept = states[index, : lengths[index]]
        if not bool(torch.isfinite(kept).all()):
            raise InputError(
                f"row {row.id!r}: the target's states in {target.dtype} are not finite; load the target with dtype fp32"
            )
        mask = torch.tensor(row.loss_mask)
        last = int(mask.nonzero()[-1])  # positions 0 .. last-1 have a supervised position behind them
        argmax = torch.zeros(lengths[index], dtype=torch.int64)
        argmax[:last] = argmax_of(target, kept[:last, -1]).cpu()
        results.append(FeatureRow(torch.tensor(row.input_ids), mask, kept.to("cpu", copy=True), argmax))
    return results


def argmax_of(target: Target, last: Tensor) -> Tensor:
    """The target's best next token (ties: the lowest id) after raw last states T H, a chunk of logits at a time."""
    parts = target.parts
    chunks = [greedy(parts.lm_head(parts.norm(chunk))) for chunk in last.split(ARGMAX_CHUNK)]
    return torch.cat(chunks) if chunks else torch.zeros(0, dtype=torch.int64)


def in_batches(rows: Sequence[Encoded], tokens_per_batch: int) -> list[list[int]]:
    """Indices of ``rows`` in batches of like length, at most ``tokens_per_batch`` padded tokens each (or one row)."""
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].input_ids))
    batches: list[list[int]] = []
    for index in order:  # the first of a batch is its longest
        if batches and len(rows[batches[-1][0]].input_ids) * (len(batches[-1]) + 1) <= tokens_per_batch:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def compute_features(
    target: Target,
    rows: Sequence[Encoded],
    layer_ids: Sequence[int],
    cache_dir: str | Path,
    *,
    max_length: int,
    tokens_per_batch: int = 2048,
    progress: Callable[[int, int], None] | None = None,
) -> FeatureCache:
    """The feature cache of ``rows`` in ``cache_dir``; shards that stand from an earlier run are not computed again.

    progress: called with (tokens done, tokens in all), reused shards included.

    Raises:
        InputError: no rows, a state that is not finite, a damaged shard, a full disk.
    """
    if not rows:
        raise InputError("features: got 0 rows, expected at least one; let the target write some")
    key = CacheKey(
        target=target.config.fingerprint,
        template=template_hash(target.tokenizer),
        layer_ids=stored_layers(target, layer_ids),
        hidden_size=target.config.hidden_size,
        dtype=str(target.dtype).removeprefix("torch."),
        max_length=max_length,
    )
    cache = FeatureCache.open(cache_dir, key, rows)
    total, done = sum(len(row.input_ids) for row in rows), 0
    for shard, start in enumerate(range(0, len(rows), SHARD_ROWS)):
        part = rows[start : start + SHARD_ROWS]
        if not cache.has_shard(shard):
            found: dict[int, FeatureRow] = {}
            for batch in in_batches(part, tokens_per_batch):
                computed = row_features(target, [part[index] for index in batch], key.layer_ids)
                found.update(zip(batch, computed, strict=True))
                if progress is not None:
                    progress(done + sum(len(part[index].input_ids) for index in found), total)
            cache.write_shard(shard, [found[index] for index in range(len(part))])
        done += sum(len(row.input_ids) for row in part)
        if progress is not None:
            progress(done, total)
    return cache
