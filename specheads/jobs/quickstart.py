"""From nothing to a measured speed-up: target → answers → features → training → export → measured report.

Every stage is done once (see ``stages``); a second run reuses what stands and continues what was interrupted. How much
text and how many prompts are used follows from a few seconds of measuring, so that the whole stays within a quarter of
an hour on two cores at the default six minutes of training.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specheads import build
from specheads.checkpoints import load_draft
from specheads.config.load import recipe_of
from specheads.config.schema import Recipe
from specheads.data.conversations import builtin_answers, read_prompts, read_rows
from specheads.data.tokenize import template_hash
from specheads.evaluation.report import print_report
from specheads.hardware import dtype_name
from specheads.jobs import evaluate as evaluation
from specheads.jobs.data import answers_file, spread, write_answers
from specheads.jobs.inspect import forward_rate
from specheads.jobs.screen import Screen
from specheads.jobs.stages import Stages, file_digest
from specheads.jobs.train import described, export, keep, prepare, run_trainer
from specheads.target.adapter import Target
from specheads.utils import InputError

HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"type": "eagle3", "ttt_steps": 3, "draft_vocab_size": 8192},
    "medusa": {"type": "medusa", "num_heads": 4, "draft_vocab_size": 8192},
}
MADE = ("stages", "data", "features", "training", build.CHECKPOINT, "export")
LIVE_ROWS = 24  # beside a shipped set: enough to see the step
ANSWER_SECONDS = 240.0  # where no set ships: the share of the time for writing answers
FEATURE_SECONDS = 150.0
EVALUATION_SECONDS = 210.0
EXACT_PROMPTS, EXACT_TOKENS = 8, 32
SYSTEMS = 5  # HF generate, plain loop, head, look-up, joined


def recipe_for(head: str, minutes: float, target: str, output: str | None, overrides: Sequence[str]) -> Recipe:
    """The recipe that a quickstart runs.

    Raises:
        InputError: an unknown head, or a wrong override.
    """
    if head not in HEADS:
        raise InputError(f"--head: got {head!r}, expected {' or '.join(HEADS)}")
    shipped = builtin_answers(target) is not None
    values = {
        "target": {"name": target},
        "data": {
            "answers": "builtin" if shipped else None,
            "live_rows": LIVE_ROWS if shipped else None,
            "max_new_tokens": 128,
            "max_length": 384,
            "heldout_rows": 32,
        },
        "head": HEADS[head],
        "training": {"minutes": minutes, "rows_per_batch": 4, "eval_every": 100, "save_every": 100},
        "evaluation": {"prompts_per_category": 2, "max_new_tokens": 64},
        "export": {"formats": [head]},
        "output_dir": output or f"runs/quickstart-{head}",
    }
    return recipe_of(values, overrides, source="quickstart")


@dataclass
class Quickstart:
    """One run over one output folder."""

    recipe: Recipe
    screen: Screen
    target: Target
    stages: Stages

    @property
    def folder(self) -> Path:
        """Where everything goes."""
        return Path(self.recipe.output_dir)

    def identity(self) -> dict[str, Any]:
        """What every stage depends on."""
        target = self.target
        return {
            "target": target.config.fingerprint,
            "template": template_hash(target.tokenizer),
            "dtype": dtype_name(target.dtype),
        }

    # --- stages -----------------------------------------------------------------------------------------------------

    def prompts(self) -> dict[str, int]:
        """Prompts by category."""
        prompts, skipped = read_prompts(self.recipe.data.prompts)
        counts = dict(Counter(prompt.category for prompt in prompts))
        lost = f"; {sum(skipped.values())} skipped" if skipped else ""
        self.screen.line(f"prompts: {len(prompts)} ({', '.join(f'{n} {name}' for name, n in counts.items())}{lost})")
        return counts

    def pace(self) -> dict[str, Any]:
        """How much text and how long answers fit this machine: a forward and a short plain generation, timed."""
        with self.screen.stage("pace"):
            forward = forward_rate(self.target)
            prompt = list(range(5, 25)) if self.target.config.vocab_size > 25 else [0, 1, 2]
            runs = [self.target.generate([prompt], max_new_tokens=8, eos_ids=()) for _ in range(4)]
            slow = max(len(run.tokens[0]) / run.seconds for run in runs)
        prompts = 8 * (self.recipe.evaluation.prompts_per_category or 12) * self.recipe.evaluation.repeats
        # the plain loop takes about 0.7 and each draft about 0.5 of the time of HF generate
        longest = EVALUATION_SECONDS * slow / (prompts * (1 + 0.7 + 0.5 * (SYSTEMS - 2)))
        return {
            "forward_tokens_per_s": round(forward, 1),
            "hf_tokens_per_s": round(slow, 1),
            "max_tokens": int(forward * FEATURE_SECONDS),
            "answer_tokens": max(16, min(self.recipe.evaluation.max_new_tokens, int(longest) // 8 * 8)),
        }

    def answers(self) -> dict[str, Any]:
        """The target answers prompts: a few beside a shipped set, else as many as fit the time share."""
        prompts, _ = read_prompts(self.recipe.data.prompts)
        wanted = self.recipe.data.live_rows
        chosen = prompts if wanted is None else spread(prompts, wanted)
        path = answers_file(self.recipe)
        seconds = ANSWER_SECONDS if wanted is None else None
        report = write_answers(self.recipe, self.target, chosen, path, self.screen, seconds=seconds)
        self.show_answer(path)
        return {"rows": report.rows + report.reused, "tokens": report.tokens, "file": str(path)}

    def show_answer(self, path: Path) -> None:
        """One of the rows just written, so that a person sees what training text is."""
        row = read_rows(path)[0][0]
        asked, said = (str(row["messages"][place]["content"]).replace("\n", " ")[:100] for place in (-2, -1))
        self.screen.line(f"  for example: {asked!r} -> {said!r}")

    def train(self, recipe: Recipe, name: str) -> dict[str, Any]:
        """Features and training, in a folder of its own for every set of inputs (an interrupted one is continued)."""
        from specheads.training.launch import make_accelerator

        rows, head, sources = prepare(recipe, self.target, self.screen)
        folder = self.folder / "training" / name
        result = run_trainer(recipe, self.target, head, sources, folder, self.screen, make_accelerator())
        keep(recipe, self.target, result.best, sources[1], self.folder / build.CHECKPOINT)
        build.write_record(self.folder, recipe, self.target)
        tau = f", held-out chain τ {result.best_tau:.2f}" if result.best_tau is not None else ""
        self.screen.line(f"  {result.steps} steps, {result.tokens:,} tokens; best at step {result.best_step}{tau}")
        return {**described(result), "data": rows.report}

    def export(self) -> dict[str, str]:
        """The checkpoint in the dialect of its head."""
        head = load_draft(self.folder / build.CHECKPOINT, self.target.config)
        return {
            name: str(export(head, self.target, name, self.folder / "export" / name, self.screen))
            for name in self.recipe.export.formats
        }

    def loaded(self, recipe: Recipe) -> build.Loaded:
        """The checkpoint over the target at hand."""
        folder = self.folder / build.CHECKPOINT
        head = load_draft(folder, self.target.config).to(self.target.device, self.target.dtype)
        return build.Loaded(folder, recipe, self.target, head.eval().requires_grad_(False))

    def measure(self, recipe: Recipe) -> dict[str, Any]:
        """A B A B in the dtype that ``auto`` chose."""
        return evaluation.measure(self.loaded(recipe), self.screen).to_json()

    def exactness(self, recipe: Recipe) -> dict[str, Any]:
        """A few prompts in fp32, where every token must be the target's own."""
        if dtype_name(self.target.dtype) == "fp32":
            exact = self.loaded(recipe)
        else:
            exact = build.load_checkpoint(self.folder / build.CHECKPOINT, dtype="fp32")
            exact.recipe = recipe
        return evaluation.exact_tokens(exact, self.screen, EXACT_PROMPTS, EXACT_TOKENS)


