"""What a look at a machine and the device catalogue print as JSON, small and written by hand."""

from __future__ import annotations

from hetplan.cluster.devices import (
    DeviceKind,
    DeviceKinds,
    FigureSource,
    HostInterface,
    ScaleUpFabric,
)
from hetplan.machine.report import (
    MachineDevice,
    MachineInterface,
    MachineLimits,
    MachineMeasurement,
    MachineProcessor,
    MachineRdma,
    MachineReport,
    MachineStore,
    MachineTool,
    MachineTorch,
)

DEVICE_KINDS = DeviceKinds(
    kinds=(
        DeviceKind(
            kind="acme-one-80gb",
            vendor="acme",
            peak_flops_per_second=(("bfloat16", 4e14), ("int8", 8e14)),
            memory_bytes=80.0 * 2**30,
            memory_bandwidth_bytes_per_second=2e12,
            provenance="datasheet",
            source="Acme One datasheet",
            scale_up=ScaleUpFabric(
                name="AcmeLink 2",
                bandwidth_bytes_per_second=3e11,
                one_peer_bytes_per_second=1e11,
                peers=3,
            ),
            host=HostInterface(pcie_generation=5, lanes=16),
            max_power_watts=500.0,
            overlap_compute_slowdown=1.125,
            overlap_communication_slowdown=1.25,
            fused_attention="flash-attn",
            collectives="accl",
            torch_device="xla",
            driver_names=("ACME One",),
            sources=(FigureSource(figure="memory", source="Acme forum"),),
        ),
    )
)

MACHINE_REPORT = MachineReport(
    system="Linux 6.1.0",
    processor=MachineProcessor(
        model="Acme CPU",
        cores=8,
        usable_cores=4,
        cpu_quota_cores=2.5,
        numa_nodes=1,
        memory_bytes=2.0**35,
        available_bytes=2.0**34,
        memory_limit_bytes=0.0,
    ),
    devices=(
        MachineDevice(
            name="ACME Two",
            count=2,
            memory_bytes=80.0 * 2**30,
            driver="1.2.3",
            tool="acme-smi",
            torch_device="",
            kind="",
            nearest=("acme-one-80gb",),
        ),
    ),
    torch=MachineTorch(version="2.8.0", runtime="cpu", backends=("gloo",), device_types=()),
    interfaces=(
        MachineInterface(
            names=("eth0", "eth1"), state="up", bits_per_second=25e9, driver="acme", physical=True
        ),
    ),
    rdma=(
        MachineRdma(
            devices=("mlx5_0",),
            state="ACTIVE",
            bits_per_second=4e11,
            link_layer="InfiniBand",
            numa_nodes=(0,),
        ),
    ),
    limits=MachineLimits(
        container="docker",
        shared_memory_bytes=2.0**26,
        locked_memory_bytes=0.0,
        locked_unlimited=True,
        open_files=1024,
        rdma_visible=True,
        gpu_direct="nvidia_peermem",
    ),
    tools=(
        MachineTool(name="iperf3", present=False, purpose="TCP links", get="apt install iperf3"),
    ),
    stores=(MachineStore(place="~/profiles", kinds=("cpu",), links=("loopback",), samples=12),),
    measurements=(
        MachineMeasurement(what="layers on a CPU core", possible=True, how="hetplan profile"),
    ),
    advice=("ulimit -l unlimited",),
    problems=("acme-smi: exit code 9",),
)
