"""Ids and loss masks for toy templates, against masks written by hand."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from specheads.data.spans import SkipRow, check_template
from specheads.data.tokenize import Encoded, encode_row, encode_rows, prompt_ids, supervised_view, template_hash
from specheads.utils import InputError
from tests.fakes import CHATML, EOS_ID, byte_tokenizer, tiny_tokenizer

CHAT = [
    {"role": "user", "content": "Hi There"},
    {"role": "assistant", "content": "Yo."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long!"},
]
EACH = "{% for m in messages %}"
NO_MARKER = (
    EACH + "{{ (m['role'] | upper) + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
GLUED = (  # Vicuna: the generation prompt ends before the space
    EACH + "{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] }}"
    "{% else %}{{ ' ASSISTANT: ' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}"
)
INST = (  # Mistral: no generation prompt at all
    "{{ '<|im_start|>' }}" + EACH + "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
UPPER = CHATML.replace(
    "message['content']", "(message['content'] | upper if message['role'] == 'user' else message['content'])"
)
SHOUT = CHATML.replace("message['content']", "(message['content'] | upper)")
THINK_PROMPT = CHATML.replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<t></t>' }}").replace(
    "message['role'] + '\\n' + ", "message['role'] + '\\n' + ('<t></t>' if message['role'] == 'assistant' else '') + "
)
THINK_ADDED = CHATML.replace(  # only the rendered answer has it, the generation prompt does not
    "message['role'] + '\\n' + ", "message['role'] + '\\n' + ('<t></t>' if message['role'] == 'assistant' else '') + "
)
FORGETS = CHATML.replace(  # the last answer keeps its block, earlier ones lose it: history is rewritten
    "message['content']", "('<t></t>' if message['role'] == 'assistant' and loop.last else '') + message['content']"
).replace("{{ '<|im_start|>assistant\\n' }}", "{{ '<|im_start|>assistant\\n<t></t>' }}")
STRICT = CHATML.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}",
)


def marked(text: str) -> tuple[str, str]:
    """ "a«b»c" as the text "abc" and the mask ".x." of its characters."""
    mask, on = "", False
    for letter in text:
        if letter in "«»":
            on = letter == "«"
        else:
            mask += "x" if on else "."
    return text.replace("«", "").replace("»", ""), mask


def character_mask(encoded: Encoded, tokenizer: Any) -> str:
    """The row's mask by character (one byte is one token here, a special token is one token)."""
    pieces = [
        (tokenizer.decode([token]), flag) for token, flag in zip(encoded.input_ids, encoded.loss_mask, strict=True)
    ]
    return "".join(("x" if flag else ".") * len(text) for text, flag in pieces)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            CHATML,
            "<|im_start|>user\nHi There<|im_end|>\n<|im_start|>assistant\n«Yo.<|im_end|>»\n"
            "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n«So long!<|im_end|>»\n",
        ),
        (NO_MARKER, "USER: Hi There\nASSISTANT: «Yo.»\nUSER: Bye\nASSISTANT: «So long!»\n"),
        (GLUED, "USER: Hi There ASSISTANT: «Yo.<|im_end|>»USER: Bye ASSISTANT: «So long!<|im_end|>»"),
        (
            INST,
            "<|im_start|>[INST] Hi There [/INST] «Yo.<|im_end|>»[INST] Bye [/INST] «So long!<|im_end|>»",
        ),
        (
            UPPER,
            "<|im_start|>user\nHI THERE<|im_end|>\n<|im_start|>assistant\n«Yo.<|im_end|>»\n"
            "<|im_start|>user\nBYE<|im_end|>\n<|im_start|>assistant\n«So long!<|im_end|>»\n",
        ),
        (
            THINK_PROMPT,
            "<|im_start|>user\nHi There<|im_end|>\n<|im_start|>assistant\n<t></t>«Yo.<|im_end|>»\n"
            "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<t></t>«So long!<|im_end|>»\n",
        ),
        (
            THINK_ADDED,
            "<|im_start|>user\nHi There<|im_end|>\n<|im_start|>assistant\n<t></t>«Yo.<|im_end|>»\n"
            "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<t></t>«So long!<|im_end|>»\n",
        ),
        (
            FORGETS,
            "<|im_start|>user\nHi There<|im_end|>\n<|im_start|>assistant\nYo.<|im_end|>\n"
            "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<t></t>«So long!<|im_end|>»\n",
        ),
        (None, "Hi There\n\n«Yo.»\n\nBye\n\n«So long!»"),
    ],
    ids=["chatml", "no-marker", "glued", "inst", "upper", "think", "think-added", "forgets", "plain"],
)
def test_masks_against_hand_written(template: str | None, expected: str) -> None:
    tokenizer = byte_tokenizer(template)
    check_template(tokenizer)
    row = encode_row({"id": "r", "messages": CHAT}, tokenizer, 1000)
    text, mask = marked(expected)
    assert tokenizer.decode(row.input_ids) == text
    assert character_mask(row, tokenizer) == mask


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes with one merge, " Y": the token that spans the border between ``ASSISTANT: `` and ``Yo.``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*letters, "ĠY"])}
    inner = Tokenizer(BPE(vocab=vocabulary, merges=[("Ġ", "Y")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = NO_MARKER
    return tokenizer


def test_token_over_the_border_is_cut_as_the_target_sees_it() -> None:
    tokenizer = merging_tokenizer()
    assert tokenizer("ASSISTANT: Yo")["input_ids"][-2] == 256  # the merge is real
    row = encode_row({"id": "r", "messages": CHAT[:2]}, tokenizer, 1000)
    asked = prompt_ids(tokenizer, CHAT[:1])
    assert row.input_ids[: len(asked)] == asked  # exactly what is read at decoding time
    assert not any(row.loss_mask[: len(asked)])
    assert [text for on, text in supervised_view(row, tokenizer) if on] == ["Yo."]


def test_template_that_rewrites_answers_is_refused() -> None:
    with pytest.raises(InputError, match="rewrites the answer"):
        check_template(byte_tokenizer(SHOUT))
    with pytest.raises(InputError, match="rewrites the answer"):
        encode_rows([{"id": "r", "messages": CHAT}], byte_tokenizer(SHOUT), 1000)


def test_template_errors_are_counted_by_row() -> None:
    tokenizer = byte_tokenizer(STRICT)
    rows = [{"id": str(at), "messages": CHAT} for at in range(9)]
    report = encode_rows([*rows, {"id": "bad", "messages": CHAT[1:]}], tokenizer, 1000)
    assert len(report.rows) == 9
    assert report.skipped == {"refused by the chat template: roles must alternate": 1}
    with pytest.raises(SkipRow, match="alternate"):
        prompt_ids(tokenizer, CHAT[1:])
    tokenizer.chat_template = STRICT.replace("alternate", "alternate\\nalways")
    with pytest.raises(InputError, match=r"^refused by the chat template: roles must alternate$"):
        prompt_ids(tokenizer, CHAT[1:])  # a caller that lets it escape ends with one line


def test_exact_ids_win_and_only_they_are_supervised() -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "ignored here"}]
    asked = prompt_ids(tokenizer, messages[:1])
    row = encode_row({"id": "r#1", "prompt_id": "r", "messages": messages, "output_ids": [9, EOS_ID]}, tokenizer, 99)
    assert row.input_ids == [*asked, 9, EOS_ID]
    assert row.loss_mask == [False] * len(asked) + [True, True]
    assert (row.id, row.prompt_id, row.cut) == ("r#1", "r", False)
    stored = encode_row({"id": "r", "messages": messages, "prompt_ids": [5, 6], "output_ids": [9]}, tokenizer, 99)
    assert stored.input_ids == [5, 6, 9]  # what the target really read, whatever the template says today


def test_length_limit_cuts_ids_and_mask_together_and_teaches_no_end() -> None:
    tokenizer = tiny_tokenizer()
    row = {"id": "r", "messages": [], "prompt_ids": [5] * 10, "output_ids": [9] * 9 + [EOS_ID]}
    cut = encode_row(row, tokenizer, 16)
    assert cut.input_ids == [5] * 10 + [9] * 6
    assert cut.loss_mask == [False] * 10 + [True] * 6
    assert cut.cut
    with pytest.raises(SkipRow, match="within 10 tokens"):
        encode_row(row, tokenizer, 10)


def test_rows_without_supervised_tokens_stop_the_run() -> None:
    tokenizer = tiny_tokenizer()
    good = {"id": "g", "prompt_ids": [5], "output_ids": [9]}
    empty = {"id": "e", "prompt_ids": [5], "output_ids": []}
    report = encode_rows([good] * 9 + [empty], tokenizer, 16)
    assert report.skipped == {"no supervised token": 1}
    assert (report.tokens, report.supervised, report.cut) == (18, 9, 0)
    with pytest.raises(InputError, match="2 of 10 have nothing to learn from"):
        encode_rows([good] * 8 + [empty] * 2, tokenizer, 16)
    with pytest.raises(InputError, match="0 of 0"):
        encode_rows([], tokenizer, 16)


def test_ids_beyond_the_embedding() -> None:
    tokenizer = tiny_tokenizer(33)
    with pytest.raises(InputError, match="token id 32 is beyond the embedding of 32 rows"):
        encode_row({"id": "r", "prompt_ids": [5], "output_ids": [32]}, tokenizer, 16, vocab_size=32)
    with pytest.raises(InputError, match="token id -1"):
        encode_row({"id": "r", "prompt_ids": [5], "output_ids": [-1]}, tokenizer, 16, vocab_size=32)


def test_pad_equal_to_eos_masks_nothing() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == EOS_ID
    row = encode_row({"id": "r", "messages": CHAT}, tokenizer, 1000)
    ends = [flag for token, flag in zip(row.input_ids, row.loss_mask, strict=True) if token == EOS_ID]
    assert ends == [False, True, False, True]  # each turn ends with it; the answers' own are learnt


def test_template_hash_follows_the_text() -> None:
    assert template_hash(byte_tokenizer(CHATML)) == template_hash(tiny_tokenizer())
    assert template_hash(byte_tokenizer(CHATML + " ")) != template_hash(tiny_tokenizer())
    assert template_hash(byte_tokenizer(None)) == "plain"


def test_view_shows_pieces_in_order() -> None:
    tokenizer = byte_tokenizer()
    row = encode_row({"id": "r", "messages": CHAT[:2]}, tokenizer, 1000)
    assert supervised_view(row, tokenizer) == [
        (False, "<|im_start|>user\nHi There<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Yo.<|im_end|>"),
        (False, "\n"),
    ]
