"""Suites: the shipped one, files of other people, and what is wrong with a row."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from specheads.evaluation.suites import load_suite
from specheads.utils import InputError

CATEGORIES = {"chat", "code", "math", "qa", "rag", "summarization", "translation", "writing"}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_heldout_has_the_eight_categories() -> None:
    suite = load_suite("heldout")
    assert {row.category for row in suite} == CATEGORIES
    assert {row.suite for row in suite} == {"heldout"}
    assert all(row.messages[-1]["role"] == "user" for row in suite)


def test_a_limit_is_even_and_always_the_same() -> None:
    whole, few = load_suite("heldout"), load_suite("heldout", per_category=3)
    assert Counter(row.category for row in few) == dict.fromkeys(CATEGORIES, 3)
    assert few == load_suite("heldout", per_category=3)
    assert [row for row in whole if row in few] == few, "the suite's order is kept"
    code = [row for row in whole if row.category == "code"]
    chosen = [row for row in few if row.category == "code"]
    assert chosen == [code[at * len(code) // 3] for at in range(3)]
    assert len(load_suite("heldout", per_category=10_000)) == len(whole)


def test_both_forms_of_a_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.jsonl",
        [
            {"id": "spec/81", "suite": "spec_bench", "category": "writing", "turns": ["Write.", "Again."]},
            {"id": 7, "category": "code", "messages": [{"role": "user", "content": "Sort."}]},
            {"id": "chat", "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "One?"},
                {"role": "assistant", "content": "1"},
                {"role": "user", "content": "Two?"},
                {"role": "assistant", "content": "dropped: the target answers itself"},
            ]},
        ],
    )  # fmt: skip
    first, second, third = load_suite(str(path))
    assert (first.suite, first.category, first.later_turns) == ("spec_bench", "writing", ("Again.",))
    assert first.messages == ({"role": "user", "content": "Write."},)
    assert (second.id, second.suite, second.category) == ("7", "mine", "code")
    assert third.category == "other"
    assert [turn["role"] for turn in third.messages] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"category": "x", "turns": ["a"]}, "'id' is None"),
        ({"id": "a", "turns": []}, "'turns' is"),
        ({"id": "a", "turns": ["x", 3]}, "'turns' is"),
        ({"id": "a", "turns": "text"}, "'turns' is"),
        ({"id": "a", "question": "?"}, r"keys \['id', 'question'\]"),
        ({"id": "a", "messages": [{"role": "user", "content": None}]}, "expected 'turns'"),
        ({"id": "a", "messages": [{"role": "user", "content": "  "}]}, "no user turn"),
        ({"id": "a", "messages": []}, "no user turn"),
    ],
)
def test_a_wrong_row_names_its_line(tmp_path: Path, row: Any, told: str) -> None:
    path = write(tmp_path / "s.jsonl", [{"id": "good", "turns": ["a"]}, row])
    with pytest.raises(InputError, match=told) as caught:
        load_suite(path)
    assert "s.jsonl:2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_errors_of_the_whole(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected 'heldout' or a JSONL file"):
        load_suite("held-out")
    with pytest.raises(InputError, match="the file is empty"):
        load_suite(write(tmp_path / "empty.jsonl", []))
    twice = write(tmp_path / "twice.jsonl", [{"id": 1, "turns": ["a"]}, {"id": "1", "turns": ["b"]}])
    with pytest.raises(InputError, match=r"twice.jsonl:2: id '1' is on line 1 too"):
        load_suite(twice)
    (tmp_path / "broken.jsonl").write_text('{"id": 1, "turns": ["a"]}\n{"id": \n', encoding="utf-8")
    with pytest.raises(InputError, match=r"broken.jsonl:2: broken JSON"):
        load_suite(tmp_path / "broken.jsonl")
    with pytest.raises(InputError, match="per_category: got 0"):
        load_suite("heldout", per_category=0)
