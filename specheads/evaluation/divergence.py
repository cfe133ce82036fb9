"""Are the tokens the target's own? Where they part: a near tie, or an error.

The reference is the stock model's own greedy ``generate`` in the same dtype. In bf16 a block of several tokens rounds
differently from one token, so where two logits are almost equal, speculative and plain decoding may choose either.
Everything behind such a place is another, equally valid text, so only the *first* divergence of a prompt is judged.

Tolerance. At that place the stock model reads the common prefix once more, which gives the logits of the two tokens.
Both must lie within ``roundings * eps * magnitude`` of the best one: ``eps`` is the dtype's machine epsilon, and the
magnitude is the largest absolute logit there. (A logit is a sum of products; its rounding error has the size of these,
so a logit that happens to be near 0 is no more exact than its neighbours: measured, errors follow the largest logit.)
Four numbers are compared when a choice flips (two logits, each computed in two ways); allowing each one rounding gives
``roundings = 4`` for bf16. Measured on SmolLM2-135M (1,600 positions of 28 texts, blocks of 4, 8 and the whole text):
86 flips, gaps of 0 to 1.9 roundings; a wrong mask or position moves logits by many times that. fp32 resolves so finely
(single logits moved by up to 57 of *its* roundings, some 2e-4, and nothing flipped) that only what is an exact tie for
every practical purpose may part: 32 roundings, 1e-4 at a logit of 29.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specheads.types import SamplingParams
from specheads.utils import InputError

ROUNDINGS = {torch.bfloat16: 4.0, torch.float16: 8.0, torch.float32: 32.0}
PLAIN_WORDS = (
    "Same tokens: in bf16 a block of several tokens rounds differently from one token, so where the two best tokens "
    "nearly tie the text may go on differently; that is no error of the draft (in fp32 all tokens are the same)."
)


class DivergenceError(InputError):
    """The tokens are not the target's own and no near tie explains it: the numbers of this run mean nothing."""


@dataclass(frozen=True)
class Divergence:
    """The first place where a prompt's tokens differ from the stock target's."""

    prompt: str
    position: int  # index among the new tokens
    expected: int | None  # None: the reference ended here
    got: int | None  # None: the decoder ended here
    margin: float  # the best logit minus the second best, as the stock target sees the common prefix
    gap: float  # the best logit minus the lower one of the two tokens'
    tolerance: float  # what rounding explains at this magnitude
    near_tie: bool

    def describe(self) -> str:
        """One line."""
        kind = "near tie" if self.near_tie else "NOT a near tie"
        return (
            f"prompt {self.prompt}, token {self.position}: expected {self.expected}, got {self.got}; {kind}: the two "
            f"best logits differ by {self.margin:.3g}, these two tokens by {self.gap:.3g} from the best; "
            f"rounding explains {self.tolerance:.3g}"
        )


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first differing token (the shorter length when one is a prefix of the other); None: the same."""
    for index, (left, right) in enumerate(zip(expected, got, strict=False)):
        if left != right:
            return index
    return None if len(expected) == len(got) else min(len(expected), len(got))


def tolerance(magnitude: float, dtype: torch.dtype) -> float:
    """The difference of two logits that rounding explains in ``dtype``, where logits reach ``magnitude``."""
    return ROUNDINGS.get(dtype, 32.0) * torch.finfo(dtype).eps * magnitude


@torch.no_grad()
def stock_logits(target: Any, ids: Sequence[int]) -> Tensor:
    """Logits V (fp32) after ``ids`` by one plain forward of the stock model, or of a target that has no other path."""
    tokens = torch.tensor([list(ids)], dtype=torch.int64, device=target.device)  # 1 T
    model = getattr(target, "model", None)
    if model is not None:
        few = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        return model(input_ids=tokens, use_cache=False, **few).logits[0, -1].float()
    last = torch.tensor([len(ids) - 1], device=target.device)
    return target.forward(tokens, logits=last).logits[0, 0].float()


def judge(
    target: Any, name: str, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int]
) -> Divergence | None:
    """The first divergence of one prompt, judged by the stock target's logits; None when the tokens are the same."""
    place = first_difference(expected, got)
    if place is None:
        return None
    want = expected[place] if place < len(expected) else None
    have = got[place] if place < len(got) else None
    logits = stock_logits(target, [*prompt, *expected[:place]])
    top = logits.topk(2).values.tolist()
    allowed = tolerance(float(logits.abs().max()), target.dtype)
    if want is None or have is None:  # an end that is missing or too early is never a matter of rounding
        return Divergence(name, place, want, have, top[0] - top[1], float("inf"), allowed, False)
    gap = top[0] - min(float(logits[want]), float(logits[have]))
    return Divergence(name, place, want, have, top[0] - top[1], gap, allowed, gap <= allowed)


@dataclass
class Identity:
    """How far one decoder's tokens are the stock target's own."""

    name: str
    prompts: int = 0
    identical: float = 1.0  # share of prompts
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def near_ties(self) -> int:
        """Prompts that part at a near tie."""
        return sum(one.near_tie for one in self.divergences)

    @property
    def errors(self) -> list[Divergence]:
        """Divergences that no rounding explains."""
        return [one for one in self.divergences if not one.near_tie]

    def describe(self) -> str:
        """One line for the screen."""
        text = f"{self.name}: {self.identical:.0%} of {self.prompts} prompts token for token the target's own"
        if self.divergences:
            text += f", {self.near_ties} part at a near tie, {len(self.errors)} are errors"
        return text


def compare(
    target: Any,
    name: str,
    names: Sequence[str],
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    got: Sequence[Sequence[int]],
) -> Identity:
    """Judge every prompt. names: ids of the prompts, for people; expected, got: new tokens of every prompt."""
    found = [judge(target, *row) for row in zip(names, prompts, expected, got, strict=True)]
    parted = [one for one in found if one is not None]
    return Identity(name, len(found), 1 - len(parted) / len(found) if found else 1.0, parted)


def verify_identical(
    target: Any,
    decoders: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    names: Sequence[str] | None = None,
    progress: Callable[..., None] | None = None,
) -> list[Identity]:
    """Greedy tokens of every decoder against the stock target's own, prompt by prompt (batch 1).

    Args:
        target: the target in the dtype to be checked; its ``generate`` is the reference.
        decoders: name -> object with ``generate`` (the plain loop may be one of them).
        prompts: token ids.
        progress: called as ``progress(prompts done, prompts in all)``.

    Nothing is raised on a divergence: hand the result to ``raise_for_errors``.
    """
    names = list(names) if names is not None else [str(index) for index in range(len(prompts))]
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": SamplingParams(), "eos_ids": None}
    expected: list[list[int]] = []
    got: dict[str, list[list[int]]] = {name: [] for name in decoders}
    for index, prompt in enumerate(prompts):
        expected.append(target.generate([list(prompt)], **options).tokens[0])
        for name, decoder in decoders.items():
            got[name].append(decoder.generate([list(prompt)], **options).tokens[0])
        if progress:
            progress(index + 1, len(prompts))
    return [compare(target, name, names, prompts, expected, tokens) for name, tokens in got.items()]


def raise_for_errors(results: Sequence[Identity]) -> None:
    """Fail the run on a divergence that rounding does not explain.

    Raises:
        DivergenceError: names the first one and counts the rest.
    """
    errors = [(result.name, one) for result in results for one in result.errors]
    if errors:
        name, first = errors[0]
        raise DivergenceError(
            f"tokens: {name} leaves the target's own greedy text ({len(errors)} prompts): {first.describe()}. "
            "Drafts must never change the text, whatever the head: please report this as a bug, with this line"
        )
