"""The command line: help is a quick table of contents, errors are one line, JSON stands alone on stdout."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from specheads import cli
from specheads.cli.console import Console, clock, describe
from specheads.utils import InputError

VERBS = ("quickstart", "generate", "inspect", "train", "evaluate", "decode", "chat", "export")
RECIPE = "recipes/smollm2-135m/eagle3.yaml"
ROOT = Path(__file__).resolve().parents[2]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments), prog_name="specheads")


def one_line(result: Any) -> str:
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.output
    return lines[0]


def test_help_lists_the_verbs_in_the_order_of_work() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    places = [result.stdout.index(f" {verb} ") for verb in VERBS]
    assert places == sorted(places)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_its_own_file(verb: str) -> None:
    result = invoke(verb, "--help")
    assert result.exit_code == 0
    assert "Usage: specheads " + verb in result.stdout
    assert (ROOT / "specheads" / "cli" / f"{verb}.py").is_file()


def test_help_does_not_load_heavy_modules() -> None:
    code = "import sys, specheads.cli; print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_python_dash_m_is_the_same_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specheads", "train", "no-such.yaml"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: recipe: no-such.yaml does not exist")
    assert done.stderr.count("\n") == 1


def test_wrong_input_is_one_line_and_exit_code_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = invoke("train", RECIPE, "trainig.minutes=3")
    assert result.exit_code == 2
    assert "nearest right key is training" in one_line(result)
    result = invoke("inspect", str(tmp_path / "none.jsonl"))
    assert result.exit_code == 2
    one_line(result)
    result = invoke("quickstart", "--head", "hydra", "--output", str(tmp_path))
    assert result.exit_code == 2
    assert "expected eagle3 or medusa" in one_line(result)


@pytest.mark.parametrize("verb", ["evaluate", "decode", "chat", "export", "inspect"])
def test_a_missing_checkpoint_is_one_line(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    more = {"decode": ["hello"], "export": ["--format", "native", "--out", str(tmp_path / "out")]}
    result = invoke(verb, str(tmp_path / "nothing"), *more.get(verb, []))
    assert result.exit_code == 2, result.output
    assert "nothing" in one_line(result)


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specheads.config.load.load_recipe", stopped)
    result = invoke("train", RECIPE)
    assert result.exit_code == 130
    assert "same command" in one_line(result)


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("specheads.config.load.load_recipe", broken)
    assert isinstance(invoke("train", RECIPE).exception, ZeroDivisionError)


def test_an_error_text_with_line_breaks_is_still_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise InputError("first\nsecond")

    monkeypatch.setattr("specheads.config.load.load_recipe", refused)
    assert one_line(invoke("train", RECIPE)) == "error: first second"


def test_json_leaves_stdout_to_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "messages": [{"role": "user", "content": "hi"}]}) + "\n")
    result = invoke("inspect", str(prompts), "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["prompts"] == 1
    assert "prompts, not answered yet" in result.stderr


def test_console_is_quiet_and_line_based_off_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("specheads.cli.console.time.perf_counter", lambda: now[0])
    stream = io.StringIO()
    console = Console(stream=stream)
    with console.stage("training") as progress:
        for step in range(100):
            now[0] = step * 0.5
            progress(step, 100, loss=2.0 - step / 100, tokens=step * 100)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5  # every ten seconds of fifty, and the end
    assert lines[0].startswith("training: 20%")
    assert "200 tokens/s" in lines[0]
    assert "time left 0:40" in lines[0]
    assert lines[-1].startswith("training: done in 0:50")
    assert "\x1b" not in stream.getvalue()


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    stream = io.StringIO()
    console = Console(stream=stream)
    console.line("hello")
    with console.stage("x") as progress:
        progress(1, 2)
    console.table(["a"], [[1]])
    assert stream.getvalue() == ""


def test_a_chat_goes_on_after_a_message_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    class Picky:
        def __init__(self, loaded: Any) -> None:
            self.loaded = loaded

        def answer(self, messages: list[dict[str, str]], show: bool, screen: Any) -> Any:
            asked.append([message["content"] for message in messages])
            if messages[-1]["content"] == "long":
                raise InputError("conversation: too long")
            return SimpleNamespace(text="yes")

    loaded = SimpleNamespace(target=SimpleNamespace(describe=lambda: "a target"))
    monkeypatch.setattr("specheads.build.load_checkpoint", lambda *_: loaded)
    monkeypatch.setattr("specheads.jobs.talk.Talker", Picky)
    result = CliRunner().invoke(cli.app, ["chat", "somewhere"], input="one\nlong\ntwo\n")
    assert result.exit_code == 0, result.output
    assert "conversation: too long" in result.output
    assert asked == [["one"], ["one", "yes", "long"], ["one", "yes", "two"]]


def test_a_conversation_that_cannot_be_asked_is_wrong_input() -> None:
    from specheads.jobs.talk import Talker
    from tests.fakes import tiny_target

    target = tiny_target(bytes_tokenizer=True)
    target.tokenizer.chat_template = "{{ raise_exception('no') }}"
    talker = Talker.__new__(Talker)
    talker.loaded = SimpleNamespace(target=target)  # type: ignore[assignment]
    with pytest.raises(InputError, match="conversation: refused by the chat template"):
        talker.ids([{"role": "user", "content": "hi"}])


def test_numbers_are_short() -> None:
    assert clock(7) == "0:07"
    assert clock(3723) == "1:02:03"
    assert describe({"loss": 2.34567, "tokens_per_s": 1234.5, "acceptance": None, "step": 7}) == (
        "loss 2.35  1,234 tokens/s  step 7"
    )


def test_no_console_script_is_forgotten() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert 'specheads = "specheads.cli:main"' in text
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "bash scripts/test.sh"


def test_brackets_in_a_table_are_text() -> None:
    stream = io.StringIO()
    Console(stream=stream).table(["", ""], [("name", "[red]it[/red] [/nothing]")], title="run [1]")
    assert "[red]it[/red] [/nothing]" in stream.getvalue()
    assert "run [1]" in stream.getvalue()
