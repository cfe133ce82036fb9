"""placeholder while the fast path is measured"""
from __future__ import annotations
from typing import Any
from specheads.target.adapter import StockTarget
from transformers import PreTrainedModel

def unsupported_reason(model: PreTrainedModel) -> str | None:
    return "not yet"

class LeanTarget(StockTarget):
    def __init__(self, *args: Any, pack: bool = True) -> None:
        super().__init__(*args)
