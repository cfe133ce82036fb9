"""The engine and distillation: rows that depend on nothing but themselves, and a file that survives any kill."""

from __future__ import annotations

import errno
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.data.conversations import Prompt, Skipped
from specheads.data.engines import Answer, BatchedEngine, Request
from specheads.data.engines.batched import draw, uniforms
from specheads.data.generate import distill, finished_rows, plan, temperature_of
from specheads.data.tokenize import prompt_ids
from specheads.modules.kv_cache import KVCache
from specheads.sampling import probabilities
from specheads.types import SamplingParams
from specheads.utils import InputError
from tests.fakes import EOS_ID, Target, tiny_target

NEW = 8


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(eos_token_id=[EOS_ID, 9, 20, 31, 50])


@pytest.fixture(scope="module")
def finished(target: Target, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole file, written without interruption."""
    path = tmp_path_factory.mktemp("finished") / "out.jsonl"
    whole(target, path)
    return path.read_bytes()


def some_prompts(count: int = 9) -> list[Prompt]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    texts = [" ".join(letters[(at * 3 + step) % 26] for step in range(1 + at * 5 % 11)) for at in range(count)]
    return [Prompt(f"p{at}", "chat", ({"role": "user", "content": text},)) for at, text in enumerate(texts)]


def requests(target: Target, count: int = 9) -> list[Request]:
    return [
        Request(prompt.id, prompt_ids(target.tokenizer, prompt.messages), temperature=0.9 * (at % 2), seed=5)
        for at, prompt in enumerate(some_prompts(count))
    ]


def alone(target: Target, request: Request) -> Answer:
    """The slow plain way: one row, every step a whole forward without a cache, numbers by the documented law."""
    ids, numbers = list(request.prompt_ids), uniforms(request, NEW)
    new: list[int] = []
    while len(new) < NEW and (not new or new[-1] not in target.config.eos_ids):
        out = target.forward(torch.tensor([ids + new]))
        assert out.logits is not None
        logits = out.logits[0, -1]
        if request.temperature == 0:
            new.append(int(logits.argmax()))
        else:
            chances = probabilities(logits, SamplingParams(temperature=request.temperature, top_p=request.top_p))
            passed = chances.double().cumsum(0) > numbers[len(new)]
            new.append(int(passed.nonzero()[0]))
    return Answer(request.key, new, "stop" if new[-1] in target.config.eos_ids else "length")


@pytest.mark.parametrize("batch_size", [1, 2, 4, 32])
def test_text_depends_on_the_row_alone(target: Target, batch_size: int) -> None:
    asked = requests(target)
    engine = BatchedEngine(target, batch_size=batch_size, max_new_tokens=NEW)
    answers = {answer.key: answer for answer in engine.run(asked)}
    assert answers == {request.key: alone(target, request) for request in asked}
    assert {answer.finish for answer in answers.values()} == {"stop", "length"}  # both ends are seen
    backwards = {answer.key: answer for answer in engine.run(asked[::-1][:5])}
    assert backwards == {key: answers[key] for key in backwards}


def test_global_random_state_is_left_alone_and_seeds_matter(target: Target) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    engine = BatchedEngine(target, batch_size=4, max_new_tokens=NEW)
    hot = [Request(f"r{at}", [4, 7, 8], temperature=2.0, seed=at // 4) for at in range(8)]
    texts = Counter(tuple(answer.output_ids) for answer in engine.run(hot))
    assert len(texts) == 8  # same prompt, eight keys: eight texts
    assert torch.equal(torch.get_rng_state(), before)
    assert uniforms(Request("a", [1], seed=0), 3) != uniforms(Request("a", [1], seed=1), 3)
    assert uniforms(Request("a", [1]), 3) == uniforms(Request("a", [1]), 5)[:3]


def test_draw_follows_the_weights_and_never_takes_weight_zero() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    ids = [
        int(draw(weights, torch.tensor([number], dtype=torch.float64))) for number in (0.0, 0.2, 0.25, 0.7, 0.75, 1.0)
    ]
    assert ids == [1, 1, 3, 3, 4, 4]
    grid = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    counts = draw(weights.expand(1000, 6), grid).bincount(minlength=6)
    assert counts.tolist() == [0, 250, 0, 500, 250, 0]


def test_sampled_rows_follow_the_targets_law(target: Target) -> None:
    ids = [4, 7, 8]
    engine = BatchedEngine(target, batch_size=500, max_new_tokens=1)
    drawn = [
        answer.output_ids[0] for answer in engine.run([Request(f"r{at}", ids, temperature=1.0) for at in range(4000)])
    ]
    out = target.forward(torch.tensor([ids]))
    assert out.logits is not None
    law = probabilities(out.logits[0, -1], SamplingParams(temperature=1.0))
    seen = torch.bincount(torch.tensor(drawn), minlength=len(law)) / 4000
    noise = float((2 * law * (1 - law) / (3.1416 * 4000)).sqrt().sum() / 2)  # expected total variation of a fair draw
    assert float((seen - law).abs().sum() / 2) < 1.6 * noise


def test_cache_rows_move_whole() -> None:
    cache, other = KVCache(2, 3, 1, 8, 2, torch.float32), KVCache(2, 2, 1, 5, 2, torch.float32)
    cache.storage.normal_(), other.storage.normal_()
    cache.lengths, cache.width = torch.tensor([4, 7, 2]), 7
    other.lengths, other.width = torch.tensor([5, 3]), 5
    kept = cache.storage[:, :, 0].clone()
    cache.put(torch.tensor([1, 2]), other)
    assert cache.lengths.tolist() == [4, 5, 3]
    assert cache.width == 5
    assert torch.equal(cache.storage[:, :, 1:, :, :5], other.storage)
    assert torch.equal(cache.storage[:, :, 0], kept)
    few = cache.select(torch.tensor([2, 0]))
    assert few.lengths.tolist() == [3, 4]
    assert few.width == 4
    assert torch.equal(few.storage, cache.storage[:, :, [2, 0]])
    few.clear(torch.tensor([1]))
    assert (few.lengths.tolist(), few.width) == ([3, 0], 3)
    with pytest.raises(ValueError, match="cannot take rows"):
        KVCache(2, 1, 1, 3, 2, torch.float32).put(
            torch.tensor([0]), few.select(torch.tensor([0, 0])) if False else other
        )


def whole(target: Target, path: Path, **options: Any) -> dict[str, str]:
    """Distil to the end; the file's rows by id, as text, the date aside."""
    distill(target, some_prompts(), path, max_new_tokens=NEW, batch_size=3, answers_per_prompt=2, **options)
    return rows_of(path.read_bytes())


def rows_of(raw: bytes) -> dict[str, str]:
    rows = {}
    for line in raw.splitlines():
        row = json.loads(line)
        row["provenance"].pop("date")
        assert row["id"] not in rows, "a row was written twice"
        rows[row["id"]] = json.dumps(row, sort_keys=True)
    return rows


def test_rows_say_where_they_come_from(target: Target, tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []
    report = distill(
        target,
        some_prompts(4),
        tmp_path / "deep" / "out.jsonl",
        max_new_tokens=NEW,
        batch_size=2,
        answers_per_prompt=2,
        seed=7,
        progress=lambda *numbers: seen.append(numbers),
    )
    rows = {row["id"]: row for row in map(json.loads, (tmp_path / "deep" / "out.jsonl").read_text().splitlines())}
    assert sorted(rows) == ["p0", "p0#1", "p1", "p1#1", "p2", "p2#1", "p3", "p3#1"]
    pairs = [(rows[name]["temperature"], rows[f"{name}#1"]["temperature"]) for name in ("p0", "p1", "p2", "p3")]
    assert all(set(pair) == {0.0, 0.8} for pair in pairs), "both have their turn"
    row = rows["p1#1"]
    assert row["prompt_id"] == "p1"
    assert row["prompt_ids"] == prompt_ids(target.tokenizer, some_prompts()[1].messages)
    assert row["messages"][-1] == {
        "role": "assistant",
        "content": target.tokenizer.decode(row["output_ids"], skip_special_tokens=True),
    }
    assert row["finish"] == ("stop" if row["output_ids"][-1] in target.config.eos_ids else "length")
    origin = row["provenance"]
    assert (origin["model"], origin["fingerprint"]) == (target.config.name, target.config.fingerprint)
    assert (origin["temperature"], origin["top_p"], origin["seed"], origin["max_new_tokens"]) == (0.8, 1.0, 7, NEW)
    assert {"template", "date"} <= set(origin)
    tokens = sum(len(row["output_ids"]) for row in rows.values())
    assert (report.rows, report.tokens, report.reused) == (8, tokens, 0)
    assert report.tokens_per_s > 0
    assert [numbers[:2] for numbers in seen] == [(at, 8) for at in range(1, 9)]
    assert seen[-1][2] == tokens


class Killed(Exception):
    pass


@pytest.mark.parametrize("after", [1, 5, 17])
def test_kill_between_rows(target: Target, finished: bytes, tmp_path: Path, after: int) -> None:
    def kill(done: int, _total: int, _tokens: int) -> None:
        if done == after:
            raise Killed

    with pytest.raises(Killed):
        whole(target, tmp_path / "a.jsonl", progress=kill)
    before = rows_of((tmp_path / "a.jsonl").read_bytes())
    assert len(before) == after
    done: list[int] = []
    again = whole(target, tmp_path / "a.jsonl", progress=lambda count, _total, _tokens: done.append(count))
    assert done[0] == after + 1
    assert again == rows_of(finished)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_kill_at_any_byte_keeps_what_was_finished(
    finished: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "kept.jsonl"
    cut = data.draw(st.integers(0, len(finished)))
    path.write_bytes(finished[:cut])
    kept = finished_rows(path)
    lines = finished.splitlines(keepends=True)
    whole_lines = sum(len(b"".join(lines[: at + 1])) - 1 <= cut for at in range(len(lines)))  # the line feed may lack
    assert len(kept) == whole_lines
    assert path.read_bytes() == b"".join(lines[:whole_lines])


@pytest.mark.parametrize("share", [0.0, 0.13, 0.5, 0.97, 1.0])
def test_kill_at_a_byte_and_again(target: Target, finished: bytes, tmp_path: Path, share: float) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(finished[: int(share * len(finished))])
    assert whole(target, path) == rows_of(finished)


def test_finished_file_is_reused_without_a_forward(target: Target, finished: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(finished)
    stamp = (tmp_path / "a.jsonl").stat()
    report = distill(target, some_prompts(), tmp_path / "a.jsonl", max_new_tokens=NEW, answers_per_prompt=2)
    assert (report.rows, report.reused, report.tokens_per_s) == (0, 18, 0.0)
    assert (tmp_path / "a.jsonl").read_bytes() == finished
    assert (tmp_path / "a.jsonl").stat().st_mtime_ns == stamp.st_mtime_ns


@pytest.mark.parametrize(
    "change", [{"temperatures": (0.5,)}, {"top_p": 0.9}, {"seed": 1}, {"max_new_tokens": NEW + 1}, {"prompts": "other"}]
)
@pytest.mark.parametrize("with_ids", [True, False])
def test_rows_of_other_settings_are_answered_again(
    target: Target, tmp_path: Path, change: dict[str, Any], with_ids: bool
) -> None:
    path, prompts = tmp_path / "a.jsonl", some_prompts(3)
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperatures": (0.0,)}
    distill(target, some_prompts(4), path, **options)  # one row more than is asked for later: it stays
    if not with_ids:
        rows = [{**json.loads(line), "prompt_ids": None} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert distill(target, prompts, path, **options).reused == 3
    if "prompts" in change:
        prompts[1] = Prompt("p1", "chat", ({"role": "user", "content": "z z"},))
        stale = 1
    else:
        options |= change
        stale = 3
    report = distill(target, prompts, path, **options)
    assert (report.rows, report.replaced, report.reused) == (stale, stale, 3 - stale)
    assert sorted(rows_of(path.read_bytes())) == ["p0", "p1", "p2", "p3"]
    again = distill(target, prompts, path, **options)
    assert (again.rows, again.replaced, again.reused) == (0, 0, 3)


def test_answers_never_share_a_name(target: Target, tmp_path: Path) -> None:
    first, second = some_prompts(2)
    prompts = [first, Prompt("p0#1", "chat", second.messages)]
    assert distill(target, prompts, tmp_path / "a.jsonl", max_new_tokens=2).rows == 2
    with pytest.raises(InputError, match="two answers would be named 'p0#1'"):
        distill(target, prompts, tmp_path / "b.jsonl", max_new_tokens=2, answers_per_prompt=2)


def test_an_old_row_stands_until_the_new_one_is_written(target: Target, finished: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(finished)

    def kill(done: int, _total: int, _tokens: int) -> None:
        if done == 5:
            raise Killed

    with pytest.raises(Killed):
        whole(target, path, seed=1, progress=kill)
    seeds = Counter(json.loads(row)["provenance"]["seed"] for row in rows_of(path.read_bytes()).values())
    assert seeds == {0: 13, 1: 5}
    path.write_bytes(finished + path.read_bytes())  # a kill so hard that the old lines could not be taken out
    whole(target, path, seed=1)
    whole(target, tmp_path / "fresh.jsonl", seed=1)
    assert rows_of(path.read_bytes()) == rows_of((tmp_path / "fresh.jsonl").read_bytes())


def test_rows_name_the_revision_where_there_is_one(target: Target, tmp_path: Path) -> None:
    for commit in (None, "abc123"):
        path = tmp_path / f"{commit}.jsonl"
        distill(target, some_prompts(1), path, max_new_tokens=2, revision=commit)
        assert json.loads(path.read_text())["provenance"].get("revision") == commit


def test_a_torn_emoji_is_a_torn_line(tmp_path: Path) -> None:
    row = {"id": "a", "output_ids": [1], "provenance": {}, "messages": "é"}
    line = json.dumps(row, ensure_ascii=False).encode()
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b"\n" + line.replace(b'"a"', b'"b"')[: line.index("é".encode()) + 1])
    assert list(finished_rows(path)) == ["a"]
    assert path.read_bytes() == line + b"\n"
    path.write_bytes(line)  # whole, but the line feed was not written any more
    assert list(finished_rows(path)) == ["a"]
    assert path.read_bytes() == line + b"\n"


def test_foreign_files_are_refused_and_left_alone(target: Target, finished: bytes, tmp_path: Path) -> None:
    path, raw = tmp_path / "a.jsonl", finished
    path.write_bytes(raw)
    with pytest.raises(InputError, match="fingerprint"):
        distill(tiny_target(seed=1), some_prompts(), path, max_new_tokens=NEW)
    edited = tiny_target(eos_token_id=[EOS_ID, 9, 20, 31, 50])
    edited.tokenizer.chat_template += " "
    with pytest.raises(InputError, match="template"):
        distill(edited, some_prompts(), path, max_new_tokens=NEW)
    assert path.read_bytes() == raw
    for content, line in ((b'{"id": "a"\n' + raw, 1), (raw.splitlines()[0] + b'\n{"prompt": "mine"}\n', 2)):
        path.write_bytes(content)
        with pytest.raises(InputError, match=f"a.jsonl:{line}: "):
            distill(target, some_prompts(), path, max_new_tokens=NEW)
        assert path.read_bytes() == content


def test_long_prompts_and_bad_numbers(target: Target, tmp_path: Path) -> None:
    prompts = some_prompts(6)
    longest = max(len(prompt_ids(target.tokenizer, prompt.messages)) for prompt in prompts)
    report = distill(target, prompts, tmp_path / "a.jsonl", max_new_tokens=2, max_prompt_tokens=longest - 1)
    assert report.skipped == {f"prompt longer than {longest - 1} tokens": 1}
    assert report.rows == 5
    limit = target.config.context_limit
    report = distill(target, prompts, tmp_path / "b.jsonl", max_new_tokens=limit - longest + 1)
    assert report.skipped.total() == 1  # the context limit holds prompt and answer together
    greedy_twice = {"temperatures": (0.0,), "answers_per_prompt": 2}
    for bad in ({"engine": "magic"}, {"batch_size": 0}, {"temperatures": ()}, {"temperatures": (-1.0,)}, greedy_twice):
        with pytest.raises(InputError, match="expected"):
            distill(target, prompts, tmp_path / "c.jsonl", **bad)  # type: ignore[arg-type]


def test_full_disk_is_one_line_and_loses_nothing(
    target: Target, finished: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, written = tmp_path / "a.jsonl", []
    dumps = json.dumps

    def full(value: Any, **options: Any) -> str:
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(value["id"])
        return dumps(value, **options)

    with monkeypatch.context() as patch:
        patch.setattr("specheads.data.generate.json.dumps", full)
        with pytest.raises(InputError, match="No space left"):
            whole(target, path)
    assert sorted(rows_of(path.read_bytes())) == sorted(written)
    assert whole(target, path) == rows_of(finished)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(InputError, match=r"folder.jsonl"):
        distill(target, some_prompts(), tmp_path / "folder.jsonl", max_new_tokens=NEW)


def test_no_prompt_is_answered_greedily_twice() -> None:
    """Three answers with two temperatures: one greedy and two sampled, whichever comes first."""
    for prompt in range(4):
        turns = [temperature_of((0.0, 0.8), prompt, answer) for answer in range(3)]
        assert sorted(turns) == [0.0, 0.8, 0.8]
    assert [temperature_of((0.0, 0.5, 0.9), 0, answer) for answer in range(7)] == [0.0, 0.5, 0.9, 0.9, 0.5, 0.9, 0.5]


def test_answers_that_exist_elsewhere_are_counted_on(tmp_path: Path, target: Target) -> None:
    path = tmp_path / "a.jsonl"
    prompts = some_prompts()
    distill(target, prompts, path, max_new_tokens=NEW, answered={prompts[0].id: 2})
    rows = {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert f"{prompts[0].id}#2" in rows
    assert prompts[0].id not in rows
    assert rows[f"{prompts[0].id}#2"]["temperature"] == 0.8
    assert prompts[1].id in rows


def test_a_context_without_room_is_said_before_anything_is_written(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    limit = target.config.context_limit
    with pytest.raises(InputError, match=f"max_new_tokens: got {limit}.*context limit of {limit}"):
        distill(target, some_prompts(2), out, max_new_tokens=limit)
    with pytest.raises(InputError, match=r"none of 2 can be answered .*2 prompt longer than 1 tokens"):
        distill(target, some_prompts(2), out, max_new_tokens=NEW, max_prompt_tokens=1)
    assert not out.exists()


def test_a_prompt_put_on_top_leaves_the_other_answers_alone(target: Target, finished: bytes, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(finished)
    new = Prompt("new", "chat", ({"role": "user", "content": "g h"},))
    options = {"max_new_tokens": NEW, "batch_size": 3, "answers_per_prompt": 2}
    report = distill(target, [new, *some_prompts()], path, **options)
    assert (report.rows, report.replaced) == (2, 0)
    assert path.read_bytes().startswith(finished)


def test_greedy_and_sampled_rows_mix(target: Target) -> None:
    skipped = Skipped()
    options = {"temperatures": (0.0, 0.8), "answers_per_prompt": 1, "answered": {}, "max_prompt_tokens": 99}
    wanted = plan(target, some_prompts(40), **options, top_p=1.0, seed=0, skipped=skipped)
    greedy = sum(request.temperature == 0 for _, request in wanted.values())
    assert 12 <= greedy <= 28
