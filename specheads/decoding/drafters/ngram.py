"""n-gram look-up: the tokens that followed the last time the text ended like this (Saxena 2023, "prompt lookup").

Trains nothing and costs almost nothing. Prompt and answer are searched; the longest match wins, then the most recent
one; a match whose continuation runs into the end of the text goes on periodically:

    text    a b c d a b     root is the last b; match "a b" at the start, drafts c d a b c d a ...

Legend: B rows, T searched positions, D drafts, M match lengths.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from specheads.decoding.drafters.feedback import continuation
from specheads.decoding.drafters.host_tree import Array, HostTree
from specheads.heads.base import Drafter
from specheads.tree.draft_tree import DraftTree
from specheads.utils import InputError

# Share of drafts that were right, given that all before them were: rows by length of the match (1, 2, 3-4, 5-7, 8-15,
# 16 and more tokens), columns by depth of the draft (1 to 5, then 6 and more). Replay of 423 greedy answers of
# SmolLM2-135M-Instruct; only where a call starts from, its own hits take over.
FIRST_RATES = (
    (0.24, 0.58, 0.65, 0.71, 0.75, 0.80),
    (0.54, 0.61, 0.73, 0.79, 0.84, 0.87),
    (0.59, 0.73, 0.75, 0.75, 0.80, 0.86),
    (0.75, 0.77, 0.82, 0.84, 0.84, 0.91),
    (0.86, 0.87, 0.89, 0.90, 0.91, 0.93),
    (0.97, 0.98, 0.98, 0.98, 0.98, 0.98),
)
CLASS_STARTS = (1, 2, 3, 5, 8, 16)
FIRST_TRIALS = 12.0  # how many observations the first rates count for


class HitRates:
    """Running estimate of how often a draft is right, by length of the match and depth; all rows of a call share it."""

    def __init__(self, drafts: int) -> None:
        first = np.array(FIRST_RATES)
        self._column = np.minimum(np.arange(drafts), first.shape[1] - 1)  # D
        self._trials = np.full(first.shape, FIRST_TRIALS)
        self._hits = first * FIRST_TRIALS

    def _cells(self, matched: Array) -> tuple[Array, Array]:
        """Table indices of every draft, B 1 and D. matched: B."""
        row = np.maximum(np.searchsorted(CLASS_STARTS, matched, side="right") - 1, 0)
        return row[:, None], self._column

    def log_chances(self, matched: Array) -> Array:
        """matched: B match lengths -> B D, log of the chance that the drafts up to this one are all right."""
        cells = self._cells(matched)
        return np.log(self._hits[cells] / self._trials[cells]).cumsum(1)

    def learn(self, matched: Array, right: Array, known: Array) -> None:
        """right: B D, the draft equals what the target wrote; known: B D, what the target wrote there is known."""
        reached = np.logical_and.accumulate(right, axis=1)
        trial = known & (matched > 0)[:, None]
        trial[:, 1:] &= reached[:, :-1]  # all drafts before this one were right
        cells = self._cells(matched)
        np.add.at(self._trials, cells, trial)
        np.add.at(self._hits, cells, trial & right)


class NgramDrafter(Drafter):
    """Drafts by look-up: one chain of up to ``drafts`` tokens a row, the root alone where nothing matches.

    ``max_match``: how far back two endings are compared (longer matches are surer, see ``FIRST_RATES``);
    ``min_match``: the shortest match that is used. Scores are logs of running hit rates.

    Raises:
        InputError: min_match < 1, max_match < min_match, or drafts < 1.
    """

    def __init__(self, max_match: int = 16, min_match: int = 1, drafts: int = 7) -> None:
        if not 1 <= min_match <= max_match or drafts < 1:
            raise InputError(
                f"lookup: got min_match={min_match}, max_match={max_match}, drafts={drafts}, "
                "expected 1 <= min_match <= max_match and drafts >= 1; mend the decoding section"
            )
        self.max_match, self.min_match, self.drafts = max_match, min_match, drafts
        self.max_nodes = 1 + drafts

    def start(self, tokens: Tensor, features: Tensor | None, lengths: Tensor, capacity: int) -> None:
        """See ``Drafter.start``."""
        rows, width = tokens.shape
        self._device = tokens.device
        self._lengths = lengths.cpu().numpy().copy()
        self._text = np.full((rows, max(capacity, width) + 1), -1)  # B T: -1 where there is no text
        self._text[:, :width] = np.where(np.arange(width) < self._lengths[:, None], tokens.cpu().numpy(), -1)
        self._row = np.arange(rows)
        self._rates = HitRates(self.drafts)
        self._drafted = np.zeros((rows, 0), np.int64)
        self._matched = np.zeros(rows, np.int64)
        self._accepted: tuple[Array, Array] | None = None  # tokens B P, counts B

    def propose(self, root: Tensor) -> DraftTree:
        """See ``Drafter.propose``. root: B -> chains of at most ``drafts`` nodes below the root."""
        tokens = root.cpu().numpy()
        if self._accepted is not None and self._drafted.shape[1]:
            self._learn(continuation(*self._accepted, tokens))
        self._text[self._row, self._lengths] = tokens
        self._matched, place = self._search()
        if not self._matched.any():
            self._drafted = self._drafted[:, :0]
            return DraftTree.root_only(root)
        period = (self._lengths - place)[:, None]
        self._drafted = self._text[self._row[:, None], place[:, None] + 1 + np.arange(self.drafts) % period]  # B D
        return self._chain(tokens).to(self._device)

    def accept(self, tokens: Tensor, features: Tensor | None, counts: Tensor) -> None:
        """See ``Drafter.accept``."""
        new, many = tokens.cpu().numpy(), counts.cpu().numpy()
        row, step = np.nonzero(np.arange(new.shape[1]) < many[:, None])
        self._text[row, self._lengths[row] + step] = new[row, step]
        self._lengths += many
        self._accepted = new, many

    def _search(self) -> tuple[Array, Array]:
        """Length (B, 0 = none) and end (B) of the best earlier match of each row's ending."""
        text, last = self._text[:, : self._lengths.max() + 1], self._lengths
        matched, place = np.zeros_like(last), last - 1
        row, end = np.nonzero(text == text[self._row, last][:, None])  # ordered by row, then by place
        earlier = end < last[row]
        row, end = row[earlier], end[earlier]
        for length in range(1, self.max_match + 1):
            if not len(row):
                break
            if length >= self.min_match:
                matched[row] = length
                place[row] = end  # of several matches of this length the last write, the most recent, stays
            longer = end >= length
            row, end = row[longer], end[longer]
            longer = text[row, end - length] == text[row, last[row] - length]
            row, end = row[longer], end[longer]
        return matched, place

    def _chain(self, root: Array) -> HostTree:
        """Root and drafts as a tree; rows without a match are root and padding."""
        node = np.arange(self.drafts + 1)
        valid = (self._matched > 0)[:, None] | (node == 0)  # B N
        line = (node <= node[:, None]) & valid[:, :, None] & valid[:, None, :]
        scores = np.zeros(valid.shape)
        scores[:, 1:] = self._rates.log_chances(self._matched)
        return HostTree(
            np.concatenate([root[:, None], self._drafted], axis=1) * valid,
            np.where(valid, node - 1, -1),
            node * valid,
            line | (node == node[:, None]),
            valid,
            np.where(valid, scores, -np.inf),
        )

    def _learn(self, truth: Array) -> None:
        """Compare the last drafts with what the target wrote since (B P)."""
        wide = np.full_like(self._drafted, -1)
        width = min(truth.shape[1], self.drafts)
        wide[:, :width] = truth[:, :width]
        self._rates.learn(self._matched, self._drafted == wide, wide >= 0)
