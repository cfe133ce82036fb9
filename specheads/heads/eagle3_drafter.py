"""Drafting with an EAGLE-3 head: dynamic trees as in EAGLE-2 (Li et al. 2024).

One round, for a context whose last committed position is p and root x(p+1):

1. *first pass*: the pairs of the positions that the target committed since the last round, (x(i+1), g(i)) with the
   target's own features, go into the draft's cache; the output at p gives the root's children;
2. *growth*: each further pass runs the best nodes of the last level (token, output of their parent) behind the cache,
   under a tree mask, at rotary position p + level, and gives their children; these rows are overwritten next round;
3. *rerank*: the best candidates of all levels become the tree.

Legend: B rows, P pending pairs, W nodes of a level, k children, M candidates, T keys, H hidden size, F features,
D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specheads.heads.base import Drafter
from specheads.heads.common import weights_version
from specheads.modules.decoder_layer import CachedLayer, Product, attend, fold_groups
from specheads.modules.kv_cache import KVCache
from specheads.modules.norm import normed
from specheads.modules.packed_linear import pack_linear
from specheads.tree.draft_tree import DraftTree
from specheads.tree.dynamic import DynamicTree, best_children, next_beam, rerank
from specheads.types import FeatureSpec, FrozenParts
from specheads.utils import InputError

if TYPE_CHECKING:
    from specheads.heads.eagle3 import Eagle3Head

MIN_GAIN = 0.2  # until the caller knows what a pass costs here: measured best of 0.06 and 0.2 on two cores
PASS_ROWS = 4  # rows of a usual pass, which packing is tuned for


@dataclass(frozen=True)
class Eagle3Weights:
    """The head's weights as drafting reads them: in the target's dtype, every norm's gain folded into the product that
    follows it, packed for few rows on a CPU. Made once for a state of the weights."""

    version: tuple[Any, ...]
    dtype: torch.dtype
    fc: Product  # F -> H
    layer: CachedLayer
    lm_head: Product  # H -> D
    ids: Tensor  # D: target id of every draft id

    @classmethod
    def of(cls, head: Eagle3Head, parts: FrozenParts, previous: Eagle3Weights | None) -> Eagle3Weights:
        """From a head, or ``previous`` if nothing has changed since."""
        dtype, device = parts.output_weight.dtype, parts.output_weight.device
        version = (dtype, device, weights_version(head))
        if previous is not None and previous.version == version:
            return previous

        def packed(weight: Tensor, gains: Tensor | None = None) -> Product:
            weight = weight.detach() if gains is None else weight.detach() * gains.detach()
            return pack_linear(weight.to(device, dtype), PASS_ROWS)

        layer = head.layer
        features = head.feature_gains().flatten() if head.config.feature_norm else None
        return cls(
            version,
            dtype,
            packed(head.fc.weight, features),
            CachedLayer(
                layer.attention.shape,
                packed(layer.attention.qkv_proj.weight, torch.cat([head.embed_norm.weight, head.hidden_norm.weight])),
                packed(layer.attention.o_proj.weight),
                packed(layer.mlp.gate_up_proj.weight, layer.post_attention_norm.weight),
                packed(layer.mlp.down_proj.weight),
            ),
            packed(head.lm_head.weight, head.norm.weight),
            head.vocab.ids.to(device),
        )


class Eagle3Drafter(Drafter):
    """One generate call. The draft's cache holds verified positions only; drafted ones live behind them for a round.

    ``min_gain``: growth stops once the nodes to be expanded are reached with less chance than this (0 = never).
    """

    def __init__(
        self,
        head: Eagle3Head,
        weights: Eagle3Weights,
        parts: FrozenParts,
        policy: Any = None,
        min_gain: float = MIN_GAIN,
    ) -> None:
        if policy is not None and not isinstance(policy, DynamicTree):
            raise InputError(f"tree: got {type(policy).__name__} for an EAGLE-3 head, expected DynamicTree limits")
        config = head.config
        self.config, self.weights, self.parts = config, weights, parts
        self.policy = (policy or DynamicTree()).fitted(config.draft_vocab_size)
        self.feature_spec = FeatureSpec(config.layer_ids)
        self.max_nodes = self.policy.total_nodes
        self.min_gain = min_gain
        self.cache: KVCache | None = None
        self.rotary = head.rotary
        self._pending: tuple[Tensor, Tensor, Tensor] | None = None  # tokens B P, features B P F, counts B

    def start(self, tokens: Tensor, features: Tensor | None, lengths: Tensor, capacity: int) -> None:
        """See ``Drafter.start``."""
        assert features is not None
        config = self.config
        scratch = self.policy.top_k * self.policy.depth
        self.cache = KVCache(
            1,
            tokens.shape[0],
            config.num_kv_heads,
            max(capacity, tokens.shape[1]) + scratch,
            config.head_dim,
            self.weights.dtype,
            tokens.device,
        )
        self.rotary.to(tokens.device)
        self._pending = (tokens, features, lengths)

    def accept(self, tokens: Tensor, features: Tensor | None, counts: Tensor) -> None:
        """See ``Drafter.accept``. Several calls in a row without a ``propose`` are one longer accept."""
        assert features is not None
        if self._pending is None:
            self._pending = (tokens, features, counts)
            return
        old_tokens, old_features, old_counts = self._pending
        longest = int((old_counts + counts).max())
        # every row's new entries go right behind its old ones; what is beyond the counts means nothing
        width = max(old_tokens.shape[1], longest) + tokens.shape[1]
        place = old_counts[:, None] + torch.arange(tokens.shape[1], device=tokens.device)  # B P
        joined = F.pad(old_tokens, (0, width - old_tokens.shape[1])).scatter(1, place, tokens)
        longer = F.pad(old_features, (0, 0, 0, width - old_features.shape[1]))
        longer = longer.scatter(1, place[:, :, None].expand_as(features), features)
        self._pending = (joined[:, :longest], longer[:, :longest], old_counts + counts)

    def propose(self, root: Tensor) -> DraftTree:
        """See ``Drafter.propose``."""
        state, log_probs = self.first_pass(root)
        return self.grow(root, state, log_probs)

    def first_pass(self, root: Tensor) -> tuple[Tensor, Tensor]:
        """Pending pairs into the cache. root: B -> output at the last pair [B 1 H], its log-probabilities [B 1 D]."""
        assert self.cache is not None
        if self._pending is None:
            raise ValueError("drafter: propose was called twice without an accept, or before start")
        tokens, features, counts = self._pending
        self._pending = None
        last = (counts - 1).clamp(min=0)[:, None]  # B 1
        following = torch.cat([tokens[:, 1:], root[:, None]], dim=1).scatter(1, last, root[:, None])
        pairs = tokens.shape[1]
        column = torch.arange(pairs, device=tokens.device)
        state = self._fuse(features)  # B P H
        cos, sin = self.rotary(self.cache.lengths[:, None] + column, self.weights.dtype)
        queries, keys, values = self._project(following, state, cos, sin)
        self._reserve(pairs)
        keys, values = self.cache.write(0, keys, values)
        # a finished row has no pair: it looks at garbage, so that no softmax is over nothing
        mask = torch.cat([self._committed(), column < counts.clamp(min=1)[:, None]], dim=1)  # B T
        rows = last[:, :, None].expand(-1, -1, state.shape[-1])
        query = queries.gather(2, last[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3]))
        out = self._finish(state.gather(1, rows), query, keys, values, mask[:, None])
        self.cache.commit(column.expand(tokens.shape), counts)
        return out

    def grow(self, root: Tensor, state: Tensor, log_probs: Tensor) -> DraftTree:
        """EAGLE-2's expansion and rerank. state: B 1 H, log_probs: B 1 D, of the root's pair."""
        assert self.cache is not None
        policy, rows = self.policy, root.shape[0]
        tokens, scores = best_children(log_probs, torch.zeros_like(root, dtype=torch.float32)[:, None], policy.top_k)
        tokens, scores = self.weights.ids[tokens[:, 0]], scores[:, 0]  # B M, M = k
        pool = [(tokens, scores, torch.full_like(tokens, -1))]
        offset, children = 0, policy.top_k  # pool index of the last level's first candidate; children a node
        angles = self.rotary(
            (self.cache.lengths[:, None] + torch.arange(policy.depth, device=root.device)), self.weights.dtype
        )  # the root's pair stands at length - 1, so level 1 is at length
        lines = torch.zeros(rows, 1, 0, dtype=torch.bool, device=root.device)  # B W used: columns of the ancestors
        committed = self._committed()[:, None]
        used, self.passes = 0, 1
        for level in range(1, policy.depth):
            beam = next_beam(scores, policy.top_k)  # B W into the last level's candidates
            beam_scores = scores.gather(1, beam)
            if float(beam_scores.exp().sum(1).max()) < self.min_gain:
                break
            self.passes += 1
            parent = beam // children  # B W into the beam before
            nodes = beam.shape[1]
            state = state.gather(1, parent[:, :, None].expand(-1, -1, state.shape[-1]))
            lines = lines.gather(1, parent[:, :, None].expand(-1, -1, used))
            own = torch.eye(nodes, dtype=torch.bool, device=root.device).expand(rows, -1, -1)
            lines = torch.cat([lines, own], dim=2)
            cos, sin = (angle[:, level - 1 : level] for angle in angles)
            queries, keys, values = self._project(tokens.gather(1, beam), state, cos, sin)
            keys, values = self._scratch(used, keys, values)
            used += nodes
            mask = torch.cat([committed.expand(-1, nodes, -1), lines], dim=2)
            state, log_probs = self._finish(state, queries, keys, values, mask)
            picked, scores = best_children(log_probs, beam_scores, policy.top_k)  # B W k
            children = picked.shape[2]
            tokens, scores = self.weights.ids[picked].flatten(1), scores.flatten(1)
            parents = (beam + offset)[:, :, None].expand_as(picked).flatten(1)
            offset += pool[-1][0].shape[1]
            pool.append((tokens, scores, parents))
        all_tokens, all_scores, all_parents = (torch.cat(column, dim=1) for column in zip(*pool, strict=True))
        return rerank(root, all_tokens, all_scores, all_parents, policy.total_nodes)

    def _fuse(self, features: Tensor) -> Tensor:
        """features [B P F] -> g [B P H]."""
        features = features.to(self.weights.dtype)
        if self.config.feature_norm:
            layers = features.unflatten(-1, (len(self.config.layer_ids), -1))
            features = normed(layers, self.config.rms_norm_eps).flatten(-2)
        return self.weights.fc(features)

    def _project(self, tokens: Tensor, state: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens: B N, state: B N H -> queries, keys and values of ``CachedLayer.project``."""
        both = torch.stack([self.parts.embed_tokens(tokens).to(state.dtype), state], dim=2)  # B N 2 H
        return self.weights.layer.project(normed(both, self.config.rms_norm_eps).flatten(2), cos, sin)

    def _finish(
        self, state: Tensor, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The rest of the layer for N queries. mask: B N T -> pre-norm output [B N H], log-probabilities [B N D]."""
        folded = fold_groups(mask, self.config.num_heads // self.config.num_kv_heads)
        state = self.weights.layer.finish(state, attend(queries, keys, values, folded))
        logits = self.weights.lm_head(normed(state, self.config.rms_norm_eps))
        return state, F.log_softmax(logits.float(), dim=-1)

    def _committed(self) -> Tensor:
        """B width bool: columns that hold a committed position."""
        assert self.cache is not None
        return torch.arange(self.cache.width, device=self.cache.lengths.device) < self.cache.lengths[:, None]

    def _scratch(self, used: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a level behind the committed columns and ``used`` others; returns all columns up to its end."""
        assert self.cache is not None
        begin = self.cache.width + used
        end = begin + keys.shape[2]
        stored_keys, stored_values = self.cache.storage[0, 0], self.cache.storage[1, 0]
        stored_keys[:, :, begin:end] = keys
        stored_values[:, :, begin:end] = values
        return stored_keys[:, :, :end], stored_values[:, :, :end]

    def _reserve(self, pairs: int) -> None:
        """Room for ``pairs`` columns and a round's growth; rows of unequal pace can need more than was foreseen."""
        assert self.cache is not None
        need = self.cache.width + pairs + self.policy.top_k * self.policy.depth
        if need > self.cache.capacity:
            self.cache.storage = F.pad(self.cache.storage, (0, 0, 0, 2 * need - self.cache.capacity))
            self.cache.capacity = 2 * need
