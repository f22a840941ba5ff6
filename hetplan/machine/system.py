"""Processor, memory and the limits that a container or a login puts on a training run."""

from __future__ import annotations

from hetplan.machine.probe import Probe
from hetplan.machine.system_text import (
    container_of,
    cpu_list_length,
    field_of,
    finite,
    group_limit_bytes,
    kilobytes,
    limit_of,
    module_loaded,
    processor_model,
    quota_cores,
)
from hetplan.machine.values import MachineLimits, MachineProcessor

# nv_peer_mem is the older name of the same module.
_GPU_DIRECT = ("nvidia_peermem", "nv_peer_mem")


def find_processor(probe: Probe) -> MachineProcessor:
    """What /proc and /sys tell about processor and memory."""
    memory = probe.text("proc/meminfo")
    cores = cpu_list_length(probe.text("sys/devices/system/cpu/online"))
    usable = cpu_list_length(field_of(probe.text("proc/self/status"), "Cpus_allowed_list"))
    version_1 = _version_1_quota(probe)
    limit = group_limit_bytes(probe.text("sys/fs/cgroup/memory.max")) or group_limit_bytes(
        probe.text("sys/fs/cgroup/memory/memory.limit_in_bytes")
    )
    return MachineProcessor(
        model=processor_model(probe.text("proc/cpuinfo")),
        cores=cores,
        usable_cores=min(usable, cores) if cores else usable,
        cpu_quota_cores=quota_cores(probe.text("sys/fs/cgroup/cpu.max")) or version_1,
        numa_nodes=cpu_list_length(probe.text("sys/devices/system/node/online")),
        memory_bytes=kilobytes(memory, "MemTotal"),
        available_bytes=kilobytes(memory, "MemAvailable"),
        memory_limit_bytes=limit,
    )


def _version_1_quota(probe: Probe) -> float:
    quota = probe.text("sys/fs/cgroup/cpu/cpu.cfs_quota_us").strip()
    period = probe.text("sys/fs/cgroup/cpu/cpu.cfs_period_us").strip()
    return quota_cores(f"{quota} {period}")


def find_limits(probe: Probe) -> MachineLimits:
    """Limits that end a training run in the middle, and what RDMA needs."""
    limits = probe.text("proc/self/limits")
    locked, unlimited = limit_of(limits, "Max locked memory")
    files, _ = limit_of(limits, "Max open files")
    return MachineLimits(
        container=container_of(
            probe.text("proc/1/cgroup"),
            docker_file=probe.exists(".dockerenv"),
            podman_file=probe.exists("run/.containerenv"),
            kubernetes=probe.exists("var/run/secrets/kubernetes.io"),
        ),
        shared_memory_bytes=finite(probe.space(probe.root / "dev/shm"))
        if probe.exists("dev/shm")
        else 0.0,
        locked_memory_bytes=locked,
        locked_unlimited=unlimited,
        open_files=int(files),
        rdma_visible=any(name.startswith("uverbs") for name in probe.names("dev/infiniband")),
        gpu_direct=module_loaded(probe.text("proc/modules"), _GPU_DIRECT),
    )
