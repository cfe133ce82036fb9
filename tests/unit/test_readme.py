"""Every command of the README exists and parses; every file that its tree names is there."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest
import typer.main

from specheads import cli
from specheads.config.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
pytestmark = pytest.mark.skipif(not README.exists(), reason="this tree has no README")


def blocks() -> list[str]:
    return re.findall(
        r"^```(?:bash|sh|console|text)?\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def commands() -> list[list[str]]:
    """Command lines of the code blocks (a leading ``$`` is the prompt, ``\\`` joins lines, ``#`` starts a comment)."""
    found = []
    for block in blocks():
        for line in block.replace("\\\n", " ").splitlines():
            text = line.strip().removeprefix("$ ")
            if re.match(r"(specheads|python -m specheads|bash scripts/|accelerate launch)\b", text):
                found.append(shlex.split(text, comments=True))
    return found


def of_specheads(words: list[str]) -> list[str] | None:
    """The arguments of ``specheads`` in a command, None where it is another program."""
    if words[0] == "specheads":
        return words[1:]
    for place in range(len(words) - 1):
        if words[place : place + 2] == ["-m", "specheads"]:
            return words[place + 2 :]
    return None


def test_there_are_commands() -> None:
    assert len(commands()) >= 2


@pytest.mark.parametrize("words", commands() if README.exists() else [], ids=" ".join)
def test_commands_parse(words: list[str]) -> None:
    for name, value in itertools.pairwise(words):
        if name == "--config_file":
            assert (ROOT / value).is_file()
    if words[0] == "bash":
        assert (ROOT / words[1]).is_file()
    arguments = of_specheads(words)
    if words[0] == "bash" and words[1].endswith("quickstart.sh"):
        arguments = ["quickstart", *words[2:]]
    if not arguments or arguments == ["--help"]:
        return
    group = typer.main.get_command(cli.app)
    command = group.commands[arguments[0]]  # type: ignore[attr-defined]
    command.make_context(arguments[0], list(arguments[1:]), resilient_parsing=False)
    if len(arguments) > 1 and arguments[1].endswith(".yaml"):
        load_recipe(ROOT / arguments[1], [word for word in arguments[2:] if "=" in word and not word.startswith("-")])
