"""Engines: how the target writes its answers. One file each, one line in ``ENGINES``."""

from __future__ import annotations

from specheads.data.engines.batched import Answer, BatchedEngine, Request

ENGINES = {"batched": BatchedEngine}

__all__ = ["ENGINES", "Answer", "BatchedEngine", "Request"]
