"""Proof at load time that a target can be served: small forwards whose right answer is known.

The tree of five nodes, with siblings at two depths:  0 ── 1 ── 3
                                                      │    └── 4
                                                      └── 2
"""

from __future__ import annotations

import torch
from torch import Tensor

from specheads.target.adapter import Target
from specheads.utils import InputError

PREFIX = 6
PARENTS = (-1, 0, 0, 1, 1)
DEPTHS = (0, 1, 1, 2, 2)
ANCESTORS = ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 1, 4))
LEAVES = (2, 3, 4)
# relative distance below which two ways to compute the same logits agree; a wrong mask is at 0.1 and above, a sound
# path of a 30-layer model in bf16 below 0.03
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}


def distance(found: Tensor, expected: Tensor) -> float:
    """Relative distance of two tensors [..., size], each vector's mean taken off the scale. NaN counts as infinite."""
    found, expected = found.double(), expected.double()
    scale = (expected - expected.mean(-1, keepdim=True)).norm().clamp(min=1e-12)
    value = float((found - expected).norm() / scale)
    return value if value == value else float("inf")


def sample_ids(target: Target, rows: int, size: int) -> Tensor:
    """Ids spread over the vocabulary, B N, all of a row distinct in small vocabularies too."""
    ids = torch.arange(rows * size).view(rows, size) * 37 + 11
    return (ids % target.config.vocab_size).to(target.device)


def tree_mask(rows: int, device: torch.device) -> Tensor:
    """Mask of the small tree, B 5 5 bool."""
    mask = torch.zeros(len(PARENTS), len(PARENTS), dtype=torch.bool)
    for node, seen in enumerate(ANCESTORS):
        mask[node, list(seen)] = True
    return mask.to(device).expand(rows, -1, -1)


@torch.no_grad()
def check_target(target: Target) -> None:
    """One forward over the tree must equal the model's own forwards over its paths, and norm and head its logits.

    Raises:
        InputError: they differ: this architecture keeps a state that a tree mask cannot steer, or its parts are not
            where they were looked for.
    """
    ids = sample_ids(target, 1, PREFIX + len(PARENTS))
    prefix, nodes = ids[:, :PREFIX], ids[:, PREFIX:]
    paths = torch.stack([_path(prefix[0], nodes[0], leaf) for leaf in LEAVES])  # leaves x (PREFIX + 3)
    try:
        own = target.model(input_ids=paths, use_cache=False).logits  # leaves T V
        cache = target.new_cache(1, PREFIX + len(PARENTS))
        target.forward(prefix, cache=cache, logits="none")
        cache.commit(torch.arange(PREFIX, device=ids.device)[None], cache.lengths + PREFIX)
        positions = PREFIX + torch.tensor([DEPTHS], device=ids.device)
        found = target.forward(
            nodes, positions=positions, cache=cache, tree_mask=tree_mask(1, ids.device), logits="all"
        ).logits
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{_subject(target)} cannot run a draft tree ({reason}); choose another target") from error
    assert found is not None
    for row, leaf in enumerate(LEAVES):
        for node in ANCESTORS[leaf]:
            _compare(target, found[0, node], own[row, PREFIX + DEPTHS[node]], "a tree forward and its paths")
    plain = target.forward(paths, layer_ids=(target.config.num_layers,), logits="all")
    assert plain.features is not None
    assert plain.logits is not None
    _compare(target, plain.logits, own, "the plain forward and the model's own logits")
    composed = target.parts.lm_head(target.parts.norm(plain.features))
    _compare(target, composed, own, "head(norm(last state)) and the model's own logits")


@torch.no_grad()
def lean_distance(lean: Target, stock: Target) -> float:
    """The largest distance between two targets over a prefill of two unequal rows and a tree step, with features."""
    layers = (0, stock.config.num_layers // 2, stock.config.num_layers)
    ids = sample_ids(stock, 2, PREFIX + len(PARENTS))
    worst = 0.0
    outputs = []
    for target in (lean, stock):
        cache = target.new_cache(2, PREFIX + len(PARENTS))
        prefill = target.forward(ids[:, :PREFIX], cache=cache, layer_ids=layers)
        counts = torch.tensor([PREFIX, PREFIX - 2], device=ids.device)
        cache.commit(torch.arange(PREFIX, device=ids.device).expand(2, -1), counts)
        positions = counts[:, None] + torch.tensor(DEPTHS, device=ids.device)
        mask = tree_mask(2, ids.device)
        step = target.forward(ids[:, PREFIX:], positions=positions, cache=cache, tree_mask=mask, layer_ids=layers)
        plain = target.forward(ids, layer_ids=layers)
        outputs.append((prefill, step, plain))
    for mine, theirs in zip(*outputs, strict=True):
        for found, expected in ((mine.logits, theirs.logits), (mine.features, theirs.features)):
            assert found is not None
            assert expected is not None
            worst = max(worst, distance(found, expected))
    return worst


def _path(prefix: Tensor, nodes: Tensor, leaf: int) -> Tensor:
    """Prefix and the path to a leaf, filled to three nodes with the leaf itself (what comes later changes nothing)."""
    path = list(ANCESTORS[leaf])
    path += [leaf] * (3 - len(path))
    return torch.cat([prefix, nodes[path]])


def _compare(target: Target, found: Tensor, expected: Tensor, what: str) -> None:
    gap, allowed = distance(found, expected), TOLERANCE.get(target.dtype, 1e-3)
    if gap > allowed:
        raise InputError(
            f"{_subject(target)} cannot be served: {what} differ by {gap:.2g} (allowed {allowed:g}); "
            "choose a target with plain attention"
        )


def _subject(target: Target) -> str:
    return f"target: {target.config.name} ({target.config.model_type})"
