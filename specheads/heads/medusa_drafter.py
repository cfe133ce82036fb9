"""Drafting with Medusa heads: one product for all heads, candidates into a static tree (Cai et al. 2024).

Legend: B rows, P committed tokens, K heads, R ranks, H hidden size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specheads.heads.base import Drafter
from specheads.heads.common import weights_version
from specheads.modules.packed_linear import pack_linear
from specheads.tree.draft_tree import DraftTree
from specheads.tree.static import StaticTree
from specheads.types import FrozenParts
from specheads.utils import InputError

if TYPE_CHECKING:
    from specheads.heads.medusa import MedusaHead

# before anything was measured, in order of likely gain: wide at the first head, thin behind (12 nodes with the root)
DEFAULT_PATHS = ((0,), (1,), (0, 0), (2,), (0, 1), (3,), (0, 0, 0), (1, 0), (0, 0, 1), (0, 1, 0), (0, 0, 0, 0))


@dataclass(frozen=True)
class MedusaWeights:
    """The heads' weights as drafting reads them: in the target's dtype, stacked over heads, outputs packed."""

    version: tuple[Any, ...]
    blocks: tuple[tuple[Tensor, Tensor], ...]  # of each depth: K H H (transposed for bmm), K 1 H
    outputs: tuple[Callable[[Tensor], Tensor], ...]  # H -> D: one a head, or one for all
    ids: Tensor  # D: target id of every draft id

    @classmethod
    def of(cls, head: MedusaHead, parts: FrozenParts, previous: MedusaWeights | None) -> MedusaWeights:
        """From a head, or ``previous`` if nothing has changed since."""
        like = parts.output_weight
        version = (like.dtype, like.device, like.data_ptr(), weights_version(head))
        if previous is not None and previous.version == version:
            return previous
        blocks = []
        for depth in range(head.config.num_blocks):
            linears = [blocks[depth].linear for blocks in head.blocks]  # type: ignore[index]
            weight = torch.stack([linear.weight.detach() for linear in linears]).to(like)
            bias = torch.stack([linear.bias.detach() for linear in linears]).to(like)
            blocks.append((weight.mT.contiguous(), bias[:, None]))
        rows = [weight.detach().to(like) for weight in head.output_rows(parts, like.dtype)]
        outputs = tuple(pack_linear(weight, head.config.num_heads if len(rows) == 1 else 1) for weight in rows)
        return cls(version, tuple(blocks), outputs, head.vocab.ids.to(like.device))


class MedusaDrafter(Drafter):
    """One generate call: remembers the last committed position's state, nothing else."""

    def __init__(self, head: MedusaHead, weights: MedusaWeights, parts: FrozenParts, policy: Any = None) -> None:
        if policy is not None and not isinstance(policy, StaticTree):
            raise InputError(f"tree: got {type(policy).__name__} for a Medusa head, expected a StaticTree")
        config = head.config
        tree = policy or StaticTree.of(config.tree_paths or DEFAULT_PATHS)
        self.tree = tree.cut(config.num_heads, head.vocab.size)
        self.weights, self.parts = weights, parts
        self.feature_spec = head.feature_spec
        self.max_nodes = self.tree.size
        self._state: Tensor | None = None  # B H: raw state of the last committed position

    def start(self, tokens: Tensor, features: Tensor | None, lengths: Tensor, capacity: int) -> None:
        """See ``Drafter.start``."""
        assert features is not None
        self._state = features[torch.arange(features.shape[0], device=features.device), lengths - 1]

    def accept(self, tokens: Tensor, features: Tensor | None, counts: Tensor) -> None:
        """See ``Drafter.accept``."""
        assert features is not None
        assert self._state is not None
        last = (counts - 1).clamp(min=0)[:, None, None].expand(-1, 1, features.shape[-1])
        newest = features.gather(1, last)[:, 0]
        self._state = torch.where(counts[:, None] > 0, newest, self._state)

    def propose(self, root: Tensor) -> DraftTree:
        """See ``Drafter.propose``."""
        if self.tree.size == 1:
            return DraftTree.root_only(root)
        logits = self.logits()  # depth B D
        best = logits.topk(self.tree.width, dim=-1)
        log_probs = best.values.float() - torch.logsumexp(logits.float(), dim=-1, keepdim=True)
        candidates = self.weights.ids[best.indices]
        return self.tree.draft(root, candidates.transpose(0, 1), log_probs.transpose(0, 1))

    def logits(self) -> Tensor:
        """Of the heads that the tree asks, for the last committed position: depth B D."""
        assert self._state is not None
        depth = self.tree.depth
        x = self.parts.norm(self._state.to(self.parts.output_weight.dtype)).expand(depth, -1, -1)  # depth B H
        for weight, bias in self.weights.blocks:
            x = x + F.silu(torch.baddbmm(bias[:depth], x, weight[:depth]))
        outputs = self.weights.outputs
        if len(outputs) == 1 and depth > 1:
            return outputs[0](x.reshape(-1, x.shape[-1])).view(depth, x.shape[1], -1)
        return torch.stack([output(state) for output, state in zip(outputs, x, strict=False)])
