"""``specheads inspect`` of data: prompts are told as such, and what is wrong with answers is not passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specheads.jobs.inspect import inspect
from specheads.jobs.screen import NoScreen
from specheads.utils import InputError

ASKED = {"role": "user", "content": "say 1"}
SAID = {"role": "assistant", "content": "one"}


def looked_at(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return inspect(str(path), (), row=None, dry_run=False, screen=NoScreen())


def test_a_file_of_prompts_is_one(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    assert looked_at(path, [{"prompt": "hi"}, {"messages": [ASKED]}, {"messages": [{**ASKED, "role": "no"}]}]) == {
        "prompts": 2,
        "skipped": {"unknown role 'no'": 1},
    }
    with pytest.raises(InputError, match=r"prompts.jsonl:2: id 'a' is also the id"):
        looked_at(path, [{"id": "a", "messages": [ASKED]}, {"id": "a", "messages": [ASKED]}])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [ASKED], "output_ids": [1, "x"], "prompt_ids": [1]}, "'output_ids' is"),
        ({"messages": [ASKED], "output_ids": [1]}, "the turns do not end with an answer"),
        ({"messages": [ASKED, SAID], "provenance": 3}, "'provenance' is int"),
    ],
)
def test_a_broken_answer_is_not_taken_for_a_prompt(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        looked_at(tmp_path / "answers.jsonl", [row])
