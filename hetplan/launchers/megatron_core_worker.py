"""One rank of a run with megatron-core: `python -m hetplan.launchers.megatron_core_worker FOLDER
RANK PARENT`; what it reads, writes and tells is as in `hetplan.launchers.worker`.
"""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta

from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.files.writing import write_atomically
from hetplan.launchers.run_folder import START_SECONDS, RunFolder
from hetplan.launchers.worker import main, meet
from hetplan.runtime.activity import Activity, Doing


def _train(folder: RunFolder, rank: int, activity: Activity) -> None:
    activity.begin("import of torch and megatron-core", doing=Doing.LOADS)
    import torch
    import torch.distributed as dist

    from hetplan.profiling.backends import open_backend
    from hetplan.runtime.training import SCHEMA, Training

    training = decode(read_document(folder.training), Training, schema=SCHEMA)
    torch.set_num_threads(1)
    on_cpu = training.backend == "cpu"
    # megatron-core warns of every library that it could use and does not find.
    warnings.simplefilter("ignore")
    if on_cpu:
        from hetplan.launchers import megatron_core_shim

        megatron_core_shim.install()
        megatron_core_shim.install_random()
    else:
        torch.cuda.set_device(rank)
    from hetplan.launchers.megatron_core_rank import train_with_core

    backend = open_backend(training.backend, index=0 if on_cpu else rank)
    start = timedelta(seconds=START_SECONDS + training.timeout_seconds)
    world_size = len(training.device_kinds)
    store = meet(folder, rank, world_size, start, activity)
    dist.init_process_group(
        "gloo" if on_cpu else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=start,
    )
    activity.begin("training with megatron-core", doing=Doing.STEPS)
    on_step = folder.tell if rank == 0 else None
    report = train_with_core(training, rank, backend, on_step=on_step)
    activity.begin("its end", doing=Doing.ENDS)
    if rank == 0:
        write_atomically(folder.report, encode(report, schema=folder.REPORT_SCHEMA))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _train))
