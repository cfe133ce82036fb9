"""The command line: one thin verb per file, each of which calls floor 7. Heavy imports happen inside the verbs."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from specheads.cli.console import report_error
from specheads.utils import InputError

CONTINUED = ("quickstart", "generate", "train")  # verbs that take up what an interrupted run left


class Verbs(TyperGroup):
    """Turns the two ends of a run that are no bugs into one line: wrong input (exit 2) and Ctrl-C (exit 130)."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except InputError as error:
            report_error(str(error))
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            goes_on = ctx.invoked_subcommand in CONTINUED
            report_error("stopped" + ("; the same command again continues from what is written" if goes_on else ""))
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train a draft head for a frozen language model, measure the speed-up, ship the checkpoint.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _register() -> None:
    from specheads.cli import chat, decode, evaluate, export, generate, inspect, quickstart, train

    for verb in (quickstart, generate, inspect, train, evaluate, decode, chat, export):
        app.command(name=verb.__name__.rpartition(".")[2])(verb.run)


_register()


def main() -> None:
    """Entry point of ``specheads`` and of ``python -m specheads``."""
    app(prog_name="specheads")
