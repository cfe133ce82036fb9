"""``specheads chat``: a conversation with the target, drafted by a checkpoint."""

from __future__ import annotations

import sys

from specheads.cli.console import Console
from specheads.cli.options import Checkpoint, Overrides
from specheads.utils import InputError


def run(checkpoint: Checkpoint, overrides: Overrides = None) -> None:
    """Talk to the target; the draft only changes how fast it answers.

    /new starts a new conversation, /quit (or Ctrl-D) leaves. Keys of the section decoding apply.
    """
    from specheads.build import load_checkpoint
    from specheads.jobs.talk import Talker

    console = Console()
    talker = Talker(load_checkpoint(checkpoint, overrides or ()))
    console.line(talker.loaded.target.describe())
    console.line("Type a message; /new forgets the conversation, /quit leaves.")
    messages: list[dict[str, str]] = []
    while (text := _read()) is not None:
        if text == "/quit":
            break
        if text == "/new":
            messages = []
            console.line("(new conversation)")
        elif text:
            messages.append({"role": "user", "content": text})
            try:
                answer = talker.answer(messages, show=True, screen=console)
            except InputError as error:  # such as a full context: the conversation so far stands
                console.line(str(error))
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer.text})


def _read() -> str | None:
    """The next message; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise InputError(f"stdin: not text ({error.reason}), expected UTF-8; set the terminal to UTF-8") from error
