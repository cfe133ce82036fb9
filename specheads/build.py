"""From a recipe to objects: the only module that reads a recipe and makes things of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specheads.checkpoints import load_draft, read_files
from specheads.checkpoints.io import resolve_folder, restore_replaced
from specheads.config.load import recipe_of
from specheads.config.record import run_record
from specheads.config.schema import Recipe, TargetSection, TrainingSection
from specheads.data.dataset import RowSource
from specheads.data.tokenize import Encoded
from specheads.decoding.baseline import PlainDecoder
from specheads.decoding.controller import StepCosts
from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.drafters.joined import JoinedDrafter
from specheads.decoding.drafters.ngram import NgramDrafter
from specheads.hardware import DTYPES, DtypeChoice, adopt_dtype, choose_dtype, dtype_name, processor_name
from specheads.heads import HEADS
from specheads.heads.base import Drafter, Head
from specheads.modules.draft_vocab import choose_draft_ids
from specheads.target.adapter import Target
from specheads.target.load import find_device, load_target
from specheads.utils import InputError, write_json

if TYPE_CHECKING:
    from accelerate import Accelerator

    from specheads.training.settings import TrainCallbacks, TrainSettings
    from specheads.training.trainer import Trainer

RUN_FILE = "run.json"
AUTO_FILE = "stages/auto_dtype.json"  # of an output folder: what "auto" meant there, by kind of device
CHECKPOINT = "checkpoint"  # of an output folder: the best one, in the native format


def build_target(section: TargetSection, dtype: str | None = None) -> Target:
    """The frozen target of a recipe; ``dtype`` replaces the recipe's.

    Raises:
        InputError: see ``load_target``.
    """
    return load_target(
        section.name,
        dtype=dtype or section.dtype,
        device=section.device,
        revision=section.revision,
        trust_remote_code=section.trust_remote_code,
    )


def token_counts(rows: Sequence[Encoded], vocab_size: int) -> Tensor:
    """How often each token of the vocabulary (V int64) is supervised in ``rows``."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in rows:
        ids = torch.tensor(row.input_ids)[torch.tensor(row.loss_mask)]
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def build_head(recipe: Recipe, target: Target, rows: Sequence[Encoded]) -> Head:
    """A fresh head; a draft vocabulary takes the tokens that ``rows`` supervise most often, EOS ids always among them.

    Raises:
        InputError: options that do not fit the target, see ``Head.build``.
    """
    torch.manual_seed(recipe.seed)  # the first weights are a function of the recipe
    options = recipe.head.model_dump(exclude={"type"})
    size, draft_ids = recipe.head.draft_vocab_size, None
    if size is not None and size < target.config.vocab_size:
        counts = token_counts(rows, target.config.vocab_size)
        tokens = len(target.tokenizer)  # embedding rows beyond it are padding
        draft_ids = choose_draft_ids(counts, size, always=target.config.eos_ids, logical_size=tokens)
    return HEADS[recipe.head.type].build(target.config, target.parts, options, draft_ids)


def settle_auto(recipe: Recipe, folder: Path) -> None:
    """Let ``dtype: auto`` mean what it meant when the run in ``folder`` began; a run that begins writes it there.

    The probe measures a machine that others may use, and the features and the training state depend on its answer.

    Raises:
        InputError: the device cannot be used, or the disk is full.
    """
    if "auto" not in (recipe.target.dtype, recipe.training.dtype):
        return
    device = find_device(recipe.target.device)
    known = json_object(folder / AUTO_FILE)
    begun = known.get(device.type)
    if isinstance(begun, dict) and begun.get("dtype") in DTYPES:
        adopt_dtype(DtypeChoice(DTYPES[begun["dtype"]], str(begun.get("reason"))), device)
        return
    choice = choose_dtype("auto", device)
    chosen = {"dtype": dtype_name(choice.dtype), "reason": choice.reason}
    write_json(folder / AUTO_FILE, {**known, device.type: chosen})


def build_settings(section: TrainingSection, seed: int, heldout_rows: int, dtype: torch.dtype) -> TrainSettings:
    """The trainer's settings, with the dtype that was chosen."""
    from specheads.training.settings import TrainSettings

    values = section.model_dump(exclude={"dtype", "trackers"})
    return TrainSettings(**values, dtype=dtype_name(dtype), seed=seed, eval_rows=heldout_rows)


def build_trainer(
    recipe: Recipe,
    target: Target,
    head: Head,
    data: RowSource,
    heldout: RowSource,
    accelerator: Accelerator,
    folder: Path,
    callbacks: TrainCallbacks | None = None,
) -> Trainer:
    """The trainer of a recipe, writing to ``folder``.

    Raises:
        InputError: settings out of range, or a batch that the processes cannot share evenly.
    """
    from specheads.training.trainer import Trainer

    choice = choose_dtype(recipe.training.dtype, accelerator.device)
    chosen = {"training_dtype": dtype_name(choice.dtype), "training_dtype_reason": choice.reason}
    return Trainer(
        head,
        target.parts,
        data,
        heldout,
        build_settings(recipe.training, recipe.seed, recipe.data.heldout_rows, choice.dtype),
        accelerator,
        folder,
        target_config=target.config,
        callbacks=callbacks,
        extra={"run": {**record(recipe, target), **chosen}},
    )


def record(recipe: Recipe, target: Target) -> dict[str, Any]:
    """What this run is: recipe, command, versions, git state, machine, dtype and its reason."""
    return run_record(
        recipe,
        {
            "processor": processor_name(),
            "threads": torch.get_num_threads(),
            "device": str(target.device),
            "dtype": dtype_name(target.dtype),
            "dtype_reason": target.dtype_reason,
            "target": asdict(target.config),
        },
    )


