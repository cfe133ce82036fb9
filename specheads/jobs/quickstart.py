"""From nothing to a measured speed-up: target → answers → features → training → measured report → export.

Every stage is done once (see ``stages``); a second run reuses what stands and continues what was interrupted. How much
text and how many prompts are used follows from a few seconds of measuring, so that the whole stays within a quarter of
an hour on two cores at the default six minutes of training.
"""

from __future__ import annotations

import shlex
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
from specheads.evaluation.report import print_report, write_report
from specheads.evaluation.throughput import forward_rate
from specheads.hardware import dtype_name
from specheads.jobs import evaluate as evaluation
from specheads.jobs.data import answers_file, distilled_file, live_prompts, write_answers
from specheads.jobs.export import export
from specheads.jobs.screen import Screen
from specheads.jobs.stages import Stages, clear, file_digest, fingerprint
from specheads.jobs.train import described, keep, on_cpu, prepare, run_trainer
from specheads.target.adapter import Target
from specheads.training.launch import check_trackers, make_accelerator
from specheads.utils import InputError

HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {"type": "eagle3", "ttt_steps": 3, "draft_vocab_size": 8192},
    "medusa": {"type": "medusa", "num_heads": 3, "draft_vocab_size": 8192},
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

    def prompts(self) -> dict[str, int]:
        """Prompts by category."""
        prompts, skipped = read_prompts(self.recipe.data.prompts)
        counts = dict(Counter(prompt.category for prompt in prompts))
        lost = f"; {sum(skipped.values())} skipped" if skipped else ""
        self.screen.line(f"prompts: {len(prompts)} ({', '.join(f'{n} {name}' for name, n in counts.items())}{lost})")
        return counts

    def pace(self) -> dict[str, Any]:
        """How much text fits this machine: a forward, timed."""
        with self.screen.stage("pace"):
            forward = forward_rate(self.target)
        return {"forward_tokens_per_s": round(forward, 1), "max_tokens": int(forward * FEATURE_SECONDS)}

    def length(self) -> dict[str, Any]:
        """How long measured answers may be on this machine: a short plain generation, timed."""
        with self.screen.stage("answer length"):
            prompt = list(range(5, 25)) if self.target.config.vocab_size > 25 else [0, 1, 2]
            runs = [self.target.generate([prompt], max_new_tokens=8, eos_ids=()) for _ in range(4)]
            slow = max(len(run.tokens[0]) / run.seconds for run in runs)
        prompts = 8 * (self.recipe.evaluation.prompts_per_category or 12) * self.recipe.evaluation.repeats
        # the plain loop takes about 0.7 and each draft about 0.5 of the time of HF generate
        longest = EVALUATION_SECONDS * slow / (prompts * (1 + 0.7 + 0.5 * (SYSTEMS - 2)))
        return {
            "hf_tokens_per_s": round(slow, 1),
            "answer_tokens": max(16, min(self.recipe.evaluation.max_new_tokens, int(longest) // 8 * 8)),
        }

    def answers(self) -> dict[str, Any]:
        """The target answers prompts: a few beside a shipped set, else as many as fit the time share."""
        chosen, _ = live_prompts(self.recipe)
        if not chosen:
            return {"rows": 0, "tokens": 0, "file": None}
        path = answers_file(self.recipe)
        seconds = ANSWER_SECONDS if self.recipe.data.live_rows is None else None
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
        trackers, place = recipe.training.trackers, self.folder / "training"
        accelerator = make_accelerator(cpu=on_cpu(recipe), trackers=trackers, folder=place)
        rows, head, sources = prepare(recipe, self.target, self.screen)
        folder = self.folder / "training" / name
        result = run_trainer(recipe, self.target, head, sources, folder, self.screen, accelerator)
        keep(recipe, self.target, result.best, sources[1], self.folder / build.CHECKPOINT)
        build.write_record(self.folder, recipe, self.target)
        tau = f", held-out chain τ {result.best_tau:.2f}" if result.best_tau is not None else ""
        self.screen.line(f"  {result.steps} steps, {result.tokens:,} tokens; best at step {result.best_step}{tau}")
        return {**described(result), "data": rows.report}

    def export(self, numbers: dict[str, Any]) -> dict[str, str]:
        """The checkpoint in the dialect of its head, what was measured on its card."""
        head = load_draft(self.folder / build.CHECKPOINT, self.target.config)
        run, dtype = build.provenance(self.folder / build.CHECKPOINT), self.recipe.export.dtype
        places = {name: self.folder / "export" / name for name in self.recipe.export.formats}
        for name, out in places.items():
            export(head, self.target, name, out, self.screen, dtype, numbers, run)
        return {name: str(out) for name, out in places.items()}

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


def run(recipe: Recipe, screen: Screen, *, fresh: bool = False, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The whole quickstart; JSON-able report. ``overrides``: those that the recipe came of, for the next command.

    Raises:
        InputError: an unusable target or tracker, a full disk, ``fresh`` over other files, tokens not the target's own.
    """
    start = time.perf_counter()
    folder = Path(recipe.output_dir)
    check_trackers(recipe.training.trackers)  # before minutes are spent
    if not fresh:
        build.settle_auto(recipe, folder)
    with screen.stage("target"):
        target = build.build_target(recipe.target)
    if fresh:  # only now that the target is known to load
        clear(folder, MADE)
        build.settle_auto(recipe, folder)
    screen.line(f"  {target.describe()}")
    recipe = _with_layers(recipe, target)
    work = Quickstart(recipe, screen, target, Stages(folder, screen))
    identity = work.identity()
    work.prompts()
    pace = work.stages.run("pace", identity, work.pace)
    pace |= work.stages.run("length", {**identity, "evaluation": recipe.resolved()["evaluation"]}, work.length)
    paced = _paced(recipe, pace)
    screen.line(
        f"  a forward reads {pace['forward_tokens_per_s']:,.0f} tokens/s: at most {paced.data.max_tokens:,} tokens of "
        f"text; measured answers of at most {paced.evaluation.max_new_tokens} tokens"
    )
    given = distilled_file(recipe)
    texts = {"prompts": _digest(recipe.data.prompts), "given": file_digest(given) if given else None}
    written = [answers_file(recipe)] if live_prompts(recipe)[0] else []
    work.stages.run("answers", {**identity, **texts, "data": recipe.resolved()["data"]}, work.answers, written)
    values = paced.resolved()
    inputs = {**identity, **texts, "answers": file_digest(answers_file(recipe)), "max_tokens": pace["max_tokens"]}
    inputs |= {name: values[name] for name in ("head", "training", "data", "seed")}
    checkpoint = folder / build.CHECKPOINT
    name, kept = fingerprint(inputs), [checkpoint / "config.json"]
    trained = work.stages.run("train", inputs, lambda: work.train(paced, name), kept)
    weights = {**identity, "checkpoint": file_digest(checkpoint / "model.safetensors")}
    settings = {**weights, "evaluation": values["evaluation"], "decoding": values["decoding"]}
    measured = work.stages.run("evaluate", settings, lambda: work.measure(paced))
    card = {**weights, "export": values["export"], "measured": fingerprint(measured["by_drafter"])}
    exports = [folder / "export" / name for name in recipe.export.formats]
    work.stages.run("export", card, lambda: work.export(measured["by_drafter"]), exports)
    exact = work.stages.run("fp32", settings, lambda: work.exactness(paced))
    return finish(work, paced, trained, measured, exact, time.perf_counter() - start, overrides)


def _with_layers(recipe: Recipe, target: Target) -> Recipe:
    """EAGLE-3 reads the middle and the last two states here: a short training learns most from the last ones, which
    the published layers (2, L//2, L-3) leave out."""
    if recipe.head.type != "eagle3" or recipe.head.layer_ids is not None:
        return recipe
    layers = target.config.num_layers
    chosen = tuple(sorted({layers // 2, layers - 1, layers}))
    return recipe.model_copy(update={"head": recipe.head.model_copy(update={"layer_ids": chosen})})


def _digest(source: str) -> str:
    return source if source in ("builtin", "builtin-heldout") else file_digest(source)


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
    overrides: Sequence[str],
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
    paths = write_report(report, folder, extra)
    screen.draw(lambda console: print_report(report, console))
    least, count = min(exact["identical"].values()), exact["prompts"]
    screen.line(f"In fp32, {least:.0%} of {count} prompts have exactly the target's own tokens, by every path.")
    screen.line(f"Fastest here: {fastest}, now the default of this checkpoint ({seconds / 60:.1f} minutes this time).")
    screen.line("Written: " + ", ".join(str(path) for path in paths.values()))
    kind, minutes = recipe.head.type, recipe.training.minutes or 6
    screen.line("Next:")
    screen.line(f"  specheads chat {folder}")
    options = [f"--target {recipe.target.name}"] if recipe.target.name != "smollm2-135m" else []
    options += [f"--set {shlex.quote(text)}" for text in overrides if not text.startswith("training.minutes=")]
    longer = " ".join([f"specheads quickstart --head {kind} --minutes {minutes * 5:g} --output {folder}", *options])
    screen.line(f"  {longer}")
    screen.line(f"  specheads export {folder} --format {kind} --out {folder}/export/{kind}")
    report.check()
    return {**report.to_json(), **extra}
