"""How much of the machine a training step uses: its counted operations over its time, against a probe of its own
matrix products in the same run.

python scripts/benchmarks/training.py RECIPE [--length 256] [--steps 10] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from specheads import build
from specheads.cli.console import Console
from specheads.config.load import load_recipe
from specheads.data.conversations import read_prompts
from specheads.data.dataset import FeatureDataset
from specheads.data.features import compute_features
from specheads.data.tokenize import Encoded, prompt_ids
from specheads.evaluation.throughput import training_rate
from specheads.target.adapter import Target
from specheads.training.launch import make_accelerator


def rows_of(target: Target, length: int) -> list[Encoded]:
    """The package's prompts one after another, cut into rows of ``length``: what they say does not matter here."""
    ids = [token for row in read_prompts("builtin")[0] for token in prompt_ids(target.tokenizer, row.messages)]
    starts = range(0, len(ids) - length, length)
    mask = [index >= length // 4 for index in range(length)]
    return [Encoded(str(start), str(start), "text", ids[start : start + length], mask) for start in starts]


def main() -> None:
    """Print rate, probe and ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_intermixed_args()
    console = Console()
    recipe = load_recipe(options.recipe, options.overrides)
    target = build.build_target(recipe.target)
    console.line(target.describe())
    rows = rows_of(target, options.length)
    head = build.build_head(recipe, target, rows)  # all rows speak for the draft vocabulary, one batch is trained on
    with tempfile.TemporaryDirectory() as folder:
        batch = rows[: recipe.training.rows_per_batch]
        cache = compute_features(
            target, batch, head.feature_spec.layer_ids, Path(folder) / "features", max_length=options.length
        )
        data = FeatureDataset(cache)
        trainer = build.build_trainer(recipe, target, head, data, data, make_accelerator(), Path(folder) / "run")
        trainer.head.train()
        found = training_rate(lambda: trainer.train_step(0.5), steps=options.steps, device=target.device)
    tokens = len(batch) * options.length * recipe.training.accumulate
    console.line(
        f"{recipe.head.type}, {trainer.settings.dtype}, {len(batch)} rows of {options.length} tokens a batch: "
        f"{found.flops / 1e9:.1f} G operations in {found.seconds * 1e3:.0f} ms ({tokens / found.seconds:.0f} tokens/s)"
    )
    console.line(
        f"step {found.rate:.0f} GFLOPS, probe of its own products {found.probe:.0f} GFLOPS: {found.share:.0%} "
        "of the machine's matrix-product rate"
    )
    console.table(
        ["product", "share of operations", "GFLOPS alone"],
        [(shape, f"{share:.0%}", rate) for shape, share, rate in found.products[:12]],
    )


if __name__ == "__main__":
    main()
