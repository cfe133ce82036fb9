"""Verifiers: functions ``(tree, target logits B N V, params, generator) -> Verdict``; all lossless."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specheads.tree.draft_tree import DraftTree
from specheads.types import SamplingParams, Verdict
from specheads.verify.greedy import verify_greedy
from specheads.verify.sampling import verify_sampling

Verifier = Callable[[DraftTree, Tensor, SamplingParams, "torch.Generator | None"], Verdict]
VERIFIERS: dict[str, Verifier] = {"greedy": verify_greedy, "sampling": verify_sampling}


def verifier_for(params: SamplingParams) -> Verifier:
    """The verifier of a temperature: greedy at 0, else sampling."""
    return VERIFIERS["greedy" if params.temperature == 0 else "sampling"]
