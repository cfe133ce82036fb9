"""The benchmark: every system on the same prompts, in turn, in one process.

    for each repeat:  for each prompt:  HF generate · plain loop · drafter 1 · drafter 2 · ...

so a slow minute of the machine hits all of them alike. Batch 1, greedy, prefill included in the time, tokens counted
from ids. The reference for "same tokens" is the stock model's own ``transformers`` generate in the same dtype.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from specheads.evaluation import acceptance
from specheads.evaluation.divergence import Identity, compare
from specheads.evaluation.record import BenchmarkReport, Row, machine_facts
from specheads.evaluation.runs import HF, PLAIN, Runs, encode_suite, measure
from specheads.evaluation.suites import SuitePrompt
from specheads.hardware import dtype_name
from specheads.utils import InputError

MANY = 0.08  # divergences per token read; rounding alone makes 0.02 to 0.04 in bf16


def run_benchmark(
    target: Any,
    decoders: Mapping[str, Any],
    suite: Sequence[SuitePrompt],
    *,
    plain: Any,
    max_new_tokens: int,
    repeats: int = 2,
    default: str | None = None,
    draft: str = "",
    head: str = "",
    progress: Callable[..., None] | None = None,
) -> BenchmarkReport:
    """Measure speed, acceptance and identity of every decoder.

    Args:
        target: a ``Target``; its ``generate`` is the reference.
        decoders: name -> object with ``generate`` (``SpeculativeDecoder``); the report has one row for each.
        plain: the plain loop with the same signature.
        default: the decoder of the overall line; ``"fastest"``: the one that measured fastest; None: ``"joined"`` if
            there is one, else the first.
        draft, head: the checkpoint and the kind of head, for the report.
        progress: called as ``progress(calls done, calls in all, <system>_tokens_per_s=...)``.

    Divergences do not raise here: write the report, then call its ``check``.

    Raises:
        InputError: nothing to measure, or no prompt that fits the target's context.
    """
    _check(decoders, suite, max_new_tokens, repeats, default)
    prompts, skipped = encode_suite(target, suite, max_new_tokens)
    systems = {HF: target.generate, PLAIN: plain.generate, **{name: one.generate for name, one in decoders.items()}}
    runs = measure(target, systems, prompts, max_new_tokens, repeats, progress)
    identities = {name: _identity(target, runs, name) for name in systems if name != HF}
    groups = runs.groups().items()
    suites = "+".join(sorted({prompt.suite for prompt in prompts}))
    rows = [_row(runs, name, group, chosen, identities[name]) for name in decoders for group, chosen in groups]
    everything = range(len(prompts))
    by_drafter = {name: _row(runs, name, (suites, "all"), everything, identities[name]) for name in decoders}
    return BenchmarkReport(
        target=target.config.name,
        draft=draft,
        head=head,
        dtype=dtype_name(target.dtype),
        device=str(target.device),
        threads=torch.get_num_threads(),
        suite=suites,
        rows=rows,
        by_drafter=by_drafter,
        default_drafter=_default(default, by_drafter),
        plain=identities.pop(PLAIN),
        identities=identities,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        skipped=dict(skipped),
        warnings=_warnings(by_drafter, identities, runs, skipped),
        machine=machine_facts(target.device),
        target_line=target.describe(),
    )


def _check(
    decoders: Mapping[str, Any], suite: Sequence[SuitePrompt], max_new_tokens: int, repeats: int, default: str | None
) -> None:
    if not decoders or not suite or repeats < 1 or max_new_tokens < 1:
        raise InputError(
            f"benchmark: got {len(decoders)} drafters, {len(suite)} prompts, repeats={repeats}, "
            f"max_new_tokens={max_new_tokens}; expected at least 1 of each"
        )
    if default not in (None, "fastest", *decoders):
        raise InputError(f"default drafter: got {default!r}, expected one of {', '.join(decoders)} or fastest")


def _identity(target: Any, runs: Runs, name: str) -> Identity:
    """Against the first pass of the reference; a prompt counts as identical only if it is in every repeat."""
    expected = [run.tokens for run in runs.calls[HF][0]]
    got = []
    for index, tokens in enumerate(expected):
        variants = [calls[index].tokens for calls in runs.calls[name]]
        got.append(next((other for other in variants if other != tokens), tokens))
    ids = [prompt.ids for prompt in runs.prompts]
    return compare(target, name, [prompt.id for prompt in runs.prompts], ids, expected, got)


def _row(runs: Runs, name: str, group: tuple[str, str], chosen: Sequence[int], identity: Identity) -> Row:
    """One drafter over the chosen prompts."""
    stats = runs.stats(name, chosen)
    plain = runs.stats(PLAIN, chosen)
    rates, hf, base = runs.rates(name, chosen), runs.rates(HF, chosen), runs.rates(PLAIN, chosen)
    over_hf = [mine / other for mine, other in zip(rates, hf, strict=True)]
    over_plain = [mine / other for mine, other in zip(rates, base, strict=True)]
    here = {runs.prompts[i].id for i in chosen}
    parted = [one for one in identity.divergences if one.prompt in here]
    steps = max(acceptance.steps(stats), 1)
    calls = [calls[i] for calls in runs.calls[name] for i in chosen]
    return Row(
        drafter=name,
        suite=group[0],
        category=group[1],
        prompts=len(chosen),
        tokens=sum(len(runs.calls[name][0][i].tokens) for i in chosen),
        tau=acceptance.tau(stats),
        tau_macro=acceptance.tau_macro(stats),
        acceptance_by_depth=acceptance.acceptance_by_depth(stats),
        conditional_acceptance=acceptance.conditional_acceptance(stats),
        acceptance_when_drafted=acceptance.acceptance_when_drafted(stats),
        cut_tokens=acceptance.cut_tokens(stats),
        target_forwards=acceptance.steps(stats),
        hf_tokens_per_s=runs.rate(HF, chosen),
        baseline_tokens_per_s=runs.rate(PLAIN, chosen),
        tokens_per_s=runs.rate(name, chosen),
        speedup_vs_hf=statistics.median(over_hf),
        speedup_vs_hf_spread=(min(over_hf), max(over_hf)),
        speedup=statistics.median(over_plain),
        speedup_spread=(min(over_plain), max(over_plain)),
        identical=1 - len(parted) / len(chosen),
        near_ties=sum(one.near_tie for one in parted),
        first_divergences=[asdict(one) for one in parted],
        draft_ms=stats.draft_seconds * 1e3 / steps,
        target_ms=stats.target_seconds * 1e3 / steps,
        verify_ms=stats.verify_seconds * 1e3 / steps,
        plain_target_ms=plain.target_seconds * 1e3 / max(acceptance.steps(plain), 1),
        prefill_ms=stats.prefill_seconds * 1e3 / len(calls),
        nodes_per_step=stats.tree_nodes / steps,
        seconds_per_prompt=statistics.median(run.seconds for run in calls),
        digest=runs.digest(name, chosen),
        reference_digest=runs.digest(HF, chosen),
    )


def _default(wanted: str | None, by_drafter: Mapping[str, Row]) -> str:
    if wanted == "fastest":
        return max(by_drafter, key=lambda name: by_drafter[name].tokens_per_s)
    return wanted or ("joined" if "joined" in by_drafter else next(iter(by_drafter)))


def _warnings(
    by_drafter: Mapping[str, Row], identities: Mapping[str, Identity], runs: Runs, skipped: Counter[str]
) -> list[str]:
    """What a reader must not overlook, a sentence each."""
    found = []
    for name, row in by_drafter.items():
        for ratio, against in ((row.speedup, PLAIN), (row.speedup_vs_hf, HF)):
            if ratio < 1:
                found.append(f"{name} is slower than the {against}: {ratio:.2f} x; drafting does not pay with it here")
        if row.target_forwards and row.nodes_per_step <= 1:
            found.append(f"{name} never drafted a token: speculation was off")
        parted = identities[name].divergences
        last = {one.prompt: one.position + 1 for one in parted}
        read = sum(last.get(p.id, len(run.tokens)) for p, run in zip(runs.prompts, runs.calls[HF][0], strict=True))
        if len(parted) > max(2.0, MANY * read):
            found.append(
                f"{name} leaves the target's text {len(parted)} times in {read} tokens; rounding does so less often"
            )
    if skipped:
        found.append("prompts left out: " + ", ".join(f"{count} {reason}" for reason, count in skipped.items()))
    return found
