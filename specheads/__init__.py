"""Draft heads for frozen language models: train, measure, ship.

The names below are imported when they are first used, so that ``import specheads`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "SamplingParams": "specheads.types",
    "PlainDecoder": "specheads.decoding.baseline",
    "SpeculativeDecoder": "specheads.decoding.decoder",
    "build_decoders": "specheads.build",
    "load_checkpoint": "specheads.build",
    "load_draft": "specheads.checkpoints",
    "load_target": "specheads.target.load",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'specheads' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
