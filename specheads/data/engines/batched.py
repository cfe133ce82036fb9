"""The built-in engine: one batch of rows over the target's own forward, refilled as rows finish.

Every row draws from its own stream of random numbers, seeded by its key, so its text depends neither on its neighbours
nor on where an interrupted run was taken up again (up to the rounding of the arithmetic: a batch of another size may
round otherwise, which matters at near-ties only, and not at all in fp32 as far as tests can see).

Legend: B rows, R rows of one prefill, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specheads.modules.kv_cache import KVCache
from specheads.sampling import greedy, probabilities
from specheads.target.adapter import Target
from specheads.types import SamplingParams

PREFILL_TOKENS = 2048  # padded tokens of one prefill: bounds its memory; the cores are full from about 500 on


@dataclass(frozen=True)
class Request:
    """One answer to write. ``key`` names the row (and its random numbers)."""

    key: str
    prompt_ids: list[int]
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """What was written: ``finish`` is ``"stop"`` (an EOS id, the last one kept) or ``"length"``."""

    key: str
    output_ids: list[int]
    finish: str


@dataclass
class _Row:
    """A row at work: its request, what it wrote and its uniform random numbers."""

    request: Request
    uniforms: list[float]
    output: list[int] = field(default_factory=list)


def uniforms(request: Request, count: int) -> list[float]:
    """``count`` random numbers in [0, 1) of the row's own stream: by seed and key, whatever else runs beside it."""
    digest = hashlib.sha256(f"{request.seed}/{request.key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.rand(count, generator=generator, dtype=torch.float64).tolist()


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The ids at which the cumulative weights (R V, fp32) pass ``uniform`` (R, fp64). Never an id of weight zero."""
    cumulative = weights.double().cumsum(-1)  # fp64: 1/49,152 steps summed in fp32 lose the tail
    total = cumulative[:, -1:]
    goal = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, goal, right=True).squeeze(-1)


def choose(logits: Tensor, rows: Sequence[_Row | None]) -> list[int]:
    """The next id of every row (logits: B V): argmax (ties: the lowest id), or drawn at the row's temperature."""
    ids = greedy(logits)
    groups: dict[tuple[float, float], list[int]] = {}
    for index, row in enumerate(rows):
        if row is not None and row.request.temperature > 0:
            groups.setdefault((row.request.temperature, row.request.top_p), []).append(index)
    for (temperature, top_p), members in groups.items():
        at = torch.tensor(members, device=logits.device)
        numbers = [row.uniforms[len(row.output)] for row in (rows[member] for member in members) if row is not None]
        weights = probabilities(logits[at], SamplingParams(temperature=temperature, top_p=top_p))
        ids[at] = draw(weights, torch.tensor(numbers, dtype=torch.float64, device=logits.device))
    return ids.tolist()


class BatchedEngine:
    """Answers requests ``batch_size`` at a time; a free slot is filled by the next request, the end is compacted."""

    def __init__(self, target: Target, *, batch_size: int = 32, max_new_tokens: int = 256) -> None:
        self.target, self.batch_size, self.max_new_tokens = target, batch_size, max_new_tokens
        self.eos = frozenset(target.config.eos_ids)

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """Answers in the order in which they finish."""
        if not requests:
            return
        waiting = deque(requests)
        slots: list[_Row | None] = [None] * min(self.batch_size, len(requests))
        capacity = max(len(request.prompt_ids) for request in requests) + self.max_new_tokens
        cache = self.target.new_cache(len(slots), capacity)
        while waiting or any(slots):
            free = [index for index, row in enumerate(slots) if row is None]
            # a prefill of one short prompt costs as much as a whole step: wait for a few free slots
            if waiting and (len(free) >= max(1, self.batch_size // 8) or len(free) == len(slots)):
                yield from self._admit(waiting, slots, free, cache)
            elif not waiting and len(free) >= max(1, len(slots) // 4):
                cache, slots = self._compact(cache, slots)
            if any(slots):
                yield from self._step(slots, cache)

    def _admit(
        self, waiting: deque[Request], slots: list[_Row | None], free: list[int], cache: KVCache
    ) -> Iterator[Answer]:
        """Prefill the next requests into the free slots, a few at a time; each leaves with its first new token."""
        while waiting and free:
            taken: list[Request] = []
            longest = 0
            while waiting and len(taken) < len(free):
                longest = max(longest, len(waiting[0].prompt_ids))
                if taken and longest * (len(taken) + 1) > PREFILL_TOKENS:
                    break
                taken.append(waiting.popleft())
            places, free = free[: len(taken)], free[len(taken) :]
            fresh = [_Row(request, uniforms(request, self.max_new_tokens)) for request in taken]
            logits, filled = self._prefill(taken)
            cache.put(torch.tensor(places, device=cache.lengths.device), filled)
            for place, row in zip(places, fresh, strict=True):
                slots[place] = row
            yield from self._append(slots, places, choose(logits, fresh), cache)

    def _prefill(self, requests: list[Request]) -> tuple[Tensor, KVCache]:
        """Logits R V after each prompt, and the cache of the prompts (padded on the right, which causality hides)."""
        device = self.target.device
        lengths = torch.tensor([len(request.prompt_ids) for request in requests], device=device)
        width = int(lengths.max())
        tokens = torch.zeros(len(requests), width, dtype=torch.int64)
        for index, request in enumerate(requests):
            tokens[index, : len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
        cache = self.target.new_cache(len(requests), width)
        out = self.target.forward(tokens.to(device), cache=cache, logits=lengths - 1)
        assert out.logits is not None
        cache.commit(torch.arange(width, device=device).expand(len(requests), width), lengths, width)
        return out.logits[:, 0], cache

    def _step(self, slots: list[_Row | None], cache: KVCache) -> Iterator[Answer]:
        """One new token for every row at work. An empty slot goes along with token 0 and keeps nothing."""
        device = cache.lengths.device
        last = torch.tensor([[row.output[-1] if row else 0] for row in slots], device=device)
        out = self.target.forward(last, cache=cache, logits="all")
        assert out.logits is not None
        kept = torch.tensor([int(row is not None) for row in slots], device=device)
        cache.commit(torch.zeros_like(last), kept, 1)
        busy = [index for index, row in enumerate(slots) if row is not None]
        ids = choose(out.logits[:, 0], slots)
        yield from self._append(slots, busy, [ids[index] for index in busy], cache)

    def _append(self, slots: list[_Row | None], places: list[int], ids: list[int], cache: KVCache) -> Iterator[Answer]:
        """Give each row at ``places`` its new id; a finished row leaves its slot and is yielded."""
        done: list[int] = []
        for place, token in zip(places, ids, strict=True):
            row = slots[place]
            assert row is not None
            row.output.append(token)
            stop = token in self.eos
            if stop or len(row.output) == self.max_new_tokens:
                slots[place] = None
                done.append(place)
                yield Answer(row.request.key, row.output, "stop" if stop else "length")
        if done:
            cache.clear(torch.tensor(done, device=cache.lengths.device))

    @staticmethod
    def _compact(cache: KVCache, slots: list[_Row | None]) -> tuple[KVCache, list[_Row | None]]:
        """Drop the empty slots: with nothing left to fill them they only cost."""
        busy = [index for index, row in enumerate(slots) if row is not None]
        return cache.select(torch.tensor(busy, dtype=torch.int64, device=cache.lengths.device)), [
            slots[index] for index in busy
        ]
