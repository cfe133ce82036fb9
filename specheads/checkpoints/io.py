"""Files of checkpoints: read with every fault named, written whole or not at all.

Nothing here unpickles code: ``.bin`` and ``.pt`` files are read with ``weights_only=True``.
"""

from __future__ import annotations

import glob
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specheads.utils import InputError, disk_error

CONFIG_FILE = "config.json"
MODEL_FILE = "model.safetensors"
TENSOR_FILES = (MODEL_FILE, "medusa_lm_head.safetensors", "medusa_lm_head.pt", "pytorch_model.bin")
CHECKPOINT_FILES = (CONFIG_FILE, "README.md", *TENSOR_FILES)  # all that a checkpoint's folder holds
SHOWN = 6  # names listed in an error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        InputError: the file is missing, unreadable, or no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file, expected a JSON file; check the path") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not readable as JSON ({error}); the file is damaged, fetch it again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: got a JSON {type(value).__name__}, expected an object; this is no checkpoint config")
    return value


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one ``.safetensors``, ``.bin`` or ``.pt`` file, by name.

    Raises:
        InputError: the file is missing, truncated, or holds something else than a flat dictionary of tensors.
    """
    advice = "the file is damaged or incomplete; fetch or export it again"
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        value = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file, expected the checkpoint's tensors; check the path") from error
    except (SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError, OSError, ValueError) as error:
        raise InputError(f"{path}: not readable as tensors ({str(error).splitlines()[0]}); {advice}") from error
    if not isinstance(value, dict) or not all(isinstance(tensor, Tensor) for tensor in value.values()):
        raise InputError(f"{path}: got a {type(value).__name__}, expected a flat dictionary of tensors; {advice}")
    return value


def check_tensors(tensors: dict[str, Tensor], source: str | os.PathLike[str]) -> None:
    """Refuse what must never be in a checkpoint.

    Raises:
        InputError: a tensor without elements (sharded or meta-device weights) or with inf or nan.
    """
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or tensor.device.type == "meta":
            raise InputError(
                f"{source}: tensor {name} has no values (shape {tuple(tensor.shape)}, device {tensor.device.type}), "
                "expected real weights; gather sharded weights before saving"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InputError(
                f"{source}: tensor {name} holds inf or nan, expected finite weights; use an earlier checkpoint"
            )


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write checked, contiguous copies to ``.safetensors`` (by suffix) or a torch ``.pt`` state dictionary.

    Raises:
        InputError: see ``check_tensors``, or the disk is full.
    """
    check_tensors(tensors, path)
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}  # clone: no aliases
    try:
        if path.suffix == ".safetensors":
            save_file(plain, path, metadata={"format": "pt"})
        else:
            torch.save(plain, path)
    except (SafetensorError, RuntimeError, OSError) as error:
        cause = error if isinstance(error, OSError) else OSError(str(error))
        raise disk_error(path, cause) from error


