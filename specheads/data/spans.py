"""Where the answers stand in a rendered conversation, for any chat template.

The spans are found by rendering each answer's prefix with and without it; nothing is known of any template's markers.
Whatever the method does not fit is an error or a counted skip, never a wrong mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from specheads.data.conversations import Message
from specheads.utils import InputError

PROBES: tuple[tuple[Message, ...], ...] = (
    (
        {"role": "user", "content": "Which Colour is the Sky?"},
        {"role": "assistant", "content": "It is blue, most days."},
        {"role": "user", "content": "And the grass?"},
        {"role": "assistant", "content": "Green grass."},
    ),
    (
        {"role": "user", "content": "Count to Three, please"},
        {"role": "assistant", "content": "1, 2, 3!"},
    ),
)


class SkipRow(InputError):
    """This conversation cannot be used; the text is the reason to count, and the line to show where one is all."""


def render(tokenizer: Any, messages: Sequence[Message], generation: bool) -> str:
    """The template's text. Without a template the turns stand one after another, a blank line between them.

    Raises:
        SkipRow: the template refuses this conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        text = "\n\n".join(str(turn.get("content") or "") for turn in messages)
        bos = tokenizer.bos_token if getattr(tokenizer, "add_bos_token", False) else None
        return (bos or "") + text + ("\n\n" if generation else "")
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=generation))
    except Exception as error:  # templates raise whatever they like
        reason = (str(error) or repr(error)).splitlines()[0]
        raise SkipRow(f"refused by the chat template: {reason}") from None


def to_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of rendered text; special tokens are in the text already, none are added."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def answer_spans(
    tokenizer: Any, messages: Sequence[Message], eos_texts: Iterable[str]
) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation and the character span of every answer: its text and the marker that ends it.

    The answer of turn i starts behind what the generation prompt renders after turns ``:i`` (and behind anything that
    the template puts before the text, such as an empty think block). A turn that the template renders otherwise once
    more turns follow is left out; at least the last one must be found.

    Raises:
        SkipRow: the template refuses or rewrites the conversation.
    """
    whole = render(tokenizer, messages, generation=False)
    spans: list[tuple[int, int]] = []
    for index, turn in enumerate(messages):
        if turn["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:index], generation=True)
        upto = render(tokenizer, messages[: index + 1], generation=False)
        found = _span(before, upto, str(turn.get("content") or "").strip(), tuple(eos_texts))
        if found is not None and whole.startswith(upto[: found[1]]):
            spans.append(found)
        elif index == len(messages) - 1:
            raise SkipRow("the chat template rewrites the answer")
    if not spans:
        raise SkipRow("no answer in the conversation")
    return whole, spans


def _span(before: str, upto: str, text: str, eos_texts: tuple[str, ...]) -> tuple[int, int] | None:
    """Where ``text`` and its end marker stand in ``upto``, which must begin with the generation prompt ``before``."""
    if not upto.startswith(before):
        return None
    start = upto.find(text, len(before))
    if not text or start < 0:
        return None
    end = start + len(text)
    tail = upto[end:]
    marker = tail.lstrip()
    for eos in eos_texts:  # the turn ends with this id; what follows it is the template's, not the target's
        if marker.startswith(eos):
            return start, end + len(tail) - len(marker) + len(eos)
    return start, end + len(tail.rstrip())  # a marker in plain text, or none


def special_texts(tokenizer: Any, eos_ids: Iterable[int]) -> tuple[str, ...]:
    """Texts of the ids that may end a turn: EOS ids first, then every other special token; longest first."""
    ends = {str(text) for text in tokenizer.convert_ids_to_tokens(sorted(set(eos_ids)))}
    return tuple(sorted(ends | {str(text) for text in tokenizer.all_special_tokens}, key=lambda text: -len(text)))


def cut_ids(tokenizer: Any, whole: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[bool]]:
    """Ids and mask of a rendered conversation whose answers stand at ``spans`` (characters).

    A token that spans the border between template and answer belongs to neither: then the pieces are tokenised one by
    one, which is how the target sees them (the generation prompt ends, and its own first token begins).

    Raises:
        SkipRow: the pieces do not read as the whole does.
    """
    borders = sorted({0, len(whole), *(at for span in spans for at in span)})
    ids = to_ids(tokenizer, whole)
    places = [len(to_ids(tokenizer, whole[:at])) for at in borders]
    if any(to_ids(tokenizer, whole[:at]) != ids[:place] for at, place in zip(borders, places, strict=True)):
        pieces = [to_ids(tokenizer, whole[start:end]) for start, end in pairwise(borders)]
        text, ids = tokenizer.decode(ids), [token for piece in pieces for token in piece]
        if tokenizer.decode(ids) != text:
            raise SkipRow("the tokenizer merges text over the border of an answer")
        places = [0]
        for piece in pieces:
            places.append(places[-1] + len(piece))
    mask = [False] * len(ids)
    where = dict(zip(borders, places, strict=True))
    for start, end in spans:
        mask[where[start] : where[end]] = [True] * (where[end] - where[start])
    return ids, mask


def check_template(tokenizer: Any, eos_ids: Iterable[int] = ()) -> None:
    """Try the span method on two made-up chats of unlike shape.

    Raises:
        InputError: the supervised text is not exactly the answers and their end markers, alike in both.
    """
    texts = special_texts(tokenizer, eos_ids)
    markers: set[str] = set()
    for probe in PROBES:
        answers = [str(turn["content"]) for turn in probe if turn["role"] == "assistant"]
        try:
            whole, spans = answer_spans(tokenizer, probe, texts)
            cut_ids(tokenizer, whole, spans)
        except SkipRow as error:
            raise InputError(
                f"chat template of {getattr(tokenizer, 'name_or_path', 'the tokenizer')}: {error} (tried on a made-up "
                "chat), so what the target would write cannot be told apart; use rows written by `specheads generate`, "
                "which carry exact ids"
            ) from None
        found = [whole[start:end] for start, end in spans]
        answers = answers[-len(found) :]  # a template may rewrite earlier turns (those are left out), never the last
        pairs = list(zip(found, answers, strict=True))
        markers |= {text[len(answer) :] for text, answer in pairs}
        if any(not text.startswith(answer) for text, answer in pairs) or len(markers) != 1:
            raise InputError(
                f"chat template of {getattr(tokenizer, 'name_or_path', 'the tokenizer')}: the supervised spans of a "
                f"made-up chat read {found}, expected {answers} with one end marker; use rows written by "
                "`specheads generate`, which carry exact ids"
            )
