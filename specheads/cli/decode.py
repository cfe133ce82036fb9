"""``specheads decode``: one prompt, one answer, and how it was made."""

from __future__ import annotations

from typing import Annotated

import typer

from specheads.cli.console import Console, print_json
from specheads.cli.options import Checkpoint, Json, Overrides


def run(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from stdin.")],
    overrides: Overrides = None,
    compare: Annotated[bool, typer.Option("--compare", help="Answer without the draft as well, and compare.")] = False,
    json: Json = False,
) -> None:
    """Answer one prompt with the draft, and show what it saved.

    Keys of the section decoding apply, such as decoding.drafter=lookup decoding.temperature=0.7.
    """
    import sys

    from specheads.build import load_checkpoint
    from specheads.jobs.talk import Talker

    console = Console(json)
    talker = Talker(load_checkpoint(checkpoint, overrides or ()))
    messages = [{"role": "user", "content": sys.stdin.read() if prompt == "-" else prompt}]
    answer = talker.answer(messages, show=not json, screen=console)
    if compare:
        talker.compare(messages, answer, console)
    if json:
        print_json(answer.as_json())
