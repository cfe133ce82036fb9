"""The contract of a head and of a drafter: all the abstraction that the decoder and the trainer know.

A *head* is trained (``training_step``) and makes drafters. A *drafter* is the state of one generate call: it is made
anew for every call, so two calls or two threads never share anything but weights. A drafter that trains nothing
(n-gram look-up, two models) has only the second half.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from specheads.tree.draft_tree import DraftTree
from specheads.types import FeatureSpec, FrozenParts, HeadInputs, StepOutput, TargetConfig


class Drafter(ABC):
    """Proposes tokens for one generate call of B rows.

    Order of calls: ``start`` once, then ``propose`` and ``accept`` in turn. Worked alignment for a prompt ``x0 x1 x2``
    whose first new token is ``x3``: ``start(tokens=[x0,x1,x2], features of positions 0..2, lengths=3)``, then
    ``propose(root=x3)``; if the target accepts the drafts ``x4 x5`` and its bonus token is ``x6``, then
    ``accept(tokens=[x3,x4,x5], features of positions 3..5, counts=3)`` and ``propose(root=x6)``.
    """

    feature_spec: FeatureSpec = FeatureSpec()
    max_nodes: int = 1  # the largest tree that propose may return, root included
    passes: int = 1  # draft forwards of the last propose
    min_gain: float = 0.0  # a further pass needs this chance to be reached; a caller that knows costs sets it

    @abstractmethod
    def start(self, tokens: Tensor, features: Tensor | None, lengths: Tensor, capacity: int) -> None:
        """The prompt. tokens: B T (padded right), features: B T F, lengths: B, capacity: positions ever committed."""

    @abstractmethod
    def propose(self, root: Tensor) -> DraftTree:
        """Draft after ``root`` (B), the token decided last."""

    @abstractmethod
    def accept(self, tokens: Tensor, features: Tensor | None, counts: Tensor) -> None:
        """What the target committed: tokens B P (root first), features B P F; counts (B, may be 0) of them are real."""


class Head(nn.Module, ABC):
    """A trainable draft head. Takes plain arguments; holds no part of the target."""

    name: ClassVar[str]
    feature_spec: FeatureSpec
    config: Any  # a frozen dataclass of plain values; with the tensors it is the whole checkpoint

    @classmethod
    @abstractmethod
    def build(cls, target: TargetConfig, parts: FrozenParts, options: dict[str, Any], draft_ids: Tensor | None) -> Head:
        """A fresh head for a target. options: the recipe's ``head`` section; draft_ids: sorted target ids or None."""

    @classmethod
    @abstractmethod
    def from_config(cls, config: dict[str, Any]) -> Head:
        """An uninitialised head of a saved configuration (``config_dict``); its tensors are loaded after."""

    @abstractmethod
    def config_dict(self) -> dict[str, Any]:
        """JSON-able configuration, enough for ``from_config``."""

    @abstractmethod
    def training_step(self, inputs: HeadInputs, parts: FrozenParts, steps: int | None = None) -> StepOutput:
        """Forward of the training loss. ``steps`` overrides the number of draft steps (evaluation)."""

    @abstractmethod
    def tree_policy(self, depth: int | None, top_k: int | None, nodes: int) -> Any:
        """The policy of this head's trees within limits: longest path, highest rank + 1 (None: the head's own), and
        nodes, root included."""

    @abstractmethod
    def drafter(self, parts: FrozenParts, policy: Any = None) -> Drafter:
        """A fresh drafter over these weights. ``policy``: a tree policy of this head's kind, None for its default."""
