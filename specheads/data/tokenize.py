"""Conversations to ids and loss masks, for any chat template.

Supervised (``loss_mask`` True) is what the target wrote or would write itself: the assistant's text and the marker that
ends its turn. Everything that the template's generation prompt emits, and everything that the template adds of its
own, is not. A distilled row has its exact ids; for other rows the spans are found by rendering each turn's prefix, and
the method is first tried on two made-up chats: a template that it does not fit is an error, never a wrong mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specheads.data.conversations import Message, Skipped, prompt_of
from specheads.data.spans import SkipRow, answer_spans, check_template, cut_ids, render, special_texts, to_ids
from specheads.utils import InputError

MAX_UNUSABLE = 0.1  # share of rows without anything to learn; more of them is a mistake in the data


@dataclass(frozen=True)
class Encoded:
    """One training row. ``loss_mask[t]``: the token at t was written by the target (or stands for that)."""

    id: str
    prompt_id: str  # rows of one prompt share it, so that they fall on the same side of a split
    category: str
    input_ids: list[int]
    loss_mask: list[bool]
    cut: bool = False  # was longer than the limit


@dataclass
class EncodeReport:
    """What became of the rows."""

    rows: list[Encoded] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)
    cut: int = 0  # rows kept up to the length limit
    tokens: int = 0
    supervised: int = 0

    def describe(self) -> str:
        """One line for screens and reports."""
        return (
            f"{len(self.rows)} rows, {self.tokens} tokens, {self.supervised} supervised; {self.cut} cut to the limit; "
            f"skipped: {self.skipped.describe()}"
        )


def template_hash(tokenizer: Any) -> str:
    """A short digest of the chat template's text (of its absence: ``plain``), so an edit is seen."""
    template = getattr(tokenizer, "chat_template", None)
    return hashlib.sha256(str(template).encode()).hexdigest()[:12] if template else "plain"


def prompt_ids(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """What the target reads before it answers: the conversation and the generation prompt.

    Raises:
        SkipRow: the template refuses this conversation, or nothing is left of it.
    """
    ids = to_ids(tokenizer, render(tokenizer, messages, generation=True))
    if not ids:
        raise SkipRow("no tokens in the conversation")
    return ids


def encode_row(
    row: dict[str, Any], tokenizer: Any, max_length: int, *, eos_ids: Iterable[int] = (), vocab_size: int | None = None
) -> Encoded:
    """Ids and mask of one answered row, cut to ``max_length`` (ids and mask together: a cut answer teaches no end).

    Exact when the row has ``output_ids``; otherwise by the template's spans (see ``check_template``, which
    ``encode_rows`` calls once).

    Raises:
        SkipRow: no supervised token, or the template does not serve the row.
        InputError: an id beyond ``vocab_size``, the rows of the embedding.
    """
    if "output_ids" in row:
        asked = row.get("prompt_ids") or prompt_ids(tokenizer, row["messages"][:-1])
        ids = [*asked, *row["output_ids"]]
        mask = [False] * len(asked) + [True] * len(row["output_ids"])
    else:
        whole, spans = answer_spans(tokenizer, row["messages"], special_texts(tokenizer, eos_ids))
        ids, mask = cut_ids(tokenizer, whole, spans)
    name = str(row.get("id", "?"))
    if vocab_size is not None and ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise InputError(
            f"row {name!r}: token id {max(ids) if max(ids) >= vocab_size else min(ids)} is beyond the embedding of "
            f"{vocab_size} rows; the row or the tokenizer belongs to another target"
        )
    kept_ids, kept_mask = ids[:max_length], mask[:max_length]
    if not any(mask):
        raise SkipRow("no supervised token")
    if not any(kept_mask):
        raise SkipRow(f"no supervised token within {max_length} tokens")
    return Encoded(
        id=name,
        prompt_id=prompt_of({"id": name, **row}),
        category=str(row.get("category", "other")),
        input_ids=kept_ids,
        loss_mask=kept_mask,
        cut=len(ids) > max_length,
    )


def encode_rows(
    rows: Iterable[dict[str, Any]],
    tokenizer: Any,
    max_length: int,
    *,
    eos_ids: Iterable[int] = (),
    vocab_size: int | None = None,
) -> EncodeReport:
    """Encode all rows; what cannot be used is counted by reason.

    Raises:
        InputError: no row is usable, more than a tenth of them is not, the template does not fit
            the span method (only when a row needs it), or an id is beyond the embedding.
    """
    report, total, checked = EncodeReport(), 0, False
    for row in rows:
        total += 1
        if "output_ids" not in row and not checked:
            check_template(tokenizer, eos_ids)
            checked = True
        try:
            encoded = encode_row(row, tokenizer, max_length, eos_ids=eos_ids, vocab_size=vocab_size)
        except SkipRow as reason:
            report.skipped[str(reason)] += 1
            continue
        report.rows.append(encoded)
        report.cut += encoded.cut
        report.tokens += len(encoded.input_ids)
        report.supervised += sum(encoded.loss_mask)
    lost = report.skipped.total()
    if not report.rows or lost > MAX_UNUSABLE * total:
        raise InputError(
            f"rows: {lost} of {total} have nothing to learn from ({report.skipped.describe()}), at most "
            f"{MAX_UNUSABLE:.0%} may; look at one with `specheads inspect`, or raise max_length (now {max_length})"
        )
    return report


def supervised_view(row: Encoded, tokenizer: Any) -> list[tuple[bool, str]]:
    """The row as pieces (supervised?, text) in order, for people to look at."""
    pieces: list[tuple[bool, list[int]]] = []
    for token, wanted in zip(row.input_ids, row.loss_mask, strict=True):
        if not pieces or pieces[-1][0] != wanted:
            pieces.append((wanted, []))
        pieces[-1][1].append(token)
    return [(wanted, str(tokenizer.decode(ids))) for wanted, ids in pieces]
