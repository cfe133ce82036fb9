"""The dtype choice: what was asked, or what is faster here."""

from __future__ import annotations

import time

import pytest
import torch

from specheads import hardware
from specheads.utils import InputError


def test_asked_dtypes_are_taken() -> None:
    assert hardware.choose_dtype("fp32", "cpu").dtype == torch.float32
    assert hardware.choose_dtype("bf16", "cpu").dtype == torch.bfloat16
    with pytest.raises(InputError, match="fp8"):
        hardware.choose_dtype("fp8", "cpu")


@pytest.mark.parametrize(
    ("bf16", "expected"), [(2000.0, torch.bfloat16), (380.0, torch.float32), (80.0, torch.float32)]
)
def test_auto_takes_bf16_where_it_is_clearly_faster(
    bf16: float, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "_auto", {})
    rates = {torch.bfloat16: bf16, torch.float32: 320.0}
    monkeypatch.setattr(hardware, "matmul_rate", lambda dtype, *shape, **options: rates[dtype])
    choice = hardware.choose_dtype("auto", "cpu")
    assert choice.dtype == expected
    assert f"{bf16:.0f} vs 320 GFLOPS" in choice.reason


def test_probe_is_short_and_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_auto", {})
    start = time.process_time()
    choice = hardware.choose_dtype("auto", "cpu")
    assert time.process_time() - start < 2.0  # one second of wall clock on a quiet machine
    assert choice.dtype in (torch.float32, torch.bfloat16)
    assert hardware.matmul_rate(torch.float32, 8, 16, 16, seconds=0.01) > 0
    assert hardware.processor_name()
