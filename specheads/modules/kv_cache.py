"""Preallocated keys and values for rows of unequal length, with gather-commit.

A forward over N tree nodes writes its keys and values behind the committed columns; after verification ``commit``
keeps the accepted nodes only. All rows write at the same column (``width``, the longest row), so a write is one
slice; a shorter row has a gap of dead columns between its length and ``width``, which the mask hides.

    row 0, length 5   c c c c c | n n n n      c committed, n nodes of this forward, . dead
    row 1, length 3   c c c . . | n n n n
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all layers: storage is 2 x layers x B x kv_heads x capacity x head_dim.

    Raises:
        ValueError: a write would pass ``capacity``.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.storage = torch.zeros(2, layers, rows, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)  # B: committed positions
        self.width = 0  # max(lengths), known without asking the device
        self.capacity = capacity

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put N new columns (B kv_heads N head_dim) behind the committed ones; returns all width + N columns."""
        end = self.width + keys.shape[2]
        if end > self.capacity:
            raise ValueError(f"cache of {self.capacity} columns cannot take {keys.shape[2]} after {self.width}")
        stored_keys, stored_values = self.storage[0, layer], self.storage[1, layer]
        stored_keys[:, :, self.width : end] = keys
        stored_values[:, :, self.width : end] = values
        return stored_keys[:, :, :end], stored_values[:, :, :end]

    def commit(self, path: Tensor, counts: Tensor, longest: int | None = None) -> None:
        """Keep the nodes ``path[b, :counts[b]]`` (B P) of the last forward as the next positions of row b.

        ``longest``: max(counts) if the caller knows it already (saves a read from the device).
        """
        longest = int(counts.max()) if longest is None else longest
        if longest:
            rows = path.shape[0]
            # entries beyond a row's count repeat its last kept node, so no two writes to a column ever differ
            order = torch.arange(longest, device=path.device).minimum(counts[:, None] - 1)  # B longest
            source = self.width + path.gather(1, order.clamp(min=0))
            goal = torch.where(order < 0, source, self.lengths[:, None] + order)  # a row that keeps nothing stays
            if rows == 1:
                if not torch.equal(source, goal):
                    self.storage[:, :, 0].index_copy_(3, goal[0], self.storage[:, :, 0].index_select(3, source[0]))
            else:
                # indexing moves whole head_dim runs; gather and scatter_ go element by element, 100 times slower on CPU
                by_column = self.storage.permute(2, 4, 0, 1, 3, 5)  # B capacity 2 layers kv_heads head_dim
                each = torch.arange(rows, device=path.device)[:, None]
                by_column[each, goal] = by_column[each, source]
        self.lengths = self.lengths + counts
        self.width = self.width + longest if self.lengths.shape[0] == 1 else int(self.lengths.max())

    def visible(self, new: Tensor) -> Tensor:
        """Attention mask B N (width + N): the row's committed columns, then ``new`` (B N N bool: the tree mask)."""
        rows, nodes = new.shape[:2]
        committed = torch.arange(self.width, device=new.device) < self.lengths[:, None]  # B width
        return torch.cat([committed[:, None].expand(rows, nodes, self.width), new], dim=-1)

    def put(self, rows: Tensor, other: KVCache) -> None:
        """Make ``rows`` (R ids) of this cache the R rows of ``other``: a fresh prefill takes over finished rows."""
        if other.width > self.capacity:
            raise ValueError(f"cache of {self.capacity} columns cannot take rows of {other.width}")
        self.storage[:, :, rows, :, : other.width] = other.storage[..., : other.width, :]
        self.lengths = self.lengths.index_copy(0, rows, other.lengths)
        self.width = int(self.lengths.max())

    def clear(self, rows: Tensor) -> None:
        """Forget what ``rows`` (R ids) hold, so that a finished row no longer keeps ``width`` up."""
        self.lengths = self.lengths.index_fill(0, rows, 0)
        self.width = int(self.lengths.max())

    def select(self, rows: Tensor) -> KVCache:
        """A new cache that holds copies of ``rows`` (R ids) only, in that order."""
        _, layers, _, kv_heads, _, head_dim = self.storage.shape
        few = KVCache(layers, 0, kv_heads, self.capacity, head_dim, self.storage.dtype, self.storage.device)
        few.storage, few.lengths = self.storage.index_select(2, rows), self.lengths.index_select(0, rows)
        few.width = int(few.lengths.max()) if len(rows) else 0
        return few
