"""Prompt and answer files: the policy for turns, the counted skips and the errors that name file:line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from specheads.data.conversations import Skipped, builtin_files, clean_turns, read_prompts, read_rows
from specheads.utils import InputError


def turns(letters: str) -> list[dict[str, Any]]:
    """ "UAU" as three turns with the texts u0, a1, u2."""
    roles = {"U": "user", "A": "assistant", "S": "system", "T": "tool"}
    return [{"role": roles[letter], "content": f"{letter.lower()}{at}"} for at, letter in enumerate(letters)]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("AUAU", [("user", "u1"), ("assistant", "a2"), ("user", "u3")]),
        ("UUA", [("user", "u0\n\nu1")]),
        ("UAA", [("user", "u0")]),
        ("UAUU", [("user", "u0"), ("assistant", "a1"), ("user", "u2\n\nu3")]),
        ("SAUA", [("system", "s0"), ("user", "u2")]),
        ("UAUAA", [("user", "u0"), ("assistant", "a1"), ("user", "u2")]),
    ],
)
def test_prompt_policy(tmp_path: Path, letters: str, expected: list[tuple[str, str]]) -> None:
    prompts, skipped = read_prompts(write(tmp_path / "p.jsonl", {"messages": turns(letters)}))
    assert [(turn["role"], turn["content"]) for turn in prompts[0].messages] == expected
    assert not skipped


@pytest.mark.parametrize(
    ("letters", "expected"),
    [("UAU", ["u0", "a1"]), ("AUAA", ["u1", "a2\n\na3"]), ("SUAUA", ["s0", "u1", "a2", "u3", "a4"])],
)
def test_answered_rows_end_with_the_answer(tmp_path: Path, letters: str, expected: list[str]) -> None:
    rows, _ = read_rows(write(tmp_path / "p.jsonl", {"messages": turns(letters)}))
    assert [turn["content"] for turn in rows[0]["messages"]] == expected


def test_tool_turns_and_their_fields_survive(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "f"}}]}
    result = {"role": "tool", "content": "7", "tool_call_id": "c1"}
    messages = [*turns("SU"), call, result, *turns("A")]
    rows, _ = read_rows(write(tmp_path / "r.jsonl", {"messages": messages}))
    assert rows[0]["messages"] == messages
    prompts, _ = read_prompts(tmp_path / "r.jsonl")
    assert list(prompts[0].messages) == messages[:4]  # a tool's result is what gets answered
    assert clean_turns([*turns("U"), call, call])[1:] == [call, call]  # never merged


def test_skips_are_counted_by_reason(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"messages": []},
        {"messages": turns("S")},
        {"messages": turns("A")},
        {"messages": [{"role": "user", "content": "  "}]},
        {"messages": [{"role": "critic", "content": "x"}]},
        {"prompt": "hello"},
        {"prompt": "hello"},
        "",
    )
    prompts, skipped = read_prompts(path)
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["hello"]
    assert skipped == Skipped({"empty": 2, "no user turn": 2, "unknown role 'critic'": 1, "repeated prompt": 1})
    assert "2 empty" in skipped.describe()
    assert Skipped().describe() == "none"


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"\n', ":2: broken JSON"),
        ('{"prompt": "a"}\n\n[1]\n', ":3: got list"),
        ('{"prompt": 3}\n', ":1: 'messages' is NoneType"),
        ('{"messages": "hi"}\n', ":1: 'messages' is str"),
        ('{"messages": ["hi"]}\n', ":1: a turn is"),
        ('{"messages": [{"role": "user", "content": 3}]}\n', ":1: the content of a user turn is int"),
        ('{"id": 1, "prompt": "a"}\n{"id": "1", "prompt": "b"}\n', ":2: id '1' is also the id of"),
        ("", "the file is empty"),
        ("\n\n", "the file is empty"),
        ('{"messages": []}\n', "no usable row in 1 lines (skipped: 1 empty)"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, content: str, where: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(InputError) as error:
        read_prompts(path)
    assert str(path) in str(error.value)
    assert where in str(error.value)
    assert "\n" not in str(error.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="could not be read"):
        read_prompts(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe9"}\n')
    with pytest.raises(InputError, match=r"latin.jsonl:2: not UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 50)[:-12])
    with pytest.raises(InputError, match="could not be read"):
        read_rows(tmp_path / "cut.jsonl.gz")
    packed = gzip.compress(json.dumps({"prompt": "abcdefgh" * 9}).encode())
    for place, content in (("plain", b'{"prompt": "a"}'), ("body", packed[:10] + b"\xff" * 9 + packed[19:])):
        (tmp_path / f"{place}.jsonl.gz").write_bytes(content)
        with pytest.raises(InputError, match=rf"{place}.jsonl.gz: could not be read"):
            read_rows(tmp_path / f"{place}.jsonl.gz")


def test_ids_without_an_id_do_not_move(tmp_path: Path) -> None:
    alone, _ = read_prompts(write(tmp_path / "a.jsonl", {"prompt": "x"}))
    later, _ = read_prompts(write(tmp_path / "b.jsonl", {"prompt": "y"}, {"prompt": "x"}))
    assert alone[0].id == later[1].id != later[0].id


def test_gzip_rows_with_exact_ids_come_as_they_are(tmp_path: Path) -> None:
    row = {"id": "a", "prompt_ids": [1], "output_ids": [2], "messages": turns("UA")}
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row).encode()))
    assert read_rows(path) == ([row], Skipped())


EXACT: dict[str, Any] = {"id": "a", "prompt_ids": [1], "output_ids": [2], "messages": turns("UA")}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"messages": None, "prompt_ids": None}, "has 'output_ids' but neither 'prompt_ids' nor 'messages'"),
        ({"output_ids": None}, "'output_ids' is null, expected a list of token ids"),
        ({"output_ids": "2"}, "'output_ids' is \"2\""),
        ({"output_ids": [2, "3"]}, "'output_ids' is [2, \"3\"]"),
        ({"prompt_ids": [1.0]}, "'prompt_ids' is [1.0]"),
        ({"prompt_ids": [], "messages": turns("U")}, "the turns do not end with an answer"),
        ({"messages": "hi"}, "'messages' is str"),
        ({"messages": [3]}, "a turn is 3"),
        ({"provenance": "me"}, "'provenance' is str, expected an object"),
        ({}, "id 'a' is also the id of"),
    ],
)
def test_bad_answered_rows_name_the_line(tmp_path: Path, change: dict[str, Any], what: str) -> None:
    path = write(tmp_path / "r.jsonl", EXACT, {**EXACT, **change})
    with pytest.raises(InputError) as error:
        read_rows(path)
    assert str(error.value).startswith(f"{path}:2: {what}")
    assert "\n" not in str(error.value)


def test_exact_rows_must_say_what_was_asked(tmp_path: Path) -> None:
    bare = {"id": "a", "output_ids": [2]}
    with pytest.raises(InputError, match=r"r\.jsonl:1: has 'output_ids' but neither"):
        read_rows(write(tmp_path / "r.jsonl", bare))
    for row in ({**bare, "prompt_ids": [1]}, {**bare, "messages": turns("UA")}):
        assert read_rows(write(tmp_path / "r.jsonl", row)) == ([row], Skipped())


def test_rows_without_an_id_stay_apart(tmp_path: Path) -> None:
    first, second = ({"id": None, "prompt_ids": [1], "output_ids": [ids]} for ids in (2, 3))
    chats = [{"messages": [*turns("U"), {"role": "assistant", "content": text}]} for text in ("x", "y")]
    rows, skipped = read_rows(write(tmp_path / "r.jsonl", first, second, first, *chats))
    assert len({row["id"] for row in rows}) == len(rows) == 4
    assert skipped == {"repeated row": 1}
    again, _ = read_rows(write(tmp_path / "s.jsonl", second))
    assert again[0]["id"] == rows[1]["id"]


def test_builtin_prompts_are_whole_and_apart() -> None:
    train, lost = read_prompts("builtin")
    held, lost_held = read_prompts("builtin-heldout")
    assert len(train) >= 600
    assert not lost
    assert not lost_held
    assert {prompt.category for prompt in train} == {prompt.category for prompt in held}
    assert len({prompt.category for prompt in train}) == 8
    texts = [{json.dumps(prompt.messages) for prompt in part} for part in (train, held)]
    assert not texts[0] & texts[1]
    assert not {prompt.id for prompt in train} & {prompt.id for prompt in held}
    assert len(builtin_files("builtin")) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a \\ud800 b"}', "half a character"),
        ('{"prompt": ' + "9" * 5000 + "}", "broken JSON"),
        ("[" * 100_000, "broken JSON"),
    ],
)
def test_json_that_is_no_text_is_one_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(InputError, match=f"p.jsonl:2: .*{message}"):
        read_prompts(write(tmp_path / "p.jsonl", {"prompt": "fine"}, line))


def test_pairs_of_halves_are_text(tmp_path: Path) -> None:
    prompts, _ = read_prompts(write(tmp_path / "p.jsonl", '{"prompt": "\\ud83d\\ude00"}'))
    assert prompts[0].messages[0]["content"] == "\U0001f600"


def test_an_id_of_null_is_no_id(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"id": None, "prompt": "one"}, {"id": None, "prompt": "two"})
    names = [prompt.id for prompt in read_prompts(path)[0]]
    assert len(set(names)) == 2
    assert "None" not in names


def test_content_in_parts_is_refused_beside_tool_calls_too(tmp_path: Path) -> None:
    parts = {"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [{"id": "1"}]}
    with pytest.raises(InputError, match=r"p\.jsonl:1: the content of a assistant turn is list"):
        read_prompts(write(tmp_path / "p.jsonl", {"messages": [*turns("U"), parts]}))


def test_a_row_without_an_answer_is_counted_as_that(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", {"messages": turns("U")}, {"messages": turns("S")}, {"messages": turns("UA")})
    assert read_rows(path)[1] == Skipped({"no answer": 1, "no user turn": 1})
