"""The texts of driver tools, of /proc and of /sys, in their documented forms and damaged."""

from __future__ import annotations

from hetplan.machine import devices, host
from hetplan.machine.devices import ListedDevice

MIB = 2.0**20

QUERY = """\
name, memory.total [MiB], driver_version
NVIDIA H100 80GB HBM3, 81559 MiB, 560.35.03
NVIDIA H100 80GB HBM3, 81559 MiB, 560.35.03
NVIDIA L4, [N/A], 560.35.03
"""
ROCM = """\
WARNING: a clock is low
{"card1": {"Card Series": "AMD Instinct MI300X", "VRAM Total Memory (B)": "206141652992"},
 "card0": {"Card series": "AMD Instinct MI300X", "VRAM Total Memory (B)": "206141652992",
           "Serial Number": "123"},
 "system": {"Driver version": "6.10.5"}}
"""
NPU = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc3                 Version: 24.1.rc3                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B2               | OK            | 97.1        41                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3401 / 65536         |
+===========================+===============+====================================================+
| 1     910B2               | OK            | 95.0        40                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3399 / 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
"""


def test_lists_of_driver_tools() -> None:
    h100 = ListedDevice(name="NVIDIA H100 80GB HBM3", memory_bytes=81559 * MIB, driver="560.35.03")
    l4 = ListedDevice(name="NVIDIA L4", memory_bytes=0.0, driver="560.35.03")
    assert devices.parse_query_csv(QUERY) == (h100, h100, l4)
    other_order = "index, memory.total [MiB], name\n0, 49140 MiB, NVIDIA L40S\n1, 49140 MiB\n"
    l40s = ListedDevice(name="NVIDIA L40S", memory_bytes=49140 * MIB)
    assert devices.parse_query_csv(other_order) == (l40s,)
    # Two spellings of a key, after a warning.
    card = ListedDevice(name="AMD Instinct MI300X", memory_bytes=206141652992.0, driver="6.10.5")
    assert devices.parse_rocm_smi(ROCM) == (card, card)
    # Chips and not processes.
    chip = ListedDevice(name="Ascend910B2", memory_bytes=65536 * MIB, driver="24.1.rc3")
    assert devices.parse_npu_smi(NPU) == (chip, chip)


def test_files_of_proc_and_sys() -> None:
    quotas = {"250000 100000": 2.5, "max 100000": 0, "-1 100000": 0, "1 0": 0, " ": 0}
    assert {text: host.quota_cores(text) for text in quotas} == quotas
    limits = {"1073741824\n": 2**30, "max": 0, "9223372036854771712": 0}
    assert {text: host.group_limit_bytes(text) for text in limits} == limits
    assert host.port_state("4: ACTIVE\n") == "ACTIVE"
    assert host.port_state("ACTIVE") == ""
    assert host.port_bits_per_second("2.5 Gb/sec (1X SDR)") == 2.5e9
    assert host.port_bits_per_second("400 GB/sec") == 0
    names = {"eth0": "eth0", "enxb83fd2112233": "enx*", "wg-10.20.30.40": "wg-*"}
    assert {name: host.without_addresses(name) for name in names} == names
