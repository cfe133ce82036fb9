"""The native format: what training writes and everything else is converted from and to.

config.json         {"format": "specheads", "format_version": 1, "head": ..., "head_config": {...},
                     "target": {...}, "feature_layers": [...], "feature_convention": ..., "dtype": ...}
model.safetensors   the head's own tensors under their module names
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.checkpoints.io import (
    CONFIG_FILE,
    MODEL_FILE,
    refuse_other_content,
    temporary_folder,
    write_tensors,
)
from specheads.heads.base import Head
from specheads.types import TargetConfig
from specheads.utils import InputError, write_json

NAME = "native"
FILES = (MODEL_FILE,)
HEADS = ("medusa", "eagle3")
READERS = "specheads"
FORMAT, FORMAT_VERSION = "specheads", 1
FEATURE_CONVENTION = "input of layer i; L = raw last state"
TARGET_FACTS = ("name", "model_type", "hidden_size", "vocab_size", "num_layers", "context_limit", "fingerprint")
NativeConfig = dict[str, Any]  # the object of a native config.json


def native_config(head: Head, target: TargetConfig, dtype: torch.dtype, extra: dict[str, Any] | None) -> NativeConfig:
    """config.json of a head for a target. ``extra``: provenance, kept as it is under ``"provenance"``."""
    facts = {name: getattr(target, name) for name in TARGET_FACTS}
    config = native_skeleton(head.name, head.config_dict(), facts, list(head.feature_spec.layer_ids), dtype)
    if extra:
        config["provenance"] = extra
    return config


def write_native(
    folder: str | os.PathLike[str],
    head: Head,
    target: TargetConfig,
    extra: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write config.json and model.safetensors into an existing folder (see ``save_native`` for whole-or-nothing)."""
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in head.state_dict().items()
    }
    write_tensors(Path(folder) / MODEL_FILE, tensors)
    write_json(Path(folder) / CONFIG_FILE, native_config(head, target, dtype, extra))


def save_native(
    folder: str | os.PathLike[str],
    head: Head,
    target_config: TargetConfig,
    extra: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A native checkpoint at ``folder``, whole or not at all. ``dtype``: of the floating-point tensors.

    Raises:
        InputError: a tensor is empty or not finite, the folder holds something else, or the disk is full; what was
            there before is untouched.
    """
    refuse_other_content(folder)
    with temporary_folder(folder) as part:
        write_native(part, head, target_config, extra, dtype)
    return Path(folder)


def matches(config: dict[str, Any], keys: Iterable[str]) -> bool:
    """Whether a config.json is native."""
    return config.get("format") == FORMAT


def from_native(
    config: NativeConfig, tensors: dict[str, Tensor], output_weight: Tensor | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Native is native."""
    return config, tensors


def to_native(
    config: dict[str, Any], tensors: dict[str, Tensor], target: TargetConfig | None = None
) -> tuple[NativeConfig, dict[str, Tensor]]:
    """Native is native, of a known version and with every field.

    Raises:
        InputError: an unknown version or a field is missing.
    """
    if config.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"format_version: got {config.get('format_version')!r}, expected {FORMAT_VERSION}; update specheads, or "
            "convert the checkpoint with the version that wrote it"
        )
    for field in ("head", "head_config", "target", "feature_layers", "feature_convention"):
        if field not in config:
            raise InputError(f"{CONFIG_FILE}: {field} is missing, expected it in every native checkpoint")
    if config["feature_convention"] != FEATURE_CONVENTION:
        raise InputError(
            f"feature_convention: got {config['feature_convention']!r}, expected {FEATURE_CONVENTION!r}; another "
            "convention shifts every feature layer by one"
        )
    return config, tensors


def native_skeleton(
    head: str, head_config: dict[str, Any], target: dict[str, Any], layers: list[int], dtype: torch.dtype
) -> NativeConfig:
    """A native config made from another format; facts about the target that it does not hold are None."""
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "head": head,
        "head_config": head_config,
        "target": {name: target.get(name) for name in TARGET_FACTS},
        "feature_layers": list(layers),
        "feature_convention": FEATURE_CONVENTION,
        "dtype": str(dtype).removeprefix("torch."),
    }
