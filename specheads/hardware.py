"""What this machine is fast at: the processor's name, its matrix-product rate, and the dtype to run a model in."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from specheads.utils import InputError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROBE_SHAPE = (512, 576, 1536)  # tokens x hidden x MLP width of a small model
PROBE_SECONDS = 0.2  # a dtype; two dtypes and their warm-up stay below a second
BF16_GAIN = 1.2  # below, the probe's noise would decide, and fp32 is exact


@dataclass(frozen=True)
class DtypeChoice:
    """A dtype and why, in words a person can check."""

    dtype: torch.dtype
    reason: str


_auto: dict[str, DtypeChoice] = {}  # by kind of device: what "auto" means in this process


def dtype_name(dtype: torch.dtype) -> str:
    """``fp32``, ``bf16``, or torch's own name for another."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))


@lru_cache(maxsize=1)
def processor_name() -> str:
    """The processor as the operating system names it, e.g. for reports."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"


def synchronise(device: torch.device | str) -> None:
    """Wait for what an accelerator still has to do; call it before a clock is read."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def matmul_rate(
    dtype: torch.dtype, m: int, k: int, n: int, device: torch.device | str = "cpu", seconds: float = PROBE_SECONDS
) -> float:
    """Rate of ``[m, k] @ [k, n]`` in GFLOPS (10^9 multiply and add operations a second), the best of several runs.

    Takes about ``seconds`` after one warm-up product; a product slower than that is run once.
    """
    device = torch.device(device)
    left = torch.ones(m, k, dtype=dtype, device=device)
    weight = torch.ones(n, k, dtype=dtype, device=device)
    best, total = float("inf"), 0.0
    for run in range(10_000):
        start = time.perf_counter()
        torch.nn.functional.linear(left, weight)
        synchronise(device)
        taken = time.perf_counter() - start
        total += taken
        if run > 0 or taken > seconds:  # the first run sets kernels up
            best = min(best, taken)
        if (total > seconds and run > 0) or total > 2 * seconds:
            break
    return 2.0 * m * k * n / best / 1e9


def choose_dtype(requested: str, device: torch.device | str = "cpu") -> DtypeChoice:
    """``fp32`` and ``bf16`` as asked; ``auto`` measures both for less than a second, once in a process.

    It takes fp32, the more exact, unless bf16 is at least ``BF16_GAIN`` times as fast.

    Raises:
        InputError: another name.
    """
    if requested in DTYPES:
        return DtypeChoice(DTYPES[requested], "as asked")
    if requested != "auto":
        raise InputError(f"dtype: got {requested!r}, expected auto, fp32 or bf16; choose one of these")
    kind = torch.device(device).type
    if kind not in _auto:
        _auto[kind] = _probe(str(device))
    return _auto[kind]


def adopt_dtype(choice: DtypeChoice, device: torch.device | str) -> None:
    """Let ``auto`` mean ``choice`` on this kind of device: what another process measured, for all processes."""
    _auto[torch.device(device).type] = choice


def _probe(device: str) -> DtypeChoice:
    bf16 = matmul_rate(torch.bfloat16, *PROBE_SHAPE, device=device)
    fp32 = matmul_rate(torch.float32, *PROBE_SHAPE, device=device)
    rates = f"({bf16:.0f} vs {fp32:.0f} GFLOPS)"
    if bf16 >= BF16_GAIN * fp32:
        return DtypeChoice(torch.bfloat16, f"bf16 matrix products {bf16 / fp32:.1f}x fp32 here {rates}")
    return DtypeChoice(torch.float32, f"bf16 matrix products only {bf16 / fp32:.2g}x fp32 here {rates}")
