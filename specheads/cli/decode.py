"""``specheads decode``: one prompt, one answer, and how it was made."""

from __future__ import annotations

from typing import Annotated

import typer

from specheads.cli.console import Console
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
    from specheads.utils import InputError

    console = Console(json)
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise InputError(f"stdin: not text ({error.reason}), expected UTF-8; save the prompt as UTF-8") from error
    messages = [{"role": "user", "content": text}]
    talker = Talker(load_checkpoint(checkpoint, overrides or ()))
    answer = talker.answer(messages, show=not json, screen=console)
    if compare:
        talker.compare(messages, answer, console)
    if json:
        console.json(answer.as_json())
