"""The draft vocabulary: the D target tokens that a draft head can propose.

Two tables describe it, as in EAGLE-3's checkpoints (Li et al. 2025): ``d2t`` holds *offsets*
(``target id = draft id + d2t[draft id]``), ``t2d`` says which target ids are in it. Draft ids follow the order of the
target ids. Example, target ids 1, 4, 5 of a vocabulary of 7:

    d2t  [1, 3, 3]    t2d  [0, 1, 0, 0, 1, 1, 0]

The full vocabulary has ``d2t`` all zero and ``t2d`` all true.

Legend: D draft vocabulary, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.utils import InputError


@dataclass(frozen=True)
class DraftVocab:
    """The two tables and what is read from them."""

    d2t: Tensor  # D int64: offsets
    t2d: Tensor  # V bool

    @classmethod
    def of(cls, ids: Tensor | None, vocab_size: int) -> DraftVocab:
        """From strictly increasing target ids; None is the full vocabulary.

        Raises:
            InputError: ids that are not strictly increasing, or outside the vocabulary.
        """
        ids = torch.arange(vocab_size) if ids is None else ids.to(torch.int64).cpu()
        if ids.ndim != 1 or not ids.numel() or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
            raise InputError(
                f"draft_ids: expected a non-empty list of ids in 0..{vocab_size - 1}; choose them with choose_draft_ids"
            )
        if bool((ids.diff() <= 0).any()):
            raise InputError("draft_ids: expected strictly increasing ids; sort them and drop the repeated ones")
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[ids] = True
        return cls(ids - torch.arange(ids.numel()), t2d)

    @property
    def size(self) -> int:
        """D."""
        return self.d2t.shape[0]

    @property
    def is_full(self) -> bool:
        """Whether every target token is in it, so that draft ids are target ids."""
        return self.size == self.t2d.shape[0]

    @property
    def ids(self) -> Tensor:
        """D int64: the target id of every draft id."""
        return self.d2t + torch.arange(self.size, device=self.d2t.device)

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Target ids [...] -> draft ids [...], -1 where a token is not in the draft vocabulary."""
        ranks = self.t2d.cumsum(0) - 1  # V
        return torch.where(self.t2d[target_ids], ranks[target_ids], -1)

    def check(self) -> DraftVocab:
        """Both tables against each other; returns self.

        Raises:
            InputError: naming what is wrong, most often absolute ids where offsets belong.
        """
        if self.d2t.dtype not in (torch.int64, torch.int32) or self.d2t.ndim != 1 or self.t2d.ndim != 1:
            raise InputError(
                f"d2t, t2d: got {tuple(self.d2t.shape)} {self.d2t.dtype} and {tuple(self.t2d.shape)}, expected whole "
                "numbers [D] and booleans [V]; take both from one checkpoint"
            )
        ids, vocab = self.ids, self.t2d.shape[0]
        if not self.size or int(ids.min()) < 0 or int(ids.max()) >= vocab:
            reach = f"{int(ids.min())}..{int(ids.max())}" if self.size else "none"
            raise InputError(
                f"d2t: leads to target ids {reach}, outside 0..{vocab - 1}; it must hold offsets (target id - draft "
                "id), not target ids"
            )
        if bool((ids.diff() <= 0).any()):
            raise InputError(
                "d2t: target ids are not strictly increasing; it must hold offsets (target id - draft id) of sorted ids"
            )
        held = int(self.t2d.sum())
        if held != self.size or not bool(self.t2d[ids].all()):
            raise InputError(
                f"t2d: marks {held} tokens, expected the {self.size} that d2t lists; take both tables from one "
                "checkpoint"
            )
        return self


def choose_draft_ids(counts: Tensor, size: int, always: Iterable[int] = (), logical_size: int | None = None) -> Tensor:
    """The ``size`` target ids that a draft vocabulary should hold, sorted.

    First ``always`` (EOS and other tokens that must be there), then the most frequent ones; ties and tokens that were
    never seen are taken in the order of their ids (special tokens mostly come first).

    Args:
        counts: V: how often each token was supervised.
        always: ids that are in whatever their count.
        logical_size: tokens that exist; rows at and beyond it pad the embedding and are never chosen. None = V.

    Raises:
        InputError: a size below 1, above the tokens that exist, or too small for ``always``.
    """
    tokens = counts.shape[0] if logical_size is None else min(logical_size, counts.shape[0])
    must = sorted(set(always))
    if not 1 <= size <= tokens:
        raise InputError(f"draft_vocab_size: got {size}, expected 1 to {tokens} (the target's tokens); lower it")
    if must and not 0 <= must[0] <= must[-1] < tokens:
        raise InputError(f"always: got id {must[-1] if must[0] >= 0 else must[0]}, expected ids in 0..{tokens - 1}")
    if len(must) > size:
        raise InputError(f"draft_vocab_size: got {size}, expected room for the {len(must)} tokens that must be in it")
    keys = counts[:tokens].to(torch.int64).cpu().clone()
    keys[must] = torch.iinfo(torch.int64).max
    return keys.sort(descending=True, stable=True).indices[:size].sort().values
