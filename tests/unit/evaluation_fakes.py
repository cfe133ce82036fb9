"""A target that is a table, decoders with scripted steps, and a clock that only they move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from specheads.evaluation import runs
from specheads.types import DecodeStats, GenerationOutput, SamplingParams, TargetConfig, TargetOutput

VOCAB, EOS = 16, 1


class Clock:
    """Seconds that pass only when somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class LetterTokenizer:
    """One id a letter; no chat template, so turns are joined by blank lines."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(letter) % (VOCAB - 2) for letter in text]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(chr(97 + token) for token in ids if token != EOS or not skip_special_tokens)


class TableTarget:
    """The next token depends on the last one and on the length; ``runner_up`` is that much below the best."""

    def __init__(self, clock: Clock, dtype: torch.dtype = torch.float32, runner_up: float = 3.0) -> None:
        self.clock, self.dtype, self.runner_up = clock, dtype, runner_up
        self.device = torch.device("cpu")
        self.tokenizer = LetterTokenizer()
        self.config = TargetConfig(
            "table", "table", 8, 8, 2, 1, 1, 8, VOCAB, 64, (EOS,), 1e-5, 1e4, None, "fingerprint"
        )  # fmt: skip
        self.limit = 12  # the text ends here

    def describe(self) -> str:
        return "table: a test"

    def best(self, ids: Sequence[int]) -> int:
        return 2 + (3 * ids[-1] + len(ids)) % (VOCAB - 2)

    def logits(self, ids: Sequence[int]) -> Tensor:
        row = torch.zeros(VOCAB)
        row[self.best(ids)] = 16.0
        row[self.second(ids)] = 16.0 - self.runner_up
        return row

    def second(self, ids: Sequence[int]) -> int:
        return 2 + (self.best(ids) - 1) % (VOCAB - 2)

    def forward(self, tokens: Tensor, *, logits: Tensor) -> TargetOutput:
        rows = [self.logits(row[: int(last) + 1])[None] for row, last in zip(tokens.tolist(), logits, strict=True)]
        return TargetOutput(torch.stack(rows), None)

    def text(self, prompt: Sequence[int], count: int) -> list[int]:
        """The greedy text: EOS after ``limit`` tokens."""
        new: list[int] = []
        while len(new) < count:
            new.append(EOS if len(new) == self.limit - 1 else self.best([*prompt, *new]))
            if new[-1] == EOS:
                break
        return new

    def generate(
        self, prompts: list[list[int]], *, max_new_tokens: int, sampling: SamplingParams, eos_ids: Any
    ) -> GenerationOutput:
        """One second a token."""
        assert sampling.temperature == 0
        tokens = [self.text(prompt, max_new_tokens) for prompt in prompts]
        self.clock.now += sum(map(len, tokens))
        steps = [len(ids) - 1 for ids in tokens]
        return GenerationOutput(tokens, ["length"] * len(prompts), DecodeStats(steps, list(steps)), 0.0)


class ScriptedDecoder:
    """Accepts ``accepted`` drafts in every step of ``step_seconds``; ``alter`` may change its text."""

    def __init__(
        self,
        target: TableTarget,
        accepted: int,
        step_seconds: float,
        alter: Callable[[list[int], int], list[int]] = lambda tokens, call: tokens,
    ) -> None:
        self.target, self.accepted, self.step_seconds, self.alter = target, accepted, step_seconds, alter
        self.calls = 0

    def generate(
        self, prompts: list[list[int]], *, max_new_tokens: int, sampling: SamplingParams, eos_ids: Any
    ) -> GenerationOutput:
        assert len(prompts) == 1, "batch 1"
        tokens = self.alter(self.target.text(prompts[0], max_new_tokens), self.calls)
        self.calls += 1
        emitted = len(tokens) - 1
        steps = -(-emitted // (1 + self.accepted))
        at_least = [steps] * self.accepted
        stats = DecodeStats([steps], [emitted], at_least, list(at_least), tree_nodes=steps * (1 + self.accepted))
        stats.target_seconds, stats.draft_seconds = steps * self.step_seconds, steps * self.step_seconds / 4
        stats.verify_seconds, stats.prefill_seconds = steps * self.step_seconds / 8, self.step_seconds
        self.target.clock.now += self.step_seconds * (steps + 1)
        return GenerationOutput([tokens], ["length"], stats, 0.0)


def use_clock(monkeypatch: Any, clock: Clock) -> None:
    """The benchmark reads ``clock``."""
    monkeypatch.setattr(runs, "time", SimpleNamespace(perf_counter=clock.perf_counter))
