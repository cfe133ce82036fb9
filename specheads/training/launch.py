"""One door to accelerate: a process group that is truly as large as the launcher was asked for.

Without a GPU, accelerate has routes that exit 0 and train wrongly: ``accelerate launch --cpu --num_processes 2`` and
a ``MULTI_CPU`` config file start *one* process; ``torchrun`` and ``--multi_gpu`` start two processes which, unless
accelerate is told of the CPU before its state exists, each believe they are alone and overwrite each other's files.
Here the CPU is chosen explicitly (so the second group works, over gloo) and the first is recognised and refused.
"""

from __future__ import annotations

import atexit
import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import ProjectConfiguration, broadcast_object_list

from specheads.hardware import adopt_dtype, choose_dtype
from specheads.utils import InputError

TWO_PROCESSES = "accelerate launch --config_file configs/accelerate/cpu-2.yaml -m specheads train RECIPE"
MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def make_accelerator(
    *, cpu: bool | None = None, trackers: Sequence[str] = (), folder: str | os.PathLike[str] | None = None
) -> Accelerator:
    """The Accelerator of this process. Call it once, before anything else touches accelerate.

    ``cpu``: None = the CPU where no GPU is present. ``trackers``: see ``tracking``; those that write files do so under
    ``folder``. Precision is the trainer's own business (autocast), so the launcher's ``mixed_precision`` is not used.

    Raises:
        InputError: the launcher asked for more processes than this run would really have, for more processes on this
            machine than it has GPUs, or for sharded training (FSDP, DeepSpeed); see ``check_trackers``.
    """
    check_trackers(trackers)
    on_cpu = not torch.cuda.is_available() if cpu is None else cpu
    check_launch(os.environ, gpus=0 if on_cpu else torch.cuda.device_count())
    asked = max(int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", *MPI_SIZES))
    accelerator = Accelerator(
        cpu=on_cpu,
        mixed_precision="no",
        log_with=list(trackers) or None,
        project_config=ProjectConfiguration(project_dir=None if folder is None else str(folder)),
    )
    if accelerator.num_processes != asked:
        raise InputError(
            f"launch: {asked} processes were started, but accelerate sees {accelerator.num_processes}: this would be "
            f"{asked} independent trainings writing the same files. Make the accelerator before any other use of "
            f"accelerate, or start with: {TWO_PROCESSES}"
        )
    if on_cpu and accelerator.num_processes > 1:
        atexit.register(leave_group)
    return accelerator


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers whose package is not there: accelerate itself would leave them out without a word.

    Raises:
        InputError: the first of them.
    """
    for name in names:
        if name not in map(str, get_available_trackers()):
            raise InputError(
                f"training.trackers: got {name}, whose package is not installed; pip install {name}, or drop it "
                "(metrics.jsonl holds the same numbers)"
            )


@contextmanager
def tracking(accelerator: Accelerator, config: Mapping[str, Any]) -> Iterator[None]:
    """Open the accelerator's trackers, tell them ``config`` (sections of keys), and close them whatever happens.

    The process group stays, unlike with ``end_training``: the caller may still need it.
    """
    flat = {f"{section}.{key}": str(value) for section, keys in config.items() for key, value in keys.items()}
    accelerator.init_trackers("specheads", config=flat)
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
        accelerator.trackers.clear()


def share_dtype_probe(accelerator: Accelerator) -> None:
    """Let ``dtype: auto`` mean on every process what the main one measures: timings of their own may differ.

    A collective. The others wait, so the main process measures undisturbed.
    """
    if accelerator.num_processes == 1:
        return
    choices = [choose_dtype("auto", accelerator.device) if accelerator.is_main_process else None]
    broadcast_object_list(choices)
    if choices[0] is not None:
        adopt_dtype(choices[0], accelerator.device)


def leave_group() -> None:
    """End the gloo group before the interpreter ends.

    A worker thread of gloo frees the tensors of the last collective by itself. If the interpreter is already going
    down, that aborts the process ("terminate called without an active exception") after all work is done and saved.
    """
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()  # the group's destructor joins its threads
    time.sleep(0.2)  # and where something still holds the group, its threads get their turn


def check_launch(environment: Mapping[str, str], gpus: int) -> None:
    """Refuse launch routes that would train something else than was asked for. ``gpus``: GPUs of this machine, 0 = CPU.

    Raises:
        InputError: see ``make_accelerator``.
    """
    for flag, name in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if environment.get(flag, "false").lower() == "true":
            raise InputError(
                f"launch: got {name}, expected data parallel or one process (a draft head fits on one device and is "
                f"not sharded); drop the {name} option of accelerate launch"
            )
    launched = "ACCELERATE_MIXED_PRECISION" in environment  # accelerate launch always sets it
    alone = not any(name in environment for name in ("LOCAL_RANK", *MPI_SIZES))
    if launched and alone and "MASTER_ADDR" in environment:
        # its simple launcher announces a rendezvous for several processes, and starts one
        raise InputError(
            "launch: accelerate was asked for several processes but started only this one (it does so for --cpu and "
            f"for distributed_type MULTI_CPU). Start with: {TWO_PROCESSES}; or unset MASTER_ADDR for one process"
        )
    local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if gpus and local > gpus:
        raise InputError(
            f"launch: {local} processes on a machine with {gpus} GPU(s), expected at most one each; lower "
            "--num_processes, or hide the GPUs (CUDA_VISIBLE_DEVICES=-1) to train on the CPU"
        )
