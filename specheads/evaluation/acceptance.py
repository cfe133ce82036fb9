"""Acceptance numbers out of decoding counters, each under its own name.

Two conventions are often mixed up, so both are here. With ``S`` verify steps and ``A_d`` steps in which at least ``d``
drafts were accepted:

    tau                      emitted tokens / S, the bonus token counted (papers of EAGLE, vLLM)
    acceptance_by_depth[d-1] A_d / S             joint: drafts 1..d were all right
    conditional_acceptance   A_d / A_(d-1)       "n-alpha" of the EAGLE papers: given that 1..d-1 were right
    acceptance_when_drafted  A_d / (steps whose tree reached depth d)

Every uncut step emits its accepted drafts and one bonus token, so ``tau == 1 + sum(acceptance_by_depth) - cut / S``
where ``cut`` counts tokens that were accepted but lie behind an end of text or a length limit. ``cut_tokens`` checks
that identity on every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from specheads.types import DecodeStats


def _add(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]


def merge(stats: Iterable[DecodeStats]) -> DecodeStats:
    """The counters of several generate calls as one: per-row lists are joined, per-depth counts and times added."""
    total = DecodeStats()
    for one in stats:
        total.target_forwards += one.target_forwards
        total.emitted += one.emitted
        total.accepted_at_least = _add(total.accepted_at_least, one.accepted_at_least)
        total.drafted_at_least = _add(total.drafted_at_least, one.drafted_at_least)
        total.draft_seconds += one.draft_seconds
        total.target_seconds += one.target_seconds
        total.verify_seconds += one.verify_seconds
        total.prefill_seconds += one.prefill_seconds
        total.tree_nodes += one.tree_nodes
    return total


def steps(stats: DecodeStats) -> int:
    """Verify steps of all rows (prefill not counted)."""
    return sum(stats.target_forwards)


def tau(stats: DecodeStats) -> float | None:
    """Tokens emitted per target forward over all rows (micro average); None when there was no verify step."""
    return sum(stats.emitted) / steps(stats) if steps(stats) else None


def tau_macro(stats: DecodeStats) -> float | None:
    """The mean of the rows' own tokens per target forward; rows without a verify step have none."""
    pairs = zip(stats.emitted, stats.target_forwards, strict=True)
    each = [emitted / forwards for emitted, forwards in pairs if forwards]
    return sum(each) / len(each) if each else None


def _shares(counts: Sequence[int], out_of: Sequence[int]) -> list[float]:
    return [count / whole if whole else 0.0 for count, whole in zip(counts, out_of, strict=False)]


def acceptance_by_depth(stats: DecodeStats) -> list[float]:
    """[d-1]: share of verify steps in which at least d drafts were accepted."""
    return _shares(stats.accepted_at_least, [steps(stats)] * len(stats.accepted_at_least))


def conditional_acceptance(stats: DecodeStats) -> list[float]:
    """[d-1]: share of the steps with d-1 accepted drafts in which draft d was accepted too (0 where there was none)."""
    return _shares(stats.accepted_at_least, [steps(stats), *stats.accepted_at_least])


def acceptance_when_drafted(stats: DecodeStats) -> list[float]:
    """[d-1]: share of the steps whose tree reached depth d in which d drafts were accepted."""
    return _shares(stats.accepted_at_least, stats.drafted_at_least)


def cut_tokens(stats: DecodeStats) -> int:
    """Accepted or bonus tokens that an end of text or a length limit kept from being emitted.

    Raises:
        ValueError: the counters contradict one another: more was emitted than accepted, more was accepted than
            drafted, deeper acceptance is more frequent, or more was cut than one step a row can lose.
    """
    accepted, drafted = stats.accepted_at_least, stats.drafted_at_least
    cut = steps(stats) + sum(accepted) - sum(stats.emitted)
    ended = sum(1 for forwards in stats.target_forwards if forwards)
    if any(later > earlier for earlier, later in zip([steps(stats), *accepted], accepted, strict=False)):
        raise ValueError(f"decoding counters: accepted_at_least {accepted} must not grow with depth")
    if any(a > d for a, d in zip_longest(accepted, drafted, fillvalue=0)):
        raise ValueError(f"decoding counters: accepted {accepted} but drafted only {drafted}")
    if not 0 <= cut <= ended * len(accepted):
        raise ValueError(
            f"decoding counters: {sum(stats.emitted)} tokens from {steps(stats)} steps and {sum(accepted)} accepted "
            f"drafts break tau = 1 + sum(acceptance_by_depth); {cut} tokens cannot be cut at the ends of {ended} rows"
        )
    return cut
