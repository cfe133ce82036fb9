"""Draft vocabulary tables: offsets, fill-up, ties, and every way they can be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specheads.modules.draft_vocab import DraftVocab, choose_draft_ids
from specheads.utils import InputError


def test_example_and_round_trip() -> None:
    vocab = DraftVocab.of(torch.tensor([1, 4, 5]), 7).check()
    assert vocab.d2t.tolist() == [1, 3, 3]
    assert vocab.t2d.tolist() == [False, True, False, False, True, True, False]
    assert vocab.ids.tolist() == [1, 4, 5]
    assert vocab.to_draft(torch.arange(7)).tolist() == [-1, 0, -1, -1, 1, 2, -1]
    assert not vocab.is_full


def test_the_full_vocabulary_has_no_offsets() -> None:
    vocab = DraftVocab.of(None, 9).check()
    assert vocab.is_full
    assert not vocab.d2t.any()
    assert vocab.t2d.all()
    assert torch.equal(vocab.to_draft(torch.arange(9)), torch.arange(9))


@pytest.mark.parametrize("ids", [[], [3, 1], [1, 1], [-1, 2], [2, 7]])
def test_ids_that_are_none_are_refused(ids: list[int]) -> None:
    with pytest.raises(InputError, match="draft_ids"):
        DraftVocab.of(torch.tensor(ids, dtype=torch.int64), 7)


def test_check_finds_every_damage() -> None:
    good = DraftVocab.of(torch.tensor([1, 4, 5]), 7)
    absolute = replace(good, d2t=torch.tensor([1, 4, 5]))  # target ids where offsets belong: 1, 5, 7
    with pytest.raises(InputError, match="offsets"):
        absolute.check()
    with pytest.raises(InputError, match="increasing"):
        replace(good, d2t=torch.tensor([1, 3, 2])).check()
    with pytest.raises(InputError, match="t2d"):
        replace(good, t2d=torch.ones(7, dtype=torch.bool)).check()
    with pytest.raises(InputError, match="t2d"):
        replace(good, t2d=good.t2d.roll(1)).check()
    with pytest.raises(InputError, match="whole"):
        replace(good, d2t=good.d2t.float()).check()
    with pytest.raises(InputError, match="none"):
        DraftVocab(torch.zeros(0, dtype=torch.int64), good.t2d).check()


def test_most_frequent_first_ties_by_id_and_unseen_fill_up() -> None:
    counts = torch.zeros(64, dtype=torch.int64)
    counts[[10, 20, 30, 40]] = torch.tensor([5, 9, 5, 1])
    assert choose_draft_ids(counts, 2).tolist() == [10, 20]
    assert choose_draft_ids(counts, 3, always=[63]).tolist() == [10, 20, 63]
    assert choose_draft_ids(counts, 8).tolist() == [0, 1, 2, 3, 10, 20, 30, 40]  # 4 seen, then ids from the start
    assert len(choose_draft_ids(counts, 64)) == 64


def test_rows_that_pad_the_embedding_are_never_chosen() -> None:
    counts = torch.zeros(32, dtype=torch.int64)
    counts[30] = 100
    assert int(choose_draft_ids(counts, 27, logical_size=27).max()) == 26
    with pytest.raises(InputError, match="1 to 27"):
        choose_draft_ids(counts, 28, logical_size=27)


@pytest.mark.parametrize(("size", "always"), [(0, []), (65, []), (1, [3, 4]), (4, [64]), (4, [-1])])
def test_sizes_that_cannot_be_are_refused(size: int, always: list[int]) -> None:
    with pytest.raises(InputError, match="got"):
        choose_draft_ids(torch.zeros(64, dtype=torch.int64), size, always=always)
