"""Running systems on prompts: encoding a suite, calling every system in turn, and what a call leaves behind."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specheads.data.conversations import Message
from specheads.data.tokenize import SkipRow, prompt_ids
from specheads.evaluation import acceptance
from specheads.evaluation.suites import SuitePrompt
from specheads.hardware import synchronise
from specheads.types import DecodeStats, GenerationOutput, SamplingParams
from specheads.utils import InputError

HF, PLAIN = "HF generate", "plain loop"  # the two systems without a draft
Generate = Callable[..., GenerationOutput]


@dataclass(frozen=True)
class EncodedPrompt:
    """One measured prompt: ids and where they come from."""

    id: str
    suite: str
    category: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """One generate call of one system."""

    tokens: list[int]
    seconds: float
    stats: DecodeStats


@dataclass
class Runs:
    """All calls: ``calls[system][repeat][prompt]``."""

    prompts: list[EncodedPrompt]
    calls: dict[str, list[list[Run]]] = field(default_factory=dict)

    def groups(self) -> dict[tuple[str, str], list[int]]:
        """(suite, category) -> its prompts."""
        found: dict[tuple[str, str], list[int]] = {}
        for index, prompt in enumerate(self.prompts):
            found.setdefault((prompt.suite, prompt.category), []).append(index)
        return found

    def rates(self, system: str, chosen: Sequence[int]) -> list[float]:
        """Tokens per second of each repeat over the chosen prompts."""
        each = []
        for calls in self.calls[system]:
            each.append(sum(len(calls[i].tokens) for i in chosen) / sum(calls[i].seconds for i in chosen))
        return each

    def rate(self, system: str, chosen: Sequence[int]) -> float:
        """Tokens per second over all repeats."""
        picked = [calls[i] for calls in self.calls[system] for i in chosen]
        return sum(len(run.tokens) for run in picked) / sum(run.seconds for run in picked)

    def stats(self, system: str, chosen: Sequence[int]) -> DecodeStats:
        """Counters over all repeats."""
        return acceptance.merge(calls[i].stats for calls in self.calls[system] for i in chosen)

    def digest(self, system: str, chosen: Sequence[int]) -> str:
        """Of the new ids of the first repeat."""
        return hashlib.sha256(repr([self.calls[system][0][i].tokens for i in chosen]).encode()).hexdigest()[:16]


def encode_suite(
    target: Any, suite: Sequence[SuitePrompt], max_new_tokens: int
) -> tuple[list[EncodedPrompt], Counter[str]]:
    """Ids of every prompt by the target's chat template; later turns follow the target's own answer.

    Raises:
        InputError: not one prompt is left.
    """
    encoded: list[EncodedPrompt] = []
    skipped: Counter[str] = Counter()
    for row in suite:
        messages: list[Message] = list(row.messages)
        for turn in range(len(row.later_turns) + 1):
            try:
                ids = prompt_ids(target.tokenizer, messages)
            except SkipRow as reason:
                skipped[str(reason)] += 1
                break
            if len(ids) >= target.config.context_limit:
                skipped["longer than the target's context"] += 1
                break
            name = f"{row.id}#{turn + 1}" if row.later_turns else row.id
            encoded.append(EncodedPrompt(name, row.suite, row.category, tuple(ids)))
            if turn < len(row.later_turns):
                answer = target.generate([ids], max_new_tokens=max_new_tokens, sampling=SamplingParams(), eos_ids=None)
                text = target.tokenizer.decode(answer.tokens[0], skip_special_tokens=True)
                messages += [
                    {"role": "assistant", "content": text},
                    {"role": "user", "content": row.later_turns[turn]},
                ]
    if not encoded:
        raise InputError(f"suite: no usable prompt among {len(suite)} ({dict(skipped)}); give shorter or other prompts")
    return encoded, skipped


def measure(
    target: Any,
    systems: Mapping[str, Generate],
    prompts: list[EncodedPrompt],
    max_new_tokens: int,
    repeats: int,
    progress: Callable[..., None] | None,
) -> Runs:
    """Warm every system up on the first prompt, then run all of them in turn on every prompt, ``repeats`` times."""
    runs = Runs(prompts, {name: [[] for _ in range(repeats)] for name in systems})
    for generate in systems.values():  # kernels, packed weights and caches are set up before anything counts
        timed_call(target, generate, prompts[0].ids, max_new_tokens)
    tokens, seconds, done = dict.fromkeys(systems, 0), dict.fromkeys(systems, 0.0), 0
    for repeat in range(repeats):
        for prompt in prompts:
            for name, generate in systems.items():
                run = timed_call(target, generate, prompt.ids, max_new_tokens)
                runs.calls[name][repeat].append(run)
                acceptance.cut_tokens(run.stats)  # the identity of tau holds on every single call
                tokens[name] += len(run.tokens)
                seconds[name] += run.seconds
                done += 1
            if progress:
                rates = {f"{name.replace(' ', '_')}_tokens_per_s": tokens[name] / seconds[name] for name in systems}
                progress(done, repeats * len(prompts) * len(systems), **rates)
    return runs


def timed_call(target: Any, generate: Generate, ids: Sequence[int], max_new_tokens: int) -> Run:
    """One greedy call, wall time from prompt ids to new ids (with what an accelerator still has to finish)."""
    synchronise(target.device)
    start = time.perf_counter()
    output = generate([list(ids)], max_new_tokens=max_new_tokens, sampling=SamplingParams(), eos_ids=None)
    synchronise(target.device)
    return Run(output.tokens[0], time.perf_counter() - start, output.stats)
