"""One answer of the target, streamed, and what the draft saved."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specheads.build import Loaded, build_decoders, build_plain
from specheads.data.tokenize import SkipRow, prompt_ids
from specheads.jobs.screen import Screen
from specheads.types import SamplingParams
from specheads.utils import InputError


@dataclass
class Answer:
    """What was said and how fast. ``tau``: tokens per target forward (bonus included), None without a verify step."""

    prompt_tokens: int
    tokens: list[int]
    text: str
    seconds: float
    drafter: str
    tau: float | None
    compared: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second, prefill included."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "tokens_per_s": round(self.tokens_per_s, 2)}

    def describe(self) -> str:
        """One line."""
        tau = f", {self.tau:.2f} tokens a step" if self.tau is not None else ""
        return (
            f"[{len(self.tokens)} tokens in {self.seconds:.1f} s: {self.tokens_per_s:.1f} tokens/s{tau}, "
            f"draft: {self.drafter}]"
        )


class Talker:
    """A checkpoint ready to answer: the decoder is built (and the machine probed) once."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.drafter = loaded.recipe.decoding.drafter
        self.decoder = build_decoders(loaded, (self.drafter,))[self.drafter]

    def ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """The conversation as the target reads it.

        Raises:
            InputError: it leaves no room for an answer, or the chat template refuses it.
        """
        try:
            found = prompt_ids(self.loaded.target.tokenizer, messages)
        except SkipRow as reason:
            raise InputError(f"conversation: {reason}; ask in other words or start a new one (/new)") from reason
        limit = self.loaded.target.config.context_limit
        if len(found) >= limit:
            raise InputError(f"conversation: {len(found)} tokens, the target takes {limit - 1}; start a new one (/new)")
        return found

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of every generate call."""
        section = self.loaded.recipe.decoding
        sampling = SamplingParams(section.temperature, section.top_k, section.top_p, self.loaded.recipe.seed)
        return {"max_new_tokens": section.max_new_tokens, "sampling": sampling}

    def answer(self, messages: Sequence[dict[str, str]], show: bool, screen: Screen) -> Answer:
        """Answer a conversation; with ``show`` the text appears on stdout as it is made."""
        ids = self.ids(messages)
        tokens: list[int] = []
        pieces: list[str] = []
        first, chunks = 0, 0
        start = time.perf_counter()
        for chunk in self.decoder.stream(ids, **self.settings()):
            first = first if chunks else len(chunk.tokens)
            chunks += 1
            tokens.extend(chunk.tokens)
            pieces.append(chunk.text)
            if show:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
        seconds = time.perf_counter() - start
        tau = (len(tokens) - first) / (chunks - 1) if chunks > 1 else None
        answer = Answer(len(ids), tokens, "".join(pieces), seconds, self.drafter, tau)
        if show:
            sys.stdout.write("\n")
            screen.line(answer.describe())
        return answer

    def compare(self, messages: Sequence[dict[str, str]], answer: Answer, screen: Screen) -> None:
        """The same prompt without a draft: the plain loop, then transformers' own generate."""
        ids = self.ids(messages)
        target = self.loaded.target
        rows: list[list[Any]] = [[f"with draft ({self.drafter})", round(answer.tokens_per_s, 1), answer.tau, "-"]]
        for name, system in (("plain loop", build_plain(target)), ("HF generate", target)):
            output = system.generate([ids], **self.settings())
            same = output.tokens[0] == answer.tokens
            rate = len(output.tokens[0]) / output.seconds
            answer.compared.append({"system": name, "tokens_per_s": round(rate, 2), "same_tokens": same})
            rows.append([name, round(rate, 1), 1.0, "yes" if same else self._why()])
        screen.table(["", "tokens/s", "tokens a step", "same tokens"], rows)

    def _why(self) -> str:
        if self.loaded.recipe.decoding.temperature > 0:
            return "no (sampled)"
        return "no (near-ties of bf16; target.dtype=fp32 shows none)" if self.loaded.target.dtype.itemsize < 4 else "NO"
