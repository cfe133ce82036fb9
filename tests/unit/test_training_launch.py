"""Which launch routes are what they seem: two processes train as one does, and the false ones are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from accelerate import tracking
from accelerate.tracking import GeneralTracker
from tiny_training import make_trainer

from specheads import hardware
from specheads.training import launch
from specheads.training.launch import check_launch
from specheads.utils import InputError

PROGRAM = Path(__file__).with_name("tiny_training.py")
CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no"}
RANKED = {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plain = {k: v for k, v in os.environ.items() if k not in RANKED and not k.startswith("ACCELERATE")}
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True, text=True, timeout=120, env={**plain, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] in ("train", "eval")]


@pytest.mark.parametrize(
    ("environment", "gpus", "message"),
    [
        ({}, 0, None),
        (LAUNCHED, 0, None),
        (RANKED, 0, None),
        ({**LAUNCHED, **RANKED}, 0, None),
        ({**LAUNCHED, **RANKED}, 2, None),
        ({"MASTER_ADDR": "node1"}, 0, None),  # a cluster's own variable, nothing launched
        ({**LAUNCHED, "MASTER_ADDR": "127.0.0.1"}, 0, "started only this one"),
        ({**LAUNCHED, **RANKED, "ACCELERATE_USE_FSDP": "true"}, 0, "got FSDP"),
        ({**LAUNCHED, **RANKED, "ACCELERATE_USE_DEEPSPEED": "true"}, 0, "got DeepSpeed"),
        (RANKED, 1, "2 processes on a machine with 1 GPU"),
    ],
)
def test_routes(environment: dict[str, str], gpus: int, message: str | None) -> None:
    if message is None:
        check_launch(environment, gpus)
    else:
        with pytest.raises(InputError, match=message):
            check_launch(environment, gpus)


def test_auto_is_what_the_main_process_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = hardware.DtypeChoice(torch.float32, "measured by the second process")
    theirs = hardware.DtypeChoice(torch.bfloat16, "measured by the main process")
    sent: list[object] = []

    def broadcast(values: list[object]) -> None:
        sent.extend(values)
        if values == [None]:
            values[0] = theirs

    monkeypatch.setattr(hardware, "_auto", {})
    monkeypatch.setattr(launch, "broadcast_object_list", broadcast)
    monkeypatch.setattr(hardware, "_probe", lambda device: mine)
    second: Any = SimpleNamespace(num_processes=2, is_main_process=False, device=torch.device("cpu"))
    launch.share_dtype_probe(second)
    assert sent == [None]
    assert hardware.choose_dtype("auto", "cpu") == theirs

    monkeypatch.setattr(hardware, "_auto", {})
    launch.share_dtype_probe(SimpleNamespace(num_processes=2, is_main_process=True, device="cpu"))  # type: ignore[arg-type]
    assert sent == [None, mine]


class FakeBoard(GeneralTracker):
    """Stands for a tracker whose package is installed."""

    name = "tensorboard"
    requires_logging_directory = True
    told: ClassVar[list[tuple[str, Any]]] = []

    def __init__(self, run_name: str, logging_dir: str, **_: Any) -> None:
        super().__init__()
        self.told.append(("made", (run_name, Path(logging_dir))))

    @property
    def tracker(self) -> FakeBoard:
        return self

    def start(self) -> None: ...

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append(("config", values))

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.told.append(("log", (step, values)))

    def finish(self) -> None:
        self.told.append(("finish", None))


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", FakeBoard)
    monkeypatch.setattr(tracking, "_available_trackers", [tracking.LoggerType.TENSORBOARD])
    monkeypatch.setattr(FakeBoard, "told", [])
    return FakeBoard.told


def test_a_tracker_gets_the_recipe_and_the_numbers_and_is_closed(board: list[tuple[str, Any]], tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=2, trackers=["tensorboard"])
    with launch.tracking(trainer.accelerator, {"training": {"max_steps": 2}, "target": {"name": "tiny"}}):
        trainer.run()
    assert board[:2] == [
        ("made", ("specheads", tmp_path)),
        ("config", {"training.max_steps": "2", "target.name": "tiny"}),
    ]
    assert [what for what, _ in board].count("finish") == 1
    assert board[-1][0] == "finish"
    logged = [value for what, value in board if what == "log"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [values["train/loss"] for _, values in logged if "train/loss" in values] == [
        line["loss"] for line in lines if line["kind"] == "train"
    ]
    assert {step for step, _ in logged} == {1, 2}


def test_a_tracker_is_closed_after_an_error_too(board: list[tuple[str, Any]], tmp_path: Path) -> None:
    accelerator = launch.make_accelerator(cpu=True, trackers=["tensorboard"], folder=tmp_path)
    with pytest.raises(InputError, match="stopped"), launch.tracking(accelerator, {}):
        raise InputError("stopped")
    assert board[-1][0] == "finish"


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_available_trackers", [tracking.LoggerType.TENSORBOARD])
    with pytest.raises(InputError, match=r"training\.trackers: got wandb, .*pip install wandb"):
        launch.make_accelerator(cpu=True, trackers=["tensorboard", "wandb"])


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Same global batches, one row of them wholly masked: neither rank waits for ever, and the losses agree."""
    settings = ["max_steps=6", "save_every=3", "eval_every=3", "silent=[0,3]", "accumulate=2"]
    one = run("accelerate.commands.launch", "--config_file", str(CONFIGS / "cpu-1.yaml"), str(PROGRAM),
              str(tmp_path / "one"), *settings, TINY_DROPOUT="0")  # fmt: skip
    assert one.returncode == 0, one.stderr
    two = run("accelerate.commands.launch", "--config_file", str(CONFIGS / "cpu-2.yaml"), str(PROGRAM),
              str(tmp_path / "two"), *settings, TINY_DROPOUT="0")  # fmt: skip
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("step 6") == 1  # the callbacks of one process only
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)
    assert (tmp_path / "two/checkpoints/step-000006/model.safetensors").exists()

    # resume with another number of processes is refused, with the same number it is done at once
    mixed = run("torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(PROGRAM), str(tmp_path / "one"),
                *settings, TINY_DROPOUT="0")  # fmt: skip
    assert mixed.returncode != 0
    assert "resume: processes is 2" in mixed.stderr


@pytest.mark.slow
def test_a_launch_that_starts_one_process_for_two_is_refused(tmp_path: Path) -> None:
    result = run("accelerate.commands.launch", "--cpu", "--num_processes", "2", str(PROGRAM), str(tmp_path))
    assert result.returncode != 0
    assert "started only this one" in result.stderr
    assert not (tmp_path / "metrics.jsonl").exists()