@contextmanager
def temporary_folder(goal: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder beside ``goal`` to fill; it takes ``goal``'s name (and place) at the end, and is removed after an error.

    Raises:
        InputError: the disk is full or the folder cannot be written; what stood at ``goal`` is untouched.
    """
    goal = Path(goal)
    part: Path | None = None
    try:
        goal.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{goal.name}.", suffix=".part", dir=goal.parent))
        yield part
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o777 & ~umask)
        for path in part.rglob("*"):
            if path.is_file():
                path.chmod(0o666 & ~umask)
                with path.open("rb") as stream:
                    os.fsync(stream.fileno())
        restore_replaced(goal)
        _replace(part, goal)
    except OSError as error:
        raise disk_error(goal, error) from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


def refuse_other_content(goal: str | os.PathLike[str]) -> None:
    """Let a checkpoint be written only to a new or empty folder, or over a checkpoint of this package.

    Raises:
        InputError: something else is there.
    """
    goal = Path(goal)
    if not goal.exists() or (goal.is_dir() and not any(goal.iterdir())):
        return
    strange = sorted(path.name for path in goal.iterdir() if path.name not in CHECKPOINT_FILES) if goal.is_dir() else []
    if goal.is_dir() and not strange:
        config = read_json(goal / CONFIG_FILE) if (goal / CONFIG_FILE).is_file() else {}
        if config.get("format") == "specheads" or "specheads" in config:
            return
    if goal.is_dir():
        what = f"a folder with {listed(strange)}" if strange else "a folder of another origin"
    else:
        what = "a file"
    raise InputError(
        f"{goal}: is {what}, expected a new or empty folder, or an earlier checkpoint of specheads to replace; "
        "choose another folder"
    )


def _replace(part: Path, goal: Path) -> None:
    """Give ``part`` the name ``goal``; a folder there steps aside first, and comes back if that fails."""
    if not goal.exists():
        part.replace(goal)
        return
    old = part.with_suffix(".old")
    goal.replace(old)
    try:
        part.replace(goal)
    except OSError:
        old.replace(goal)
        raise
    shutil.rmtree(old, ignore_errors=True)


def restore_replaced(goal: Path) -> None:
    """Where ``goal`` is missing because a kill fell between the two renames of a replacement: put the old one back."""
    if goal.exists() or not goal.parent.is_dir():
        return
    left = [path for path in goal.parent.glob(f".{glob.escape(goal.name)}.*.old") if path.is_dir()]
    if left:
        with suppress(OSError):  # a folder that cannot be written: the caller says that nothing is there
            max(left, key=lambda path: path.stat().st_mtime).replace(goal)


def listed(names: Iterable[str]) -> str:
    """The first few of some names, and how many more there are."""
    names = sorted(names)
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def key_faults(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """Missing and unexpected names in one phrase; empty if there are none."""
    kinds = (("missing", list(missing)), ("unexpected", list(unexpected)))
    return "; ".join(f"{kind} {listed(names)}" for kind, names in kinds if names)


def differences(wanted: dict[str, torch.Size], tensors: dict[str, Tensor]) -> list[str]:
    """What keeps ``tensors`` from filling ``wanted`` (shapes by name), one phrase a kind of fault; empty if nothing."""
    keys = key_faults(wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys())
    faults = [keys] if keys else []
    shapes = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(wanted[name])}"
        for name in wanted.keys() & tensors.keys()
        if tensors[name].shape != wanted[name]
    ]
    if shapes:
        faults.append(f"wrong shape: {listed(shapes)}")
    return faults


def load_strict(head: nn.Module, tensors: dict[str, Tensor], source: str | os.PathLike[str]) -> None:
    """Fill every tensor of ``head``: none missing, none left over, each of its shape, all finite.

    Raises:
        InputError: the faults, listed.
    """
    wanted = {name: tensor.shape for name, tensor in head.state_dict().items()}
    faults = differences(wanted, tensors)
    if faults:
        raise InputError(
            f"{source}: tensors do not fit a {getattr(head, 'name', type(head).__name__)} head of its configuration: "
            f"{'; '.join(faults)}. The checkpoint is damaged or of another layout"
        )
    check_tensors(tensors, source)
    head.load_state_dict(tensors, strict=True)


def resolve_folder(source: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint: a path, a checkpoint file's folder, or a hub id (downloaded into the hub's cache).

    Raises:
        InputError: neither a folder nor a hub id that can be fetched.
    """
    path = Path(source).expanduser()
    restore_replaced(path)
    if path.is_dir():
        return path
    if path.is_file():
        return path.parent
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        raise InputError(f"draft: {source} does not exist, expected a checkpoint folder or a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors", "*.bin", "*.pt"]))
    except Exception as error:  # the hub client raises its own, requests' and OS errors alike
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"draft: {source} is no folder here and could not be fetched from the hub ({reason}); "
            "check the name and the network, or give a folder"
        ) from error
