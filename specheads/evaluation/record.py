"""What a benchmark leaves behind: rows, an overall line, the facts around them, and their JSON.

The names in ``Row`` and in ``BenchmarkReport.to_json`` are read by other programs: add, never rename.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch

from specheads.config.record import command_line, git_state, package_versions
from specheads.evaluation.divergence import Identity, raise_for_errors
from specheads.hardware import processor_name


@dataclass
class Row:
    """One drafter over the prompts of one category (``"all"``: of every category). Rates in 1/s, times in ms."""

    drafter: str
    suite: str
    category: str
    prompts: int
    tokens: int  # new tokens of one pass over the prompts, from ids
    tau: float | None  # emitted per target forward, bonus included, over all steps (micro)
    tau_macro: float | None  # mean of the prompts' own
    acceptance_by_depth: list[float]  # joint
    conditional_acceptance: list[float]
    acceptance_when_drafted: list[float]
    cut_tokens: int  # tau == 1 + sum(acceptance_by_depth) - cut_tokens / target_forwards
    target_forwards: int  # over all repeats, as the counters of tau are
    hf_tokens_per_s: float
    baseline_tokens_per_s: float
    tokens_per_s: float
    speedup_vs_hf: float  # median of the repeats' ratios
    speedup_vs_hf_spread: tuple[float, float]  # least and greatest
    speedup: float  # over the plain loop
    speedup_spread: tuple[float, float]
    identical: float  # share of prompts
    near_ties: int
    first_divergences: list[dict[str, Any]]
    draft_ms: float  # a step
    target_ms: float  # a step
    verify_ms: float  # a step: verification, commit, bookkeeping
    plain_target_ms: float  # a step of the plain loop
    prefill_ms: float  # a prompt
    nodes_per_step: float  # tree nodes sent to the target, root included
    seconds_per_prompt: float  # median
    digest: str  # of all new ids; equal digests are equal tokens
    reference_digest: str


@dataclass
class BenchmarkReport:
    """Everything that one benchmark measured."""

    target: str
    draft: str
    head: str
    dtype: str
    device: str
    threads: int
    suite: str
    rows: list[Row]
    by_drafter: dict[str, Row]  # over all categories
    default_drafter: str
    plain: Identity
    identities: dict[str, Identity]
    max_new_tokens: int
    repeats: int
    skipped: dict[str, int]
    warnings: list[str]
    machine: dict[str, Any] = field(default_factory=dict)
    target_line: str = ""
    draft_digest: str = ""  # of the checkpoint's weights: whose numbers these are

    @property
    def overall(self) -> Row:
        """The default drafter over all categories."""
        return self.by_drafter[self.default_drafter]

    def check(self) -> None:
        """Call after the report is written.

        Raises:
            DivergenceError: some tokens are not the target's own and no rounding explains it.
        """
        raise_for_errors([self.plain, *self.identities.values()])

    def to_json(self) -> dict[str, Any]:
        """Plain values only; numbers that are not finite become None."""
        plain = {
            "identical": self.plain.identical,
            "near_ties": self.plain.near_ties,
            "first_divergences": [asdict(one) for one in self.plain.divergences],
        }
        value = {
            "target": self.target,
            "draft": self.draft,
            "head": self.head,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "suite": self.suite,
            "rows": [asdict(row) for row in self.rows],
            "overall": asdict(self.overall),
            "by_drafter": {name: asdict(row) for name, row in self.by_drafter.items()},
            "default_drafter": self.default_drafter,
            "plain": plain,
            "max_new_tokens": self.max_new_tokens,
            "repeats": self.repeats,
            "skipped": self.skipped,
            "warnings": self.warnings,
            "machine": self.machine,
            "target_line": self.target_line,
            "draft_digest": self.draft_digest,
        }
        return _finite(value)


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def machine_facts(device: torch.device | str) -> dict[str, Any]:
    """Processor, threads, versions, date, command and commit of this process."""
    device = torch.device(device)
    return {
        "processor": processor_name(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(command_line()),
        "git": git_state(),
    }