def run(recipe: Recipe, screen: Screen, *, fresh: bool = False) -> dict[str, Any]:
    """The whole quickstart; JSON-able report.

    Raises:
        InputError: a target that cannot be served, a full disk, or tokens that are not the target's own.
    """
    start = time.perf_counter()
    folder = Path(recipe.output_dir)
    if fresh:
        for name in MADE:
            shutil.rmtree(folder / name, ignore_errors=True)
    with screen.stage("target"):
        target = build.build_target(recipe.target)
    screen.line(f"  {target.describe()}")
    recipe = _with_layers(recipe, target)
    work = Quickstart(recipe, screen, target, Stages(folder, screen))
    identity = work.identity()
    work.prompts()
    pace = work.stages.run("pace", {**identity, "evaluation": recipe.resolved()["evaluation"]}, work.pace)
    data = recipe.resolved()["data"]
    prompts = {"prompts": _digest(recipe.data.prompts)}
    work.stages.run("answers", {**identity, **prompts, "data": data}, work.answers, [answers_file(recipe)])
    paced = _paced(recipe, pace)
    values = paced.resolved()
    inputs = {**identity, "answers": file_digest(answers_file(recipe)), "max_tokens": pace["max_tokens"]}
    inputs |= {name: values[name] for name in ("head", "training", "data", "seed")}
    checkpoint = folder / build.CHECKPOINT
    trained = work.stages.run("train", inputs, lambda: work.train(paced, _name(inputs)), [checkpoint / "config.json"])
    weights = {**identity, "checkpoint": file_digest(checkpoint / "model.safetensors")}
    exports = [folder / "export" / name for name in recipe.export.formats]
    work.stages.run("export", {**weights, "formats": list(recipe.export.formats)}, work.export, exports)
    settings = {**weights, "evaluation": values["evaluation"], "decoding": values["decoding"]}
    measured = work.stages.run("evaluate", settings, lambda: work.measure(paced))
    exact = work.stages.run("fp32", settings, lambda: work.exactness(paced))
    return finish(work, paced, trained, measured, exact, time.perf_counter() - start)


