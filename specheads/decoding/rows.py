"""The rows of one generate call: what was asked, what was emitted, and where each row ends.

Shared by the speculative and the plain decoder, so that both end a text by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specheads.decoding.streaming import TextStream
from specheads.sampling import validate
from specheads.types import SamplingParams, TargetConfig
from specheads.utils import InputError


class Rows:
    """Ids and ends of B rows.

    A row ends at an EOS id (kept as its last id), at the token that completes a stop string, after
    ``max_new_tokens``, or when prompt and answer fill the target's context. Nothing behind the end is kept.

    Raises:
        InputError: prompts, limits, stop strings or sampling values that mean nothing; see ``check_request``.
    """

    def __init__(
        self,
        config: TargetConfig,
        tokenizer: Any,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: SamplingParams,
        eos_ids: Sequence[int] | None,
        stop_strings: Sequence[str],
        with_text: bool = False,
    ) -> None:
        check_request(config, prompts, max_new_tokens, sampling, stop_strings)
        self.prompts = [list(prompt) for prompt in prompts]
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.finish: list[str | None] = [None] * len(prompts)
        self.limits = [min(max_new_tokens, config.context_limit - len(prompt)) for prompt in prompts]
        self._eos = frozenset(config.eos_ids if eos_ids is None else eos_ids)
        self.texts: list[TextStream] = []
        if stop_strings or with_text:
            decode: Callable[[list[int]], str] = partial(tokenizer.decode, skip_special_tokens=True)
            self.texts = [TextStream(decode, stop_strings) for _ in prompts]

    def take(self, row: int, ids: Sequence[int]) -> int:
        """Append new ids to a row up to its end; returns how many were kept."""
        tokens = self.tokens[row]
        for kept, token in enumerate(ids, start=1):
            tokens.append(token)
            matched = bool(self.texts) and self.texts[row].push(token)
            if token in self._eos:
                self.finish[row] = "stop"
            elif matched:
                self.finish[row] = "stop_string"
            elif len(tokens) >= self.limits[row]:
                self.finish[row] = "length"
            if self.finish[row]:
                return kept
        return len(ids)

    def active(self) -> list[int]:
        """Rows that have not ended."""
        return [row for row, end in enumerate(self.finish) if end is None]

    def room(self, row: int) -> int:
        """Drafts that could still be used: one less than the tokens that may follow (the bonus token is one). It also
        keeps every node below the context limit."""
        return self.limits[row] - len(self.tokens[row]) - 1

    @property
    def longest(self) -> int:
        """Positions of the longest row when it is full."""
        return max(len(prompt) + limit for prompt, limit in zip(self.prompts, self.limits, strict=True))

    def padded_prompts(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Prompts padded on the right (B T) and their lengths (B)."""
        lengths = [len(prompt) for prompt in self.prompts]
        width = max(lengths)
        padded = [prompt + [0] * (width - len(prompt)) for prompt in self.prompts]
        return torch.tensor(padded, device=device), torch.tensor(lengths, device=device)


def check_request(
    config: TargetConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams,
    stop_strings: Sequence[str],
) -> None:
    """Refuse a request that cannot be answered.

    Raises:
        InputError: naming the field, what came and what was expected.
    """
    validate(sampling)
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InputError(f"max_new_tokens: got {max_new_tokens!r}, expected a whole number >= 1; raise it")
    if isinstance(stop_strings, str) or any(not isinstance(stop, str) or not stop for stop in stop_strings):
        raise InputError(f"stop_strings: got {stop_strings!r}, expected a list of non-empty strings; mend the list")
    if not prompts:
        raise InputError("prompts: got none, expected at least one list of token ids; add a prompt")
    for row, prompt in enumerate(prompts):
        if not 1 <= len(prompt) < config.context_limit:
            raise InputError(
                f"prompt {row}: got {len(prompt)} tokens, expected 1 to {config.context_limit - 1} (the context of "
                f"{config.name} is {config.context_limit}, an answer included); "
                + ("write something to answer" if not prompt else "shorten it")
            )
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise InputError(
                f"prompt {row}: got token ids from {min(prompt)} to {max(prompt)}, expected 0 to "
                f"{config.vocab_size - 1}; use the tokenizer of {config.name}"
            )
