"""Checkpoints of draft heads: saved natively, exported to the layouts that engines load, and read back from any.

A format is a module: ``NAME``, ``HEADS`` (the heads it can hold), ``FILES`` (tensor files it writes), ``READERS`` (who
loads it), ``matches(config, keys)``, ``from_native(config, tensors, output_weight)`` and ``to_native(config, tensors,
target)``, which take and give dictionaries and touch no file.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from specheads import heads
from specheads.checkpoints import eagle3, medusa, native
from specheads.checkpoints.card import model_card
from specheads.checkpoints.io import (
    CONFIG_FILE,
    TENSOR_FILES,
    listed,
    load_strict,
    read_json,
    read_tensors,
    refuse_other_content,
    resolve_folder,
    temporary_folder,
    write_tensors,
)
from specheads.checkpoints.native import NativeConfig, native_config, save_native
from specheads.heads.base import Head
from specheads.modules.draft_vocab import DraftVocab
from specheads.types import FrozenParts, TargetConfig
from specheads.utils import InputError, write_json, write_text

__all__ = ["FORMATS", "export", "load_draft", "read_draft", "read_files", "save_native"]

FORMATS: dict[str, ModuleType] = {"native": native, "medusa": medusa, "eagle3": eagle3}


def read_files(source: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor], ModuleType, Path]:
    """What the files of a draft hold, as they are: config, tensors, the format they are in, and the folder.

    Raises:
        InputError: nothing is there, a file is damaged, or the layout is none of ``FORMATS``.
    """
    folder = resolve_folder(source)
    if not (folder / CONFIG_FILE).is_file():
        raise InputError(f"draft: {folder} has no {CONFIG_FILE}, expected the folder of a draft checkpoint")
    config = read_json(folder / CONFIG_FILE)
    path = next((folder / name for name in TENSOR_FILES if (folder / name).is_file()), None)
    if path is None:
        raise InputError(f"draft: {folder} has no tensors, expected one of {', '.join(TENSOR_FILES)}; fetch it again")
    tensors = read_tensors(path)
    for module in FORMATS.values():
        if module.matches(config, tensors):
            return config, tensors, module, folder
    raise InputError(
        f"draft: {path} is no draft that is known ({', '.join(FORMATS)}): its tensors are {listed(tensors)}; "
        "give a Medusa, EAGLE-3 or specheads checkpoint"
    )


def read_draft(
    source: str | os.PathLike[str], target_config: TargetConfig | None = None
) -> tuple[NativeConfig, dict[str, Tensor], Path]:
    """A draft of any format as a native config and native tensors, and the folder it was in.

    Raises:
        InputError: see ``read_files``; or the config does not tell what the target has to (give ``target_config``).
    """
    config, tensors, module, folder = read_files(source)
    try:
        return *module.to_native(config, tensors, target_config), folder
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise InputError(
            f"{folder}: {CONFIG_FILE} does not describe a draft in the format {module.NAME} ({error}); "
            "the config is damaged, fetch or export it again"
        ) from error


def load_draft(
    source: str | os.PathLike[str],
    target_config: TargetConfig | None = None,
    dtype: torch.dtype | None = None,
) -> Head:
    """The head of a checkpoint in any format (told by its tensors), on the CPU.

    ``target_config``: the target it is to draft for, checked against what the checkpoint says of its own (sizes, layer
    count, fingerprint).
    ``dtype``: of the floating-point tensors, None = as stored.

    Raises:
        InputError: not a draft; a tensor missing, left over, of a wrong shape or not finite; another target.
    """
    config, tensors, folder = read_draft(source, target_config)
    if target_config is not None:
        check_target(config["target"], target_config, folder)
    if not isinstance(config["head"], str) or config["head"] not in heads.HEADS:
        raise InputError(
            f"{folder}: head is {config['head']!r}, expected one of {', '.join(heads.HEADS)}; update specheads"
        )
    try:
        head = heads.HEADS[config["head"]].from_config(config["head_config"])
    except InputError:
        raise
    except (TypeError, KeyError, ValueError, AttributeError, RuntimeError) as error:
        raise InputError(
            f"{folder}: head_config does not describe a {config['head']} head ({error}); the config is damaged"
        ) from error
    stored = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if dtype is None and len(stored) == 1:
        dtype = stored.pop()
    head.to(dtype or torch.float32)
    load_strict(head, tensors, folder)
    check_vocab(head, folder)
    return head


def check_vocab(head: Head, source: str | os.PathLike[str]) -> None:
    """The tables of a head with a draft vocabulary, against each other.

    Raises:
        InputError: see ``DraftVocab.check``.
    """
    vocab = getattr(head, "vocab", None)
    if isinstance(vocab, DraftVocab):
        try:
            vocab.check()
        except InputError as error:
            raise InputError(f"{source}: {error}") from error


def check_target(recorded: Mapping[str, Any], target: TargetConfig, folder: Path) -> None:
    """Refuse a draft for another target. Facts that the checkpoint does not record are not compared.

    Fewer positions than the target's are a warning: the output stays the target's, drafts beyond them are poorer.

    Raises:
        InputError: the fact, both values.
    """
    for name in ("hidden_size", "vocab_size", "num_layers", "fingerprint"):
        want, got = recorded.get(name), getattr(target, name)
        if want is not None and want != got:
            raise InputError(
                f"{folder}: made for {recorded.get('name')} ({name} {want}), but the target is {target.name} "
                f"({name} {got}); use the draft's own target"
            )
    positions = recorded.get("context_limit")
    if isinstance(positions, int) and positions < target.context_limit:
        warnings.warn(
            f"{folder}: made for {positions} positions, the target takes {target.context_limit}; beyond {positions} "
            "fewer drafts may be accepted, the output is the target's all the same",
            stacklevel=2,
        )


def export(
    head: Head,
    target_config: TargetConfig,
    parts: FrozenParts,
    format: str,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    numbers: Mapping[str, Mapping[str, Any]] | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write ``head`` to ``folder`` in a format of ``FORMATS``, with a model card; whole or not at all.

    ``dtype``: of the floating-point tensors, None = the head's own. ``numbers``: measured rows by drafter (card).
    ``extra``: provenance, recorded in config.json of every format as in native checkpoints.

    Raises:
        InputError: an unknown format, one that cannot hold this head, unusable tensors, a folder that holds something
            else, or a full disk.
    """
    if format not in FORMATS:
        raise InputError(f"export: format {format!r} is not known, expected one of {', '.join(FORMATS)}")
    refuse_other_content(folder)
    check_vocab(head, "export")
    module = FORMATS[format]
    own = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    floats = next((tensor.dtype for tensor in own.values() if tensor.is_floating_point()), torch.float32)
    dtype = dtype or floats
    tensors = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in own.items()}
    written, out = module.from_native(
        native_config(head, target_config, dtype, None), tensors, parts.output_weight.detach().cpu().to(dtype)
    )
    if extra:
        written["provenance"] = extra
    with temporary_folder(folder) as part:
        for name in module.FILES:
            write_tensors(part / name, out)
        write_json(part / CONFIG_FILE, written)
        length = trained_length(extra)
        write_text(
            part / "README.md",
            model_card(head.name, format, target_config, written, module.READERS, numbers, length),
        )
    return Path(folder)


def trained_length(extra: Mapping[str, Any] | None) -> int | None:
    """Tokens of the longest rows that a run trained on, from its record; None where it is not told."""
    found: Any = extra or {}
    for name in ("run", "recipe", "data", "max_length"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, int) else None