def _with_layers(recipe: Recipe, target: Target) -> Recipe:
    """EAGLE-3 reads the middle and the last two states here: a short training learns most from the last ones, which
    the published layers (2, L//2, L-3) leave out."""
    if recipe.head.type != "eagle3" or recipe.head.layer_ids is not None:
        return recipe
    layers = target.config.num_layers
    chosen = tuple(sorted({layers // 2, layers - 1, layers}))
    return recipe.model_copy(update={"head": recipe.head.model_copy(update={"layer_ids": chosen})})


def _digest(source: str) -> str:
    return source if source.startswith("builtin") else file_digest(source)


def _name(inputs: dict[str, Any]) -> str:
    from specheads.jobs.stages import fingerprint

    return fingerprint(inputs)


def _paced(recipe: Recipe, pace: dict[str, Any]) -> Recipe:
    """The recipe with the amounts that fit this machine."""
    tokens = min(recipe.data.max_tokens or pace["max_tokens"], pace["max_tokens"])
    written = {"max_tokens": tokens}
    if recipe.data.answers is None:  # the answers stage has written what the time allowed; nothing is added later
        written |= {"answers": str(answers_file(recipe)), "live_rows": 0}
    return recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update=written),
            "evaluation": recipe.evaluation.model_copy(update={"max_new_tokens": pace["answer_tokens"]}),
        }
    )


def finish(
    work: Quickstart,
    recipe: Recipe,
    trained: dict[str, Any],
    measured: dict[str, Any],
    exact: dict[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """Table, files, the fastest drafter as the checkpoint's default, and what to type next.

    Raises:
        InputError: tokens that are not the target's own (after the report is written).
    """
    screen, folder = work.screen, work.folder
    report = evaluation.report_of(measured)
    fastest = report.default_drafter
    chosen = recipe.model_copy(update={"decoding": recipe.decoding.model_copy(update={"drafter": fastest})})
    build.write_record(folder, chosen, work.target)
    stages = {"ran": work.stages.ran, "reused": work.stages.reused}
    extra = {"training": trained, "fp32": exact, "stages": stages}
    paths = evaluation.write(report, folder, extra)
    screen.draw(lambda console: print_report(report, console))
    least = min(exact["identical"].values())
    screen.line(
        f"In fp32, {least:.0%} of {exact['prompts']} prompts have exactly the target's own tokens, by every path."
    )
    screen.line(
        f"Fastest here: {fastest}, now the default of this checkpoint. This run took {seconds / 60:.1f} minutes."
    )
    screen.line("Written: " + ", ".join(str(path) for path in paths.values()))
    kind, minutes = recipe.head.type, recipe.training.minutes or 6
    screen.line("Next:")
    screen.line(f"  specheads chat {folder}")
    screen.line(f"  specheads quickstart --head {kind} --minutes {minutes * 5:g} --output {folder}{_named(recipe)}")
    screen.line(f"  specheads export {folder} --format {kind} --out {folder}/export/{kind}")
    report.check()
    return {**report.to_json(), **extra}


def _named(recipe: Recipe) -> str:
    return "" if recipe.target.name == "smollm2-135m" else f" --target {recipe.target.name}"
