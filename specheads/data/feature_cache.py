"""Features on disk: safetensors shards of rows and an index, in a folder of its own for every set of inputs.

    <cache_dir>/<fingerprint>/index.json    what the features were made of, and the shards that stand
    <cache_dir>/<fingerprint>/shard-00000.safetensors

The fingerprint covers the target, the chat template, the layers, the dtype, the length limit, the rows' ids and masks
and the version of this format: with any of them changed, another folder is filled and the old one stays as it was.
Shards are read by memory map, so a cache larger than the memory works and a small one stays in it.

Legend: T positions, n captured layers, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specheads.data.tokenize import Encoded
from specheads.utils import InputError, atomic_path, write_json

FORMAT = 1
SHARD_ROWS = 64


@dataclass
class FeatureRow:
    """One row's training material. ``states[:, i]`` is the residual stream at the cache's i-th layer id."""

    input_ids: Tensor  # T int64
    loss_mask: Tensor  # T bool
    states: Tensor  # T n H, the target's dtype
    target_argmax: Tensor  # T int64


@dataclass(frozen=True)
class CacheKey:
    """Everything but the rows that features depend on."""

    target: str  # TargetConfig.fingerprint
    template: str  # tokenize.template_hash
    layer_ids: tuple[int, ...]  # sorted; the last is L
    hidden_size: int
    dtype: str
    max_length: int

    def fingerprint(self, rows: Sequence[Encoded]) -> str:
        """Digest of this key, the format and the rows (order, ids, masks)."""
        digest = hashlib.sha256(json.dumps([FORMAT, SHARD_ROWS, asdict(self)], sort_keys=True).encode())
        for row in rows:
            digest.update(json.dumps([row.id, row.input_ids, [int(flag) for flag in row.loss_mask]]).encode())
        return digest.hexdigest()[:16]


class FeatureCache:
    """Rows of features in a folder. ``open`` continues or begins one; ``row`` reads."""

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self.folder, self.index = folder, index
        self.layer_ids: tuple[int, ...] = tuple(index["key"]["layer_ids"])
        self.lengths: list[int] = index["lengths"]
        self.prompt_ids: list[str] = index["prompt_ids"]
        self.categories: list[str] = index["categories"]
        self._shards: dict[int, dict[str, Tensor]] = {}

    @classmethod
    def open(cls, cache_dir: str | Path, key: CacheKey, rows: Sequence[Encoded]) -> FeatureCache:
        """The cache of ``rows`` under ``cache_dir``: as it stands, or a new empty one beside whatever is there."""
        fingerprint = key.fingerprint(rows)
        folder = Path(cache_dir) / fingerprint
        if (folder / "index.json").exists():
            return cls.load(folder)
        index = {
            "format": FORMAT,
            "fingerprint": fingerprint,
            "key": {**asdict(key), "layer_ids": list(key.layer_ids)},
            "ids": [row.id for row in rows],
            "prompt_ids": [row.prompt_id for row in rows],
            "categories": [row.category for row in rows],
            "lengths": [len(row.input_ids) for row in rows],
            "shards": {},
        }
        write_json(folder / "index.json", index)
        return cls(folder, index)

    @classmethod
    def load(cls, folder: str | Path) -> FeatureCache:
        """A cache by its folder alone.

        Raises:
            InputError: no index, a broken one, or one of another format.
        """
        path = Path(folder) / "index.json"
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{path}: no such file; expected the folder of a feature cache") from None
        except ValueError as error:
            raise InputError(f"{path}: broken index ({error}); delete {path.parent} to compute it anew") from None
        if not isinstance(index, dict) or index.get("format") != FORMAT:
            found = index.get("format") if isinstance(index, dict) else None
            raise InputError(f"{path}: format {found!r}, expected {FORMAT}; delete {path.parent} to compute it anew")
        return cls(Path(folder), index)

    def __len__(self) -> int:
        return len(self.lengths)

    def path(self, shard: int) -> Path:
        """File of a shard."""
        return self.folder / f"shard-{shard:05d}.safetensors"

    def has_shard(self, shard: int) -> bool:
        """The index lists it and the file stands at its full size.

        Raises:
            InputError: the file is there with another size than was written.
        """
        size, path = self.index["shards"].get(str(shard)), self.path(shard)
        if size is None or not path.exists():
            return False
        if path.stat().st_size != size:
            raise InputError(
                f"{path}: {path.stat().st_size} bytes, expected {size}: the shard is damaged; "
                "delete that file and run again to compute it anew"
            )
        return True

    def write_shard(self, shard: int, rows: Sequence[FeatureRow]) -> None:
        """Store the rows of a shard, whole or not at all, and list it in the index.

        Raises:
            InputError: a state is not finite, or the disk is full.
        """
        states = torch.cat([row.states for row in rows])
        if not bool(torch.isfinite(states).all()):
            raise InputError(f"{self.path(shard)}: features are not finite; load the target with dtype fp32")
        lengths = torch.tensor([0] + [len(row.input_ids) for row in rows])
        tensors = {
            "states": states,
            "input_ids": torch.cat([row.input_ids for row in rows]).int(),
            "loss_mask": torch.cat([row.loss_mask for row in rows]),
            "target_argmax": torch.cat([row.target_argmax for row in rows]).int(),
            "offsets": lengths.cumsum(0),
        }
        try:
            with atomic_path(self.path(shard)) as temporary:
                save_file(tensors, temporary)
        except SafetensorError as error:  # this is how its writer reports a full disk
            raise InputError(f"{self.path(shard)}: could not be written ({error}); free some space") from None
        self.index["shards"][str(shard)] = self.path(shard).stat().st_size
        self._shards.pop(shard, None)
        write_json(self.folder / "index.json", self.index)

    def row(self, index: int) -> FeatureRow:
        """The ``index``-th row; ``states`` is a view of the mapped file (do not write to it).

        Raises:
            InputError: its shard is missing or damaged.
        """
        shard, at = divmod(index, SHARD_ROWS)
        tensors = self._shards.get(shard)
        if tensors is None:
            tensors = self._shards[shard] = self._read(shard)
        start, end = tensors["offsets"][at : at + 2].tolist()
        return FeatureRow(
            input_ids=tensors["input_ids"][start:end].long(),
            loss_mask=tensors["loss_mask"][start:end],
            states=tensors["states"][start:end],
            target_argmax=tensors["target_argmax"][start:end].long(),
        )

    def _read(self, shard: int) -> dict[str, Tensor]:
        path = self.path(shard)
        if not self.has_shard(shard):
            raise InputError(f"{path}: this shard was never finished; run the feature stage again, it continues there")
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: damaged shard ({error}); delete that file and run again") from None
