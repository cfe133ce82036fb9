"""What the heads of this package share: checks of their configuration, and the target as a teacher.

Legend: B rows, T positions, J teacher positions, H hidden size, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor

from specheads.losses import Alignment
from specheads.modules.draft_vocab import DraftVocab
from specheads.types import FrozenParts, HeadInputs
from specheads.utils import InputError

RANKS = 10  # best drafts of a step that evaluation counts


def check_fields(config: Mapping[str, Any], record: type, head: str) -> None:
    """Refuse a saved configuration that does not fit the dataclass ``record``.

    Raises:
        InputError: naming the fields that are missing or unknown.
    """
    known = {field.name: field.default is MISSING for field in fields(record)}
    missing = sorted(name for name, needed in known.items() if needed and config.get(name) is None)
    unknown = sorted(set(config) - set(known))
    if missing or unknown:
        raise InputError(
            f"head_config of a {head} head: missing {missing}, unknown {unknown}; the checkpoint is damaged or was "
            "written by another version"
        )


def check_options(given: Iterable[str], known: Iterable[str], head: str) -> None:
    """Refuse options that a head does not have.

    Raises:
        InputError: naming the first one.
    """
    for name in given:
        if name not in known:
            raise InputError(
                f"head.{name}: unknown option of a {head} head, expected one of {', '.join(sorted(known))}"
            )


def weights_version(head: torch.nn.Module) -> tuple[Any, ...]:
    """Changes whenever a parameter is trained, loaded or moved."""
    return tuple((p.data_ptr(), p.dtype, 0 if p.is_inference() else p._version) for p in head.parameters())


class TeacherRows:
    """The target's logits restricted to a draft vocabulary.

    Where the target's output is a plain product with its rows (no bias, scale or cap), only the D rows are computed;
    else the full logits are, chunk by chunk. The rows are gathered once for a target and a dtype.
    """

    def __init__(self) -> None:
        self._weight: weakref.ref[Tensor] | None = None
        self._rows: Tensor | None = None  # D H
        self._plain: bool | None = None

    def gather(self, parts: FrozenParts, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The output rows of ``ids`` (None = all) in ``dtype``: D H."""
        weight = parts.output_weight
        known = self._weight is not None and self._weight() is weight
        if not known or self._rows is None or self._rows.dtype != dtype or self._rows.device != weight.device:
            self._weight = weakref.ref(weight)
            self._rows = (weight if ids is None else weight[ids]).detach().to(dtype)
            self._plain = None
        return self._rows

    def prepare(self, parts: FrozenParts, ids: Tensor | None, dtype: torch.dtype, sample: Tensor) -> None:
        """Gather, and find out whether the target's output is plain. sample: some normed states [S, H]."""
        self.gather(parts, ids, dtype)
        if self._plain is not None:
            return
        weight = parts.output_weight
        full, plain = parts.lm_head(sample).float(), (sample.to(weight.dtype) @ weight.T).float()
        tolerance = max(1e-4, 1.5 * torch.finfo(weight.dtype).eps) * plain.abs().max()
        self._plain = full.shape == plain.shape and bool(((full - plain).abs() <= tolerance).all())

    def chunk(self, parts: FrozenParts, ids: Tensor | None, states: Tensor) -> Tensor:
        """Raw last states [c, H] -> logits [c, D] in the dtype of ``prepare``."""
        assert self._rows is not None
        normed = parts.norm(states)
        if self._plain:
            return normed.to(self._rows.dtype) @ self._rows.T
        logits = parts.lm_head(normed)
        return (logits if ids is None else logits.index_select(-1, ids)).to(self._rows.dtype)


def soft_targets(
    rows: TeacherRows, inputs: HeadInputs, parts: FrozenParts, plan: Alignment, vocab: DraftVocab, dtype: torch.dtype
) -> Callable[[slice], Tensor]:
    """The target's logits over the draft vocabulary, for a slice of the plan's teachers: [c, D]."""
    states = inputs.last_state.flatten(0, 1).index_select(0, plan.teachers)  # J H
    ids = None if vocab.is_full else vocab.ids
    with torch.no_grad():
        rows.prepare(parts, ids, dtype, parts.norm(states[:4]))

    def logits(chunk: slice) -> Tensor:
        return rows.chunk(parts, ids, states[chunk])

    return logits


def working_dtype(device: torch.device, weights: torch.dtype) -> torch.dtype:
    """What products run in: the autocast dtype, or that of the weights."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weights