def write_record(folder: str | Path, recipe: Recipe, target: Target) -> None:
    """``run.json`` in a run's folder, with the dtype that its checkpoint was trained in."""
    write_json(Path(folder) / RUN_FILE, {**record(recipe, target), **trained_in(Path(folder) / CHECKPOINT)})


def provenance(folder: Path) -> dict[str, Any]:
    """The record of the run that made a checkpoint, from its config.json; empty where there is none."""
    found = json_object(folder / "config.json").get("provenance")
    run = found.get("run") if isinstance(found, dict) else None
    return run if isinstance(run, dict) else {}


def trained_in(folder: Path) -> dict[str, Any]:
    """Of the record of a checkpoint: the dtype it was trained in, and why."""
    run = provenance(folder)
    return {name: run[name] for name in ("training_dtype", "training_dtype_reason") if name in run}


def json_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty if it cannot be read: whoever needs it says so."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass
class Loaded:
    """A checkpoint with everything that decoding needs."""

    folder: Path
    recipe: Recipe
    target: Target
    head: Head


def checkpoint_folder(source: str | Path) -> Path:
    """The folder of a checkpoint: a run's output folder stands for the checkpoint in it.

    Raises:
        InputError: a run that has not finished its training; see ``resolve_folder`` for the rest.
    """
    path = Path(source).expanduser()
    restore_replaced(path / CHECKPOINT)
    if (path / CHECKPOINT / "config.json").is_file():
        return path / CHECKPOINT
    if path.is_dir() and not (path / "config.json").is_file() and (path / "stages").is_dir():
        raise InputError(
            f"checkpoint: {source} is a run that has no finished checkpoint yet; run the same training again"
        )
    return resolve_folder(source)


def recipe_beside(folder: Path, overrides: Sequence[str]) -> Recipe:
    """The recipe that made a checkpoint, or defaults for the target it names, with the overrides laid over it.

    The checkpoint's own config.json says which target and head it is. A ``run.json`` of the same ones beside it is
    newer (the quickstart writes the fastest drafter there) and counts; any other is somebody else's.

    Raises:
        InputError: an override that does not fit.
    """
    target, own = recorded_target(json_object(folder / "config.json")), provenance(folder).get("recipe")
    for place in (folder, folder.parent) if folder.name == CHECKPOINT else (folder,):
        run = json_object(place / RUN_FILE)
        values, made_for = run.get("recipe"), run.get("target")
        if not isinstance(values, dict) or (isinstance(own, dict) and own.get("head") != values.get("head")):
            continue
        shared = target.keys() & made_for.keys() if isinstance(made_for, dict) else set()
        key = "fingerprint" if "fingerprint" in shared else "name"
        if not target or (isinstance(made_for, dict) and target.get(key) == made_for.get(key)):
            return recipe_of(values, overrides, source=str(place / RUN_FILE))
    if isinstance(own, dict):
        return recipe_of(own, overrides, source=str(folder / "config.json"))
    named = {"target": {"name": target["name"]}} if "name" in target else {}
    return recipe_of({**named, "head": {"type": "eagle3"}, "training": {"epochs": 1}}, overrides, source=str(folder))


def recorded_target(config: dict[str, Any]) -> dict[str, str]:
    """``name`` and ``fingerprint`` of the target in a checkpoint's config of any dialect, as far as it tells them."""
    exported = config.get("specheads")
    found = config.get("target") or (exported.get("target") if isinstance(exported, dict) else None)
    if not isinstance(found, dict):
        found = {"name": config.get("base_model_name_or_path")}
    return {key: found[key] for key in ("name", "fingerprint") if isinstance(found.get(key), str) and found[key]}


def load_checkpoint(source: str | Path, overrides: Sequence[str] = (), dtype: str | None = None) -> Loaded:
    """A checkpoint of any dialect, and the target it was made for (or the one that ``target.name=`` names).

    Raises:
        InputError: no such checkpoint, a damaged one, one for another target, a wrong override.
    """
    folder = checkpoint_folder(source)
    recipe = recipe_beside(folder, overrides)
    read_files(folder)  # a damaged checkpoint is told before seconds are spent on the target
    target = build_target(recipe.target, dtype)
    head = load_draft(folder, target.config)
    return Loaded(folder, recipe, target, head.to(target.device, target.dtype).eval().requires_grad_(False))


def build_plain(target: Target) -> PlainDecoder:
    """The target's own loop, one token a forward, with the signature of the speculative decoder."""
    return PlainDecoder(target)


def build_decoders(loaded: Loaded, names: Sequence[str]) -> dict[str, SpeculativeDecoder]:
    """Decoders by drafter: ``head``, ``lookup``, ``joined`` (both in one tree), sized by what forwards cost here.

    Raises:
        InputError: decoding limits out of range.
    """
    section, target, head = loaded.recipe.decoding, loaded.target, loaded.head
    costs = StepCosts.probe(target)
    policy = head.tree_policy(section.tree_depth, section.tree_top_k, section.tree_nodes)

    def lookup() -> Drafter:
        return NgramDrafter(section.lookup_max_match, section.lookup_min_match, section.lookup_drafts)

    def draft() -> Drafter:
        return head.drafter(target.parts, policy)

    def joined(with_lookup: bool, with_head: bool) -> Callable[[], Drafter]:
        return lambda: JoinedDrafter(lookup() if with_lookup else None, draft() if with_head else None, costs)

    makers = {"head": joined(False, True), "lookup": joined(True, False), "joined": joined(True, True)}
    return {name: SpeculativeDecoder(target, makers[name]) for name in names}
