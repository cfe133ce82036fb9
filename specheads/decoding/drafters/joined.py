"""Look-up and head in one tree, sized by what a forward costs.

They miss in different places, so one tree holds both: nodes with the same path are one node, and of all nodes the best
are kept, as many as pay on this machine (``controller.best_size``). The same rule sizes a drafter that works alone
(the other part is then None). What the target accepts corrects both parts' chances while the call runs.

Legend: B rows, N nodes of a tree (root included), P longest accepted path.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median

import numpy as np
from torch import Tensor

from specheads.decoding.controller import StepCosts, best_size
from specheads.decoding.drafters.feedback import Calibration, continuation
from specheads.decoding.drafters.host_tree import Array, HostTree, Pool, best_tree_of, merge
from specheads.heads.base import Drafter
from specheads.tree.draft_tree import DraftTree
from specheads.types import FeatureSpec
from specheads.utils import InputError

WARM_UP = 4  # steps after which the call's own rate is trusted
CHILD_CHANCE = 0.4  # that one of a node's children is right once the node is: what a further draft pass may bring
LONGEST_SILENCE = 32  # steps after which a head is asked again though it did not seem to pay


class _Part:
    """One drafter of the tree with what is known about it in this call."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.milliseconds = 0.0  # of a propose: the median of the last few, so that one hiccup decides nothing
        self.pass_milliseconds = 0.0  # of one of its forwards, likewise
        self.tree: HostTree | None = None  # None: not asked in this step
        self._times: deque[float] = deque(maxlen=9)
        self._pass_times: deque[float] = deque(maxlen=9)

    def start(self, tokens: Tensor, features: Tensor | None, lengths: Tensor, capacity: int) -> None:
        self.drafter.start(tokens, features, lengths, capacity)
        self.calibration = Calibration()

    def accept(self, tokens: Tensor, features: Tensor | None, counts: Tensor) -> None:
        self.drafter.accept(tokens, features if self.drafter.feature_spec.layer_ids else None, counts)

    def propose(self, root: Tensor) -> tuple[HostTree, Array]:
        """Ask for a tree; returns it with its corrected scores (B N)."""
        begun = time.perf_counter()
        self.tree = HostTree.of(self.drafter.propose(root))
        self._times.append(1000 * (time.perf_counter() - begun))
        self._pass_times.append(self._times[-1] / self.drafter.passes)
        self.milliseconds, self.pass_milliseconds = median(self._times), median(self._pass_times)
        return self.tree, self.calibration.corrected(self.tree)

    def learn(self, truth: Array) -> Array:
        """Right drafts (B) of the last tree. truth: B P."""
        assert self.tree is not None, "propose() comes first"
        return self.calibration.learn(self.tree, truth)


class JoinedDrafter(Drafter):
    """The union of a look-up's and a head's trees, cut to the size that brings the most tokens per second.

    The head is passed over where the look-up is nearly sure: what the head could add there costs more than it brings.
    It then gets several ``accept`` in a row before the next ``propose``.

    Args:
        lookup, head: the parts; one of them may be None.
        costs: ``StepCosts.probe`` of the target, made once and shared by all calls.
        most_nodes: the largest tree.

    Raises:
        InputError: no part, or two parts that read different features.
    """

    def __init__(self, lookup: Drafter | None, head: Drafter | None, costs: StepCosts, most_nodes: int = 48) -> None:
        self._lookup = _Part(lookup) if lookup else None
        self._head = _Part(head) if head else None
        self._parts = [part for part in (self._lookup, self._head) if part]
        specs = {part.drafter.feature_spec for part in self._parts} - {FeatureSpec()}
        if not self._parts or len(specs) > 1:
            raise InputError(
                f"joined drafter: got {len(self._parts)} parts that read {len(specs)} sets of features, "
                "expected one or two parts and at most one set; join a head with a look-up"
            )
        self.feature_spec = next(iter(specs), FeatureSpec())
        self.costs = costs
        self.max_nodes = min(most_nodes, 1 + sum(part.drafter.max_nodes - 1 for part in self._parts))

    def start(self, tokens: Tensor, features: Tensor | None, lengths: Tensor, capacity: int) -> None:
        """See ``Drafter.start``."""
        for part in self._parts:
            part.start(tokens, features, lengths, capacity)
        self._accepted: tuple[Array, Array] | None = None
        self._steps, self._tokens, self._milliseconds = 0, 0.0, 0.0
        self._silent = 0  # steps since the head was asked
        self._head_gain, self._head_trials = 4.0, 8.0  # right drafts of the head where the look-up was wrong

    def accept(self, tokens: Tensor, features: Tensor | None, counts: Tensor) -> None:
        """See ``Drafter.accept``."""
        for part in self._parts:
            part.accept(tokens, features, counts)
        self._accepted = tokens.cpu().numpy(), counts.cpu().numpy()

    def propose(self, root: Tensor) -> DraftTree:
        """See ``Drafter.propose``. root: B -> a tree of at most ``max_nodes`` nodes."""
        tokens = root.cpu().numpy()
        if self._accepted is not None:
            self._learn(continuation(*self._accepted, tokens))
        rate = self._tokens / self._milliseconds if self._steps >= WARM_UP else None
        drafts = [self._lookup.propose(root)] if self._lookup else []
        if self._head:
            self._head.tree = None
            if not drafts or self._head_pays(drafts[0][1], rate):
                if rate is not None:  # a pass must bring more tokens than its time brings elsewhere
                    self._head.drafter.min_gain = min(1.0, rate * self._head.pass_milliseconds / CHILD_CHANCE)
                drafts.append(self._head.propose(root))
        (tree, scores), *others = drafts
        pool = merge(tree, scores, *others[0]) if others else Pool.of(tree, scores)
        draft_ms = sum(part.milliseconds for part in self._parts if part.tree is not None)
        ranked = -np.sort(-pool.scores, axis=1)[:, : self.max_nodes - 1]
        chances = np.concatenate([[1.0], np.exp(ranked).mean(0)])  # of the root and of the best nodes of a mean row
        size = best_size(chances, self.costs, draft_ms, len(tokens), rate)
        self._spent = self.costs.milliseconds(len(tokens) * size) + draft_ms
        return best_tree_of(tokens, pool, size).to(root.device) if size > 1 else DraftTree.root_only(root)

    def _head_pays(self, scores: Array, rate: float | None) -> bool:
        """Whether asking the head brings more tokens than its time costs. scores: B N of the look-up."""
        assert self._head is not None
        self._silent += 1
        if rate is None or self._silent > LONGEST_SILENCE:  # the first steps ask both, to learn what each is good for
            self._silent = 0
            return True
        sure = np.exp(scores[:, 1]).mean() if scores.shape[1] > 1 else 0.0
        gain = len(scores) * (1 - sure) * self._head_gain / self._head_trials
        pays = bool(gain > rate * self._head.milliseconds)
        self._silent *= not pays
        return pays

    def _learn(self, truth: Array) -> None:
        """Book the last step. truth: B P, what the target wrote (-1 = nothing known)."""
        right = [part.learn(truth) for part in self._parts if part.tree is not None]
        if self._lookup and self._head and self._head.tree is not None:
            missed = (truth[:, 0] >= 0) & (right[0] == 0)
            self._head_gain += float((right[1] * missed).sum())
            self._head_trials += float(missed.sum())
        self._steps += 1
        self._tokens += float((truth >= 0).sum())
        self._milliseconds += self._spent
