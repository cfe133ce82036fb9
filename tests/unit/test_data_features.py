"""Features against direct forwards, the cache against kills and changes, batches and padding against literals."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.data import feature_cache
from specheads.data.collate import collate
from specheads.data.dataset import BatchPlan, FeatureDataset, OnlineFeatureDataset, every_row_once
from specheads.data.feature_cache import SHARD_ROWS, FeatureCache, FeatureRow
from specheads.data.features import compute_features, estimate_bytes, in_batches, row_features
from specheads.data.tokenize import Encoded
from specheads.types import FeatureSpec
from specheads.utils import InputError
from tests.fakes import Target, tiny_target

LAYERS = (2, 0)  # a head's order; the cache holds 0, 2, 3 (L)
LIMIT = 32


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


def some_rows(count: int, seed: int = 0) -> list[Encoded]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for at in range(count):
        length = int(torch.randint(3, 20, (1,), generator=generator))
        ids = torch.randint(4, 64, (length,), generator=generator).tolist()
        asked = length // 2
        rows.append(Encoded(f"r{at}", f"p{at // 2}", "chat", ids, [False] * asked + [True] * (length - asked)))
    return rows


def compute(target: Target, rows: list[Encoded], folder: Path, **options: Any) -> FeatureCache:
    return compute_features(target, rows, LAYERS, folder, max_length=LIMIT, tokens_per_batch=100, **options)


def stands(cache: FeatureCache) -> bool:
    """Every shard is there."""
    return all(cache.has_shard(row // SHARD_ROWS) for row in range(len(cache)))


def same(left: FeatureRow, right: FeatureRow) -> bool:
    return all(torch.equal(a, b) for a, b in zip(vars(left).values(), vars(right).values(), strict=True))


def test_features_equal_a_direct_forward(target: Target, tmp_path: Path) -> None:
    rows = some_rows(SHARD_ROWS + 7)
    rows[3] = replace(rows[3], loss_mask=[True] + [False] * (len(rows[3].input_ids) - 1))  # nothing behind it
    cache = compute(target, rows, tmp_path)
    assert stands(cache)
    assert cache.layer_ids == (0, 2, 3)
    assert cache.lengths == [len(row.input_ids) for row in rows]
    for at, row in enumerate(rows):
        out = target.forward(torch.tensor([row.input_ids]), layer_ids=(0, 2, 3), logits="all")
        assert out.features is not None
        assert out.logits is not None
        found = cache.row(at)
        assert found.input_ids.tolist() == row.input_ids
        assert found.loss_mask.tolist() == row.loss_mask
        assert found.states.shape == (len(row.input_ids), 3, 32)
        assert torch.allclose(found.states.flatten(1), out.features[0], atol=2e-4, rtol=1e-4)
        last = max(place for place, flag in enumerate(row.loss_mask) if flag)
        best = out.logits[0].argmax(-1)
        assert found.target_argmax[:last].tolist() == best[:last].tolist()
        assert not found.target_argmax[last:].any()


def test_lean_and_stock_and_chunks_agree(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some_rows(5)
    stock = tiny_target(lean="off")
    whole = row_features(target, rows, (0, 2, 3))
    monkeypatch.setattr("specheads.data.features.ARGMAX_CHUNK", 3)
    for left, right in zip(whole, row_features(stock, rows, (0, 2, 3)), strict=True):
        assert torch.allclose(left.states, right.states, atol=2e-4, rtol=1e-4)
        assert torch.equal(left.target_argmax, right.target_argmax)


def test_no_logits_of_a_whole_batch(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Projected positions: at most a chunk at a time, and none behind the last supervised one."""
    monkeypatch.setattr("specheads.data.features.ARGMAX_CHUNK", 4)
    sizes: list[int] = []
    inner = target.parts.lm_head

    def count(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(hidden.shape[0])
        return inner(hidden)

    monkeypatch.setattr(target, "parts", replace(target.parts, lm_head=count))
    rows = [
        Encoded("a", "a", "chat", [5] * 11, [False, True] * 5 + [False]),
        Encoded("b", "b", "chat", [5] * 3, [True] * 3),
    ]
    row_features(target, rows, (3,))
    assert sizes == [4, 4, 1, 2]


def test_estimate_is_the_size_on_disk(target: Target, tmp_path: Path) -> None:
    rows = some_rows(SHARD_ROWS * 2)
    cache = compute(target, rows, tmp_path)
    size = sum(path.stat().st_size for path in cache.folder.glob("*.safetensors"))
    assert abs(estimate_bytes(target, rows, LAYERS) / size - 1) < 0.02


def test_batches_hold_every_row_and_the_limit() -> None:
    rows = some_rows(50)
    batches = in_batches(rows, 40)
    assert sorted(index for batch in batches for index in batch) == list(range(50))
    assert all(len(batch) * max(len(rows[index].input_ids) for index in batch) <= 40 for batch in batches)
    assert in_batches(rows[:3], 1) == [[index] for batch in in_batches(rows[:3], 1) for index in batch]


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_kill_is_continued_by_shard(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    rows = some_rows(SHARD_ROWS * 2 + 9)
    calls: list[int] = []
    inner = row_features

    def kill(*arguments: Any) -> list[FeatureRow]:
        if len(calls) == at * 3:
            raise Killed
        calls.append(1)
        return inner(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("specheads.data.features.row_features", kill)
        with pytest.raises(Killed):
            compute(target, rows, tmp_path)
    stood = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*/*.safetensors")}
    seen: list[tuple[int, int]] = []
    cache = compute(target, rows, tmp_path, progress=lambda *numbers: seen.append(numbers))
    assert stands(cache)
    assert {name: (cache.folder / name).stat().st_mtime_ns for name in stood} == stood
    assert seen[-1] == (sum(cache.lengths), sum(cache.lengths))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    again = compute(target, rows, tmp_path / "straight")
    assert all(same(cache.row(index), again.row(index)) for index in range(len(rows)))
    assert [path.name for path in tmp_path.glob("*/.*.part")] == []


def test_kill_between_shard_and_index(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shard stands but the index does not know it: it is written again, to the same bytes."""
    rows = some_rows(SHARD_ROWS + 2)
    writes: list[str] = []
    inner = feature_cache.write_json

    def kill(path: Path, value: Any) -> None:
        if len(writes) == 2:
            raise Killed
        writes.append(str(path))
        inner(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(feature_cache, "write_json", kill)
        with pytest.raises(Killed):
            compute(target, rows, tmp_path)
    shards = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(shards) == 2
    before = shards[1].read_bytes()
    assert stands(compute(target, rows, tmp_path))
    assert shards[1].read_bytes() == before


def test_every_change_has_its_own_folder(target: Target, tmp_path: Path) -> None:
    rows = some_rows(4)
    first = compute(target, rows, tmp_path)
    stamp = first.path(0).stat().st_mtime_ns
    folders = {first.folder}
    edited = tiny_target()
    edited.tokenizer.chat_template += " "
    folders.add(compute(edited, rows, tmp_path).folder)  # the template's text counts, not its name
    folders.add(compute(tiny_target(seed=1), rows, tmp_path).folder)
    folders.add(compute_features(target, rows, (1,), tmp_path, max_length=LIMIT).folder)
    folders.add(compute_features(target, rows, LAYERS, tmp_path, max_length=LIMIT + 1).folder)
    folders.add(compute(target, rows[:3], tmp_path).folder)
    folders.add(compute(target, rows[::-1], tmp_path).folder)
    flipped = replace(rows[0], loss_mask=[True] * len(rows[0].loss_mask))
    folders.add(compute(target, [flipped, *rows[1:]], tmp_path).folder)
    assert len(folders) == 8
    assert first.path(0).stat().st_mtime_ns == stamp
    assert compute(target, rows, tmp_path).folder == first.folder
    assert compute_features(target, rows, (0, 3, 2, 2), tmp_path, max_length=LIMIT).folder == first.folder
    assert first.path(0).stat().st_mtime_ns == stamp


def test_damaged_shards_and_indices_are_named(target: Target, tmp_path: Path) -> None:
    rows = some_rows(SHARD_ROWS + 2)
    cache = compute(target, rows, tmp_path)
    path = cache.path(1)
    raw = path.read_bytes()
    path.write_bytes(raw[:-5])
    for use in (lambda: compute(target, rows, tmp_path), lambda: FeatureCache.load(cache.folder).row(SHARD_ROWS)):
        with pytest.raises(InputError, match=r"shard-00001.safetensors: .* damaged; delete that file"):
            use()
    assert same(FeatureCache.load(cache.folder).row(0), cache.row(0))  # the others still serve
    path.write_bytes(b"\xff" * len(raw))  # the right size, foreign bytes
    with pytest.raises(InputError, match="damaged shard"):
        FeatureCache.load(cache.folder).row(SHARD_ROWS)
    path.unlink()
    with pytest.raises(InputError, match="never finished"):
        FeatureCache.load(cache.folder).row(SHARD_ROWS)
    assert stands(compute(target, rows, tmp_path))
    assert path.read_bytes() == raw
    index = json.loads((cache.folder / "index.json").read_text())
    (cache.folder / "index.json").write_text(json.dumps({**index, "format": 0}))
    with pytest.raises(InputError, match="format 0, expected"):
        FeatureCache.load(cache.folder)
    (cache.folder / "index.json").write_text("{")
    with pytest.raises(InputError, match="broken index"):
        compute(target, rows, tmp_path)
    with pytest.raises(InputError, match="no such file"):
        FeatureCache.load(tmp_path / "none")


def test_states_that_overflow_are_refused(tmp_path: Path) -> None:
    target = tiny_target(lean="off")
    target.model.model.embed_tokens.weight.fill_(float("inf"))
    with pytest.raises(InputError, match="not finite"):
        compute(target, some_rows(2), tmp_path)
    assert not list(tmp_path.glob("*/*.safetensors"))
    with pytest.raises(InputError, match="got 0 rows"):
        compute(target, [], tmp_path)


def test_bf16_goes_through_the_disk_bit_by_bit(target: Target, tmp_path: Path) -> None:
    rows = some_rows(3)
    key = feature_cache.CacheKey("t", "p", (3,), 32, "bfloat16", LIMIT)
    cache = FeatureCache.open(tmp_path, key, rows)
    made = [replace(row, states=row.states.bfloat16()) for row in row_features(target, rows, (3,))]
    cache.write_shard(0, made)
    assert all(same(FeatureCache.load(cache.folder).row(at), row) for at, row in enumerate(made))


def test_cached_and_online_rows_are_one_interface(target: Target, tmp_path: Path) -> None:
    rows = some_rows(SHARD_ROWS + 6)
    cached = FeatureDataset(compute(target, rows, tmp_path), indices=[SHARD_ROWS + 1, 0, 5])
    online = OnlineFeatureDataset(target, [rows[SHARD_ROWS + 1], rows[0], rows[5]], LAYERS)
    for name in ("layer_ids", "lengths", "prompt_ids", "categories"):
        assert getattr(cached, name) == getattr(online, name)
    assert len(cached) == len(online) == 3
    for left, right in zip(cached.rows([2, 0]), online.rows([2, 0]), strict=True):
        assert torch.allclose(left.states, right.states, atol=2e-4, rtol=1e-4)
        assert torch.equal(left.target_argmax, right.target_argmax)
        assert torch.equal(left.input_ids, right.input_ids)
    assert same(cached[1], cached.cache.row(0))


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=90),
    share=st.integers(1, 4),
    world=st.integers(1, 3),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
)
def test_batch_plan(lengths: list[int], share: int, world: int, seed: int, epoch: int) -> None:
    size = share * world
    plans = [BatchPlan(lengths, size, seed, rank, world) for rank in range(world)]
    parts = [plan.batches(epoch) for plan in plans]
    assert {len(part) for part in parts} == {plans[0].steps_per_epoch}
    assert {len(batch) for part in parts for batch in part} == {share}
    alone = BatchPlan(lengths, size, seed).batches(epoch)
    together = [
        [index for pair in zip(*batches, strict=True) for index in pair] for batches in zip(*parts, strict=True)
    ]
    assert together == alone  # the step does not depend on the number of processes
    counts = Counter(index for batch in alone for index in batch)
    extra = plans[0].steps_per_epoch * size - len(lengths)
    assert set(counts) == set(range(len(lengths)))
    assert sum(counts.values()) == len(lengths) + extra
    assert max(counts.values()) <= 1 + -(-extra // len(lengths))
    assert BatchPlan(lengths, size, seed).batches(epoch) == alone


def test_batch_plan_shuffles_and_groups() -> None:
    lengths = [(at * 37) % 200 + 1 for at in range(400)]
    plan = BatchPlan(lengths, 4, seed=1)
    first = plan.batches(0)
    assert first != plan.batches(1)
    assert first != BatchPlan(lengths, 4, seed=2).batches(0)
    waste = sum(4 * max(lengths[row] for row in batch) - sum(lengths[row] for row in batch) for batch in first)
    assert waste < 0.1 * sum(lengths)
    means = [sum(lengths[row] for row in batch) / 4 for batch in first]
    assert means != sorted(means)
    for bad in (BatchPlan, lambda *a: BatchPlan(*a, world=2)):
        with pytest.raises(InputError, match="rows_per_batch"):
            bad(lengths, 0 if bad is BatchPlan else 3)
    with pytest.raises(InputError, match="rows_per_batch"):
        BatchPlan([], 4)


def test_evaluation_sees_every_row_once() -> None:
    batches = every_row_once([5, 3, 9, 3, 1], 2)
    assert batches == [[4, 1], [3, 0], [2]]


def test_collate_alignment_by_a_literal_example() -> None:
    """Layer ids 0, 2, 3 of states whose value is 100 x layer + 10 x row + position; hidden size 1."""

    def row(number: int, ids: list[int], mask: list[int], best: list[int]) -> FeatureRow:
        states = torch.tensor([[[100.0 * layer + 10 * number + at] for layer in (0, 2, 3)] for at in range(len(ids))])
        return FeatureRow(torch.tensor(ids), torch.tensor(mask, dtype=torch.bool), states, torch.tensor(best))

    batch = collate(
        [row(0, [7, 8, 2], [0, 1, 1], [8, 9, 0]), row(1, [5, 2], [0, 1], [2, 0])], FeatureSpec((2, 0)), (0, 2, 3)
    )
    assert batch.lengths.tolist() == [3, 2]
    assert batch.input_ids.tolist() == [[7, 8, 2], [5, 2, 0]]
    assert batch.loss_mask.tolist() == [[False, True, True], [False, True, False]]  # id 2 is EOS and pad: no matter
    assert batch.target_argmax.tolist() == [[8, 9, 0], [2, 0, 0]]
    assert batch.features.tolist() == [[[200, 0], [201, 1], [202, 2]], [[210, 10], [211, 11], [0, 0]]]
    assert batch.last_state.tolist() == [[[300], [301], [302]], [[310], [311], [0]]]
    none = collate([row(0, [7], [1], [0])], FeatureSpec(()), (0, 2, 3))
    assert none.features.shape == (1, 1, 0)
    with pytest.raises(InputError, match=r"\[1\] missing"):
        collate([row(0, [7], [1], [0])], FeatureSpec((1,)), (0, 2, 3))
