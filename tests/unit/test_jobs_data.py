"""From prompts to rows: nothing is lost in silence, a prompt stays on one side, other targets' answers are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specheads.config.load import recipe_of
from specheads.config.schema import Recipe
from specheads.data.tokenize import Encoded
from specheads.jobs.data import answers_file, encode, features, gather_rows, hold_out, limit
from specheads.jobs.generate import generate
from specheads.jobs.screen import NoScreen
from specheads.target.adapter import Target
from specheads.utils import InputError, spread
from tests.fakes import tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(bytes_tokenizer=True)


def recipe(tmp_path: Path, *overrides: str) -> Recipe:
    prompts = tmp_path / "prompts.jsonl"
    if not prompts.exists():
        rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"say {i}"}]} for i in range(6)]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    base: dict[str, Any] = {
        "data": {"prompts": str(prompts), "max_new_tokens": 8, "batch_size": 4, "heldout_rows": 2, "max_length": 80},
        "head": {"type": "medusa"},
        "training": {"max_steps": 1},
        "output_dir": str(tmp_path / "run"),
    }
    return recipe_of(base, overrides)


def encoded(name: str, length: int = 4, prompt: str | None = None) -> Encoded:
    return Encoded(name, prompt or name, "chat", [1] * length, [True] * length)


def test_the_target_answers_everything_once(tmp_path: Path, target: Target) -> None:
    plan = recipe(tmp_path)
    rows = gather_rows(plan, target, NoScreen())
    assert len(rows.train) + len(rows.heldout) == 6
    assert rows.report["written"]["rows"] == 6
    before = answers_file(plan).read_bytes()
    again = gather_rows(plan, target, NoScreen())
    assert answers_file(plan).read_bytes() == before
    assert [row.input_ids for row in again.train] == [row.input_ids for row in rows.train]


def test_answers_carry_the_revision_of_the_recipe(tmp_path: Path, target: Target) -> None:
    plan = recipe(tmp_path, "target.revision=v1")
    gather_rows(plan, target, NoScreen())
    rows = map(json.loads, answers_file(plan).read_text().splitlines())
    assert {row["provenance"]["revision"] for row in rows} == {"v1"}


def test_generate_answers_the_chosen_prompts(tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specheads.jobs.generate.build_target", lambda section: target)
    for wanted, rows in (("data.live_rows=2", 2), ("data.answers=builtin", 6)):  # asked by name, it always writes
        output = tmp_path / f"{rows}.jsonl"
        told = generate(recipe(tmp_path, wanted), str(output), NoScreen())
        assert (told["rows"], told["reused"], told["replaced"]) == (rows, 0, 0)
        assert len(output.read_text().splitlines()) == rows


def test_live_answers_are_further_samples_beside_a_file(tmp_path: Path, target: Target) -> None:
    first = recipe(tmp_path, f"output_dir={tmp_path / 'first'}")
    gather_rows(first, target, NoScreen())
    both = recipe(tmp_path, f"data.answers={answers_file(first)}", "data.live_rows=2", "data.max_new_tokens=5")
    rows = gather_rows(both, target, NoScreen())
    assert rows.report["read"]["rows"] == 6
    assert rows.report["written"]["rows"] == 2
    assert len(rows.train) + len(rows.heldout) == 8
    again = gather_rows(both, target, NoScreen())  # what a continued run does
    assert len(again.train) + len(again.heldout) == 8


def test_answers_of_another_target_are_refused(tmp_path: Path, target: Target) -> None:
    first = recipe(tmp_path, f"output_dir={tmp_path / 'first'}")
    gather_rows(first, target, NoScreen())
    other = tiny_target(seed=1, bytes_tokenizer=True)
    with pytest.raises(InputError, match=r"was written by .*data\.answers=null"):
        gather_rows(recipe(tmp_path, f"data.answers={answers_file(first)}"), other, NoScreen())


def test_no_answers_ship_for_other_targets(tmp_path: Path, target: Target) -> None:
    with pytest.raises(InputError, match="no answers ship for the target mine"):
        gather_rows(recipe(tmp_path, "data.answers=builtin", "target.name=mine"), target, NoScreen())


def test_cached_and_online_features_are_the_same(tmp_path: Path, target: Target) -> None:
    plan = recipe(tmp_path)
    rows = gather_rows(plan, target, NoScreen())
    online = plan.model_copy(update={"data": plan.data.model_copy(update={"features": "online"})})
    cached_train, cached_held = features(plan, target, rows, (0, 2), NoScreen())
    online_train, online_held = features(online, target, rows, (0, 2), NoScreen())
    assert len(cached_held) == len(online_held) == len(rows.heldout)
    for left, right in zip(cached_train.rows([0, 1]), online_train.rows([0, 1]), strict=True):
        assert left.input_ids.tolist() == right.input_ids.tolist()
        assert (left.states - right.states).abs().max() < 1e-4


def test_hold_out_keeps_the_answers_of_a_prompt_together() -> None:
    rows = [encoded(f"p{i}{suffix}", prompt=f"p{i}") for i in range(8) for suffix in ("", "#1")]
    train, held = hold_out(rows, 4)
    assert len(held) == 4
    assert {row.id.partition("#")[0] for row in train}.isdisjoint(row.id.partition("#")[0] for row in held)
    assert sorted(row.id for row in train + held) == sorted(row.id for row in rows)
    shuffled_train, shuffled_held = hold_out(rows[::-1], 4)
    assert {row.id for row in shuffled_held} == {row.id for row in held}
    assert len(shuffled_train) == len(train)


def test_hold_out_takes_prompt_ids_as_they_are() -> None:
    train, held = hold_out([encoded("mt#1"), encoded("mt#2")], 1)  # a user's ids: two prompts, not one
    assert {row.id for row in train + held} == {"mt#1", "mt#2"}
    assert len(held) == 1


def test_rows_of_a_file_without_ids_are_all_used(tmp_path: Path, target: Target) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt_ids": [5, at], "output_ids": [7, 8]}) + "\n" for at in range(6, 10)))
    rows = gather_rows(recipe(tmp_path, f"data.answers={path}"), target, NoScreen())
    assert len(rows.train) + len(rows.heldout) == 4


def test_other_settings_are_answered_again_and_counted(tmp_path: Path, target: Target) -> None:
    gather_rows(recipe(tmp_path), target, NoScreen())
    again = gather_rows(recipe(tmp_path, "data.max_new_tokens=5"), target, NoScreen())
    assert again.report["written"] == {"rows": 6, "replaced": 6, "skipped": {}}


def test_hold_out_leaves_something_to_train_on() -> None:
    train, held = hold_out([encoded("a"), encoded("b")], 50)
    assert len(train) == len(held) == 1
    with pytest.raises(InputError, match="expected 2 or more"):
        hold_out([encoded("a")], 1)


def test_limit_counts_what_it_leaves_out() -> None:
    rows = [encoded(str(i), length=10) for i in range(10)]
    kept, left_out = limit(rows, 35)
    assert (len(kept), left_out) == (3, 7)
    assert limit(rows, 5)[1] == 9  # one row at least
    assert limit(rows, None)[1] == 0


def test_spread_reaches_over_the_whole_list() -> None:
    assert spread(list(range(10)), 5) == [0, 2, 4, 6, 8]
    assert spread([1, 2], 5) == spread([1, 2], None) == [1, 2]
    assert spread([], 3) == []


def test_rows_of_earlier_settings_do_not_join(tmp_path: Path, target: Target) -> None:
    gather_rows(recipe(tmp_path, "data.samples_per_prompt=2"), target, NoScreen())
    rows = gather_rows(recipe(tmp_path), target, NoScreen())
    assert len(answers_file(recipe(tmp_path)).read_text().splitlines()) == 12
    assert sorted(row.id for row in [*rows.train, *rows.heldout]) == [f"p{at}" for at in range(6)]


def test_no_row_is_longer_than_the_context(tmp_path: Path) -> None:
    small = tiny_target("gpt2", bytes_tokenizer=True, max_position_embeddings=40)
    plan = recipe(tmp_path, "data.max_length=512", "data.max_new_tokens=2")
    rows = {
        "long": {"id": "long", "prompt_ids": [5] * 10, "output_ids": [6] * 50},
        "short": {"id": "short", "prompt_ids": [5] * 10, "output_ids": [6] * 5},
    }
    encoded_rows = encode(plan, small, rows, {}, NoScreen())
    assert sorted(len(row.input_ids) for row in [*encoded_rows.train, *encoded_rows.heldout]) == [15, 40]
    features(plan, small, encoded_rows, (0, 1), NoScreen())


def test_a_quickstarts_own_answers_to_earlier_prompts_stay_out(tmp_path: Path, target: Target) -> None:
    gather_rows(recipe(tmp_path), target, NoScreen())
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:4]))
    plan = recipe(tmp_path, f"data.answers={answers_file(recipe(tmp_path))}", "data.live_rows=0")
    rows = gather_rows(plan, target, NoScreen())
    assert sorted(row.id for row in [*rows.train, *rows.heldout]) == ["p0", "p1", "p2", "p3"]
