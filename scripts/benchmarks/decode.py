"""What a draft costs: draft pass and tree bookkeeping as a share of a plain target step, on the machine at hand.

python scripts/benchmarks/decode.py CHECKPOINT [--tokens 64] [--prompts 8] [--repeats 3] [section.key=value ...]
"""

from __future__ import annotations

import argparse

from specheads import build
from specheads.cli.console import Console
from specheads.data.tokenize import prompt_ids
from specheads.evaluation.suites import load_suite, spread
from specheads.evaluation.throughput import draft_costs


def main() -> None:
    """Print one line a drafter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a prompt")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_intermixed_args()
    console = Console()
    loaded = build.load_checkpoint(options.checkpoint, options.overrides)
    console.line(loaded.target.describe())
    suite = spread(load_suite(loaded.recipe.evaluation.suite), options.prompts)
    prompts = [prompt_ids(loaded.target.tokenizer, row.messages) for row in suite]
    costs = draft_costs(
        loaded.target,
        build.build_decoders(loaded, ("head", "lookup", "joined")),
        build.build_plain(loaded.target),
        prompts,
        max_new_tokens=options.tokens,
        repeats=options.repeats,
    )
    columns = ["drafter", "τ", "draft ms", "verify + commit ms", "target ms", "plain target step ms", "share", "spread"]
    console.table(
        columns,
        [
            (
                f"{loaded.head.name} head" if one.name == "head" else one.name,
                one.tau,
                one.draft_ms,
                one.verify_ms,
                one.target_ms,
                one.plain_target_ms,
                f"{one.share:.1%}",
                f"{min(one.shares):.1%} to {max(one.shares):.1%}",
            )
            for one in costs
        ],
        title="draft pass and tree bookkeeping as a share of a plain target step (A B A B, medians of the repeats)",
    )


if __name__ == "__main__":
    main()
