"""What the parts cost: a draft against a plain target step, a training step against the machine's matrix products."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from specheads.evaluation import acceptance
from specheads.evaluation.runs import timed_call
from specheads.hardware import dtype_name, matmul_rate, synchronise
from specheads.target.adapter import Target
from specheads.types import DecodeStats

# --- decoding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftCost:
    """One drafter; milliseconds a step."""

    name: str
    draft_ms: float  # propose, and taking in what was accepted
    verify_ms: float  # verification, commit, bookkeeping of the tree
    target_ms: float  # the forward over the whole tree
    plain_target_ms: float  # the forward of the plain loop, one token
    tau: float | None
    shares: tuple[float, ...]  # of each repeat: (draft + verify) / plain target step

    @property
    def share(self) -> float:
        """Draft pass and tree bookkeeping as a share of a plain target step, the median of the repeats."""
        return statistics.median(self.shares)


def draft_costs(
    target: Any,
    decoders: Mapping[str, Any],
    plain: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    repeats: int = 3,
) -> list[DraftCost]:
    """Run the plain loop and every decoder in turn (A B A B) over the prompts, and split a step's time.

    Greedy, batch 1. prompts: token ids. The first pass over the first prompt is warm-up.
    """
    systems = {"": plain, **decoders}
    for system in systems.values():
        timed_call(target, system.generate, prompts[0], max_new_tokens)
    seen: dict[str, list[DecodeStats]] = {name: [] for name in systems}  # a repeat's merged counters
    for _ in range(repeats):
        calls: dict[str, list[DecodeStats]] = {name: [] for name in systems}
        for prompt in prompts:
            for name, system in systems.items():
                calls[name].append(timed_call(target, system.generate, prompt, max_new_tokens).stats)
        for name, stats in calls.items():
            seen[name].append(acceptance.merge(stats))
    return [_draft_cost(name, seen[name], seen[""]) for name in decoders]


def _draft_cost(name: str, repeats: Sequence[DecodeStats], plain: Sequence[DecodeStats]) -> DraftCost:
    def each(stats: DecodeStats, seconds: float) -> float:
        return seconds * 1e3 / max(acceptance.steps(stats), 1)

    whole, base = acceptance.merge(repeats), acceptance.merge(plain)
    shares = tuple(
        each(mine, mine.draft_seconds + mine.verify_seconds) / each(other, other.target_seconds)
        for mine, other in zip(repeats, plain, strict=True)
    )
    return DraftCost(
        name,
        each(whole, whole.draft_seconds),
        each(whole, whole.verify_seconds),
        each(whole, whole.target_seconds),
        each(base, base.target_seconds),
        acceptance.tau(whole),
        shares,
    )


# --- training ---------------------------------------------------------------------------------------------------------

Product = tuple[int, int, int, torch.dtype]  # [m, k] @ [k, n]
_aten = torch.ops.aten
_OPERANDS = {_aten.mm: 0, _aten.addmm: 1, _aten.bmm: 0, _aten.baddbmm: 1}  # of every overload, ``out=`` as well
PROBED_SHARE = 0.95  # of the operations: the many tiny products behind are left out of the probe


class ProductLog(TorchDispatchMode):
    """Every matrix product that runs in this context, counted by shape and dtype (backward passes included)."""

    def __init__(self) -> None:
        super().__init__()
        self.products: Counter[Product] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the shape, run the operation."""
        place = _OPERANDS.get(func.overloadpacket)
        if place is not None:
            left, right = args[place], args[place + 1]
            batch = left.shape[0] if left.dim() == 3 else 1
            self.products[(left.shape[-2], left.shape[-1], right.shape[-1], left.dtype)] += batch
        return func(*args, **(kwargs or {}))


def _attention(query: Sequence[int], key: Sequence[int], *_: Any, **__: Any) -> int:
    return 4 * query[0] * query[1] * query[2] * key[2] * query[3]  # two products


def _attention_backward(_grad: Sequence[int], query: Sequence[int], key: Sequence[int], *_: Any, **__: Any) -> int:
    return 10 * query[0] * query[1] * query[2] * key[2] * query[3]  # five products, one of them computed again


# torch counts attention on accelerators only
_CPU_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(frozen=True)
class TrainingRate:
    """A training step against a probe of its own matrix products. Rates in GFLOPS (10^9 operations a second)."""

    flops: int  # of one step, multiplications and additions, counted
    seconds: float  # of one step
    probe: float  # what this machine reaches on the step's own shapes, back to back
    products: tuple[tuple[str, float, float], ...]  # shape, share of the operations, GFLOPS in the probe

    @property
    def rate(self) -> float:
        """What the step reaches."""
        return self.flops / self.seconds / 1e9

    @property
    def share(self) -> float:
        """Of the probe's rate."""
        return self.rate / self.probe


def training_rate(
    step: Callable[[], Any], *, steps: int = 10, warmup: int = 2, device: torch.device | str = "cpu"
) -> TrainingRate:
    """Count and time a training step, then probe its layer shapes in the same process.

    Args:
        step: does one whole step (batch, forward, backward, optimiser) every time it is called, always of one size.

    Raises:
        ValueError: the step multiplies no matrices.
    """
    for _ in range(warmup):
        step()
    flops, seconds, products = 0, 0.0, Counter[Product]()
    for index in range(2 * steps):  # counted and timed steps take turns, as counting slows a step down
        if index % 2 == 0:
            log = ProductLog()
            with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter, log:
                step()
            flops += counter.get_total_flops()
            products += log.products
            continue
        start = time.perf_counter()
        step()
        synchronise(device)
        seconds += time.perf_counter() - start
    if not products:
        raise ValueError("training step: no matrix product ran in it, there is nothing to compare")
    probe, shown = _probe(products, device)
    return TrainingRate(flops // steps, seconds / steps, probe, shown)


def _probe(
    products: Counter[Product], device: torch.device | str
) -> tuple[float, tuple[tuple[str, float, float], ...]]:
    """The rate of the step's own products back to back: operations over the time they would take, largest first."""
    work = {product: 2 * product[0] * product[1] * product[2] * count for product, count in products.items()}
    total, covered, seconds = sum(work.values()), 0, 0.0
    shown: list[tuple[str, float, float]] = []
    for (m, k, n, dtype), flops in sorted(work.items(), key=lambda item: -item[1]):
        if covered >= PROBED_SHARE * total:
            break
        rate = matmul_rate(dtype, m, k, n, device, seconds=0.1)
        covered += flops
        seconds += flops / (rate * 1e9)
        shown.append((f"{m}x{k}x{n} {dtype_name(dtype)}", flops / total, rate))
    return covered / seconds / 1e9, tuple(shown)


# --- features ---------------------------------------------------------------------------------------------------------


def forward_rate(target: Target, tokens: int = 512) -> float:
    """Tokens per second of a forward as feature extraction does it (the best of three: others may use the machine)."""
    tokens = min(tokens, target.config.context_limit)
    ids = (torch.arange(tokens) % target.config.vocab_size)[None].to(target.device)
    best = float("inf")
    for _ in range(3):
        synchronise(target.device)
        start = time.perf_counter()
        target.forward(ids, layer_ids=(target.config.num_layers,), logits="none")
        synchronise(target.device)
        best = min(best, time.perf_counter() - start)
    return tokens / best
