"""Scripted drafters and reference decoders for the decoding tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specheads.heads.base import Drafter
from specheads.target.adapter import Target
from specheads.tree.build import build_tree, check_tree
from specheads.tree.draft_tree import DraftTree
from specheads.types import FeatureSpec


def prompts_of(count: int, vocab_size: int = 64, longest: int = 12, seed: int = 0) -> list[list[int]]:
    """Random prompts of unequal length."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def greedy_by_hand(target: Target, prompt: Sequence[int], new_tokens: int, eos: Sequence[int] = ()) -> list[int]:
    """One token at a time with a whole forward without a cache each: the slowest and plainest decoding."""
    ids = list(prompt)
    for _ in range(new_tokens):
        logits = target.forward(torch.tensor([ids])).logits
        assert logits is not None
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


class Scripted(Drafter):
    """A drafter that keeps the committed text of every row, checks what it is told, and drafts with ``next_nodes``."""

    def __init__(self, max_nodes: int, layer_ids: tuple[int, ...] = ()) -> None:
        self.max_nodes = max_nodes
        self.feature_spec = FeatureSpec(layer_ids)
        self.text: list[list[int]] = []
        self.features: list[Tensor] = []
        self.roots: list[int] = []

    def start(self, tokens: Tensor, features: Tensor | None, lengths: Tensor, capacity: int) -> None:
        self.capacity = capacity
        self.text = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        if features is not None:
            self.features = [rows[:length] for rows, length in zip(features, lengths.tolist(), strict=True)]

    def accept(self, tokens: Tensor, features: Tensor | None, counts: Tensor) -> None:
        for row, count in enumerate(counts.tolist()):
            new = tokens[row, :count].tolist()
            # a joined drafter may pass this one over, so that its last root is an older one
            assert not new or not self.asked or new[0] == self.roots[row], "the root must come first"
            self.text[row] += new
            assert len(self.text[row]) <= self.capacity
            if features is not None:
                self.features[row] = torch.cat([self.features[row], features[row, :count]])
        self.asked = False

    def propose(self, root: Tensor) -> DraftTree:
        self.roots, self.asked = root.tolist(), True
        rows = [
            self.nodes(row, [*text, token]) for row, (text, token) in enumerate(zip(self.text, self.roots, strict=True))
        ]
        size = max(len(tokens) for tokens, _ in rows) + 1
        tokens = torch.zeros(len(rows), size, dtype=torch.int64)
        parents = torch.full((len(rows), size), -1)
        for row, (drafts, places) in enumerate(rows):
            tokens[row, 0] = self.roots[row]
            tokens[row, 1 : len(drafts) + 1] = torch.tensor(drafts, dtype=torch.int64)
            parents[row, 1 : len(drafts) + 1] = torch.tensor(places, dtype=torch.int64)
        tree = build_tree(tokens, parents)
        check_tree(tree)
        return tree

    def nodes(self, row: int, text: list[int]) -> tuple[list[int], list[int]]:
        """Tokens and parents (0 = root, i + 1 = the i-th token) to draft after ``text``."""
        raise NotImplementedError


class Oracle(Scripted):
    """Knows the answers: drafts the next ``depth`` right tokens. ``answers[row]`` is prompt and answer together."""

    def __init__(self, answers: list[list[int]], depth: int, layer_ids: tuple[int, ...] = ()) -> None:
        super().__init__(depth + 1, layer_ids)
        self.answers, self.depth = answers, depth

    def nodes(self, row: int, text: list[int]) -> tuple[list[int], list[int]]:
        right = self.answers[row][len(text) : len(text) + self.depth]
        return right, list(range(len(right)))


class Liar(Oracle):
    """Always wrong at the first draft (and drafts an end of text there if it is given one)."""

    def __init__(self, answers: list[list[int]], depth: int, vocab_size: int, eos: int | None = None) -> None:
        super().__init__(answers, depth)
        self.vocab_size, self.eos = vocab_size, eos

    def nodes(self, row: int, text: list[int]) -> tuple[list[int], list[int]]:
        right, parents = super().nodes(row, text)
        if right:
            wrong = (right[0] + 1) % self.vocab_size
            right[0] = self.eos if self.eos is not None and self.eos != right[0] else wrong
        return right, parents


class RandomTrees(Scripted):
    """A fresh random tree every step: shapes, tokens and sizes vary by row; right tokens are mixed in."""

    def __init__(
        self, answers: list[list[int]], nodes: int, vocab_size: int, seed: int = 0, right: float = 0.6
    ) -> None:
        super().__init__(nodes)
        self.answers, self.vocab_size, self.right = answers, vocab_size, right
        self.generator = torch.Generator().manual_seed(seed)

    def _random(self, high: int) -> int:
        return int(torch.randint(high, (1,), generator=self.generator))

    def nodes(self, row: int, text: list[int]) -> tuple[list[int], list[int]]:
        tokens: list[int] = []
        parents: list[int] = []
        depths = [0]
        taken: set[tuple[int, int]] = set()
        for _ in range(self._random(self.max_nodes)):
            parent = max(self._random(len(depths)), self._random(len(depths)))
            place = len(text) + depths[parent]
            token = self._random(self.vocab_size)
            if self._random(100) < 100 * self.right and place < len(self.answers[row]):
                token = self.answers[row][place]
            if (parent, token) in taken:
                continue
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return tokens, parents
