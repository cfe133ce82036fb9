"""The project's cache in the dress that Hugging Face models expect."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import Cache, LlamaModel

from specheads.modules.kv_cache import KVCache

# the argument that takes a cache: transformers renamed it, and Python 3.10 gets a release before that
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaModel.forward).parameters else "past_key_values"


class CacheFacade(Cache):
    """A Hugging Face ``Cache`` that writes into a ``KVCache`` and keeps nothing itself: one is made for each forward.

    Masks and positions are always given to the model, so only ``update`` and the length are ever asked of it.
    """

    def __init__(self, cache: KVCache) -> None:
        super().__init__(layers=[])
        self.cache = cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """New keys and values (B kv_heads N head_dim) -> all columns of this layer, committed ones first."""
        return self.cache.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed columns (the longest row)."""
        return self.cache.width
