"""From logits to probabilities and tokens: one function for the target, the plain loop and the verifier.

The order is temperature, then top-k, then top-p, as in ``transformers``. Legend: V vocabulary, R rows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specheads.types import SamplingParams
from specheads.utils import InputError

_NUCLEUS_TRIES = 16  # a draw lies in the nucleus with chance >= top_p; beyond this, sorting is cheaper than hoping


def validate(params: SamplingParams) -> None:
    """Refuse values that have no meaning.

    Raises:
        InputError: naming the field, what came and what is allowed.
    """
    temperature, top_k, top_p, seed = params.temperature, params.top_k, params.top_p, params.seed
    if not _is_number(temperature) or not 0 <= temperature < math.inf:
        raise InputError(f"temperature: got {temperature!r}, expected a finite number >= 0 (0 = greedy); change it")
    if not _is_whole(top_k) or top_k < 0:
        raise InputError(f"top_k: got {top_k!r}, expected a whole number >= 0 (0 = off); change it")
    if not _is_number(top_p) or not 0 < top_p <= 1:
        raise InputError(f"top_p: got {top_p!r}, expected 0 < top_p <= 1 (1 = off); change it")
    if seed is not None and (not _is_whole(seed) or not 0 <= seed < 2**63):
        raise InputError(f"seed: got {seed!r}, expected a whole number from 0 to 2**63 - 1, or none; change it")


def new_generator(params: SamplingParams, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator for one call. The same seed gives the same tokens from the same decoder; without a seed, fresh
    entropy. The global random state is never read or written."""
    generator = torch.Generator(device=device)
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    return generator


def greedy(logits: Tensor) -> Tensor:
    """Best token of every row, the lowest id among equals. [..., V] -> [...].

    In two steps (best block, then best within the block), because a maximum without its index is several times
    faster on CPU than one with it.
    """
    vocabulary = logits.shape[-1]
    block = next((size for size in (256, 128, 64) if vocabulary % size == 0), 0)
    if not block:
        return logits.max(dim=-1).indices
    blocks = logits.unflatten(-1, (-1, block))
    best = blocks.amax(-1).max(dim=-1, keepdim=True).indices  # ... 1: the first block that holds the maximum
    inside = blocks.gather(-2, best[..., None].expand(*best.shape, block)).squeeze(-2)
    return (best * block + inside.max(dim=-1, keepdim=True).indices).squeeze(-1)


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """The distribution that ``pick`` draws from: [..., V] -> fp32 [..., V]. Temperature 0 is one-hot."""
    if params.temperature == 0:
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, greedy(logits)[..., None], 1.0)
    weights = _weights(logits, params)
    if params.top_p < 1:
        weights = _nucleus(weights, params.top_p)
    return weights / weights.sum(-1, keepdim=True)


def pick(logits: Tensor, params: SamplingParams, generator: torch.Generator | None = None) -> Tensor:
    """One token of every row by the law of ``probabilities``. [..., V] -> [...] int64."""
    if params.temperature == 0:
        return greedy(logits)
    weights = _weights(logits, params).flatten(0, -2) if logits.dim() > 1 else _weights(logits, params)[None]
    drawn = _draw_nucleus(weights, params.top_p, generator) if params.top_p < 1 else _draw(weights, generator)
    return drawn.reshape(logits.shape[:-1])


def _weights(logits: Tensor, params: SamplingParams) -> Tensor:
    """Unnormalised chances [..., V] after temperature and top-k (0 = cut away; equals of the k-th token stay)."""
    wide = logits.float()
    # relative to the best logit before dividing: a temperature of 1e-8 gives -inf and 0, never inf - inf
    weights = (wide - wide.amax(-1, keepdim=True)).mul_(min(1 / params.temperature, 1e30)).exp_()
    if 0 < params.top_k < logits.shape[-1]:
        weights = weights.masked_fill(weights < weights.topk(params.top_k, dim=-1).values[..., -1:], 0.0)
    return weights


def _nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Keep a token iff the tokens strictly better than it hold less than ``top_p`` of the weight. [..., V]."""
    ordered = weights.sort(dim=-1, descending=True).values
    better = ordered.cumsum(-1) - ordered
    kept = (better < top_p * weights.sum(-1, keepdim=True)).sum(-1, keepdim=True).clamp_(min=1)
    return weights.masked_fill(weights < ordered.gather(-1, kept - 1), 0.0)


def _draw_nucleus(weights: Tensor, top_p: float, generator: torch.Generator | None) -> Tensor:
    """Draw from the nucleus of every row [R, V] without sorting a vocabulary: draw from the whole row and draw again
    where the token is outside, which is the law of the nucleus; a row that stays outside is sorted after all."""
    drawn = _draw(weights, generator)
    enough = top_p * weights.sum(-1)
    todo, rows = torch.arange(weights.shape[0], device=weights.device), weights
    for _ in range(_NUCLEUS_TRIES):
        own = rows.gather(-1, drawn[todo, None])
        better = rows.masked_fill(rows <= own, 0.0).sum(-1)
        todo = todo[better >= enough[todo]]
        if not len(todo):
            return drawn
        rows = weights[todo]
        drawn[todo] = _draw(rows, generator)
    drawn[todo] = _draw(_nucleus(rows, top_p), generator)
    return drawn


def _draw(weights: Tensor, generator: torch.Generator | None) -> Tensor:
    """Index of every row [R, V] with chance proportional to its weight: inverse distribution function in fp64.

    Long rows in two steps, first the block and then within it, so that no vocabulary-long fp64 row is made.
    """
    uniform = torch.rand(weights.shape[:-1], generator=generator, dtype=torch.float64, device=weights.device)
    block = next((size for size in (256, 128, 64) if weights.shape[-1] % size == 0), 0)
    if not block:
        return _invert(weights, uniform)[0]
    blocks = weights.unflatten(-1, (-1, block))
    chosen, rest = _invert(blocks.sum(-1), uniform)
    inside = blocks.gather(-2, chosen[..., None, None].expand(*chosen.shape, 1, block)).squeeze(-2)
    return chosen * block + _invert(inside, rest)[0]


def _invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The index where the running sum passes ``uniform`` x total, and how far into it the point lies (in [0, 1)).

    An index of weight 0 is never chosen: its running sum equals the one before it.
    """
    running = weights.double().cumsum(-1)
    point = (uniform * running[..., -1])[..., None]
    index = torch.searchsorted(running, point, right=True).clamp_(max=weights.shape[-1] - 1)
    own = weights.double().gather(-1, index)
    start = running.gather(-1, index) - own
    rest = ((point - start) / own).clamp_(0, 1 - 2**-53)
    return index.squeeze(-1), rest.squeeze(-1)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
