"""The texts of driver tools, of /proc and of /sys, in their documented forms and damaged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetplan.machine import devices, host, look
from hetplan.machine.devices import DRIVER_TOOLS, ListedDevice
from hetplan.machine.torch_child import MARK, parse_torch
from hetplan.profiling.backends import PLUGINS

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
CNMON = """\
Card 0
        Product Name                   : MLU370-X8
        Serial Number                  : 512207241041
        Driver Version                 : v5.10.22
        Physical Memory Usage          :
                Total                  : 49152 MiB
                Used                   : 0 MiB
Card 1
        Product Name                   : MLU370-X8
        Physical Memory Usage          :
                Total                  : 49152 MiB
"""
GMI = """\
==============MTHREADS-GMI LOG==============
Driver Version                               : 2.7.0
GPU0 00000000:3b:00.0
    Product Name                             : MTT S4000
    GPU UUID                                 : 1234-5678
    FB Memory Usage
        Total                                : 49152MiB
        Used                                 : 1MiB
"""
XPU = """\
{"device_list": [
  {"device_id": 0, "device_name": "Intel(R) Data Center GPU Max 1550", "uuid": "0000"},
  {"device_id": 1, "device_name": "Intel(R) Data Center GPU Max 1550"}]}
"""


def test_query_csv_of_nvidia_smi():
    one = ListedDevice(name="NVIDIA H100 80GB HBM3", memory_bytes=81559 * MIB, driver="560.35.03")
    last = ListedDevice(name="NVIDIA L4", memory_bytes=0.0, driver="560.35.03")
    assert devices.parse_query_csv(QUERY) == (one, one, last)


def test_query_csv_in_another_order_and_with_columns_nobody_asked_for():
    text = "index, memory.total [MiB], name\n0, 49140 MiB, NVIDIA L40S\n1, 49140 MiB\n"
    assert devices.parse_query_csv(text) == (
        ListedDevice(name="NVIDIA L40S", memory_bytes=49140 * MIB),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No devices were found\n",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        "name, memory.total [MiB]\n",
        "name, memory.total [MiB]\n???, 3 MiB\n",
    ],
)
def test_query_csv_without_devices(text):
    assert devices.parse_query_csv(text) == ()


def test_rocm_smi_in_both_spellings_and_after_a_warning():
    card = ListedDevice(name="AMD Instinct MI300X", memory_bytes=206141652992.0, driver="6.10.5")
    assert devices.parse_rocm_smi(ROCM) == (card, card)


def test_npu_smi_takes_chips_and_not_processes():
    chip = ListedDevice(name="Ascend910B2", memory_bytes=65536 * MIB, driver="24.1.rc3")
    assert devices.parse_npu_smi(NPU) == (chip, chip)


def test_blocks_of_cnmon_and_mthreads_gmi():
    assert devices.parse_blocks(CNMON) == (
        ListedDevice(name="MLU370-X8", memory_bytes=49152 * MIB, driver="v5.10.22"),
        ListedDevice(name="MLU370-X8", memory_bytes=49152 * MIB, driver="v5.10.22"),
    )
    assert devices.parse_blocks(GMI) == (
        ListedDevice(name="MTT S4000", memory_bytes=49152 * MIB, driver="2.7.0"),
    )


def test_xpu_smi():
    one = ListedDevice(name="Intel(R) Data Center GPU Max 1550")
    assert devices.parse_xpu_smi(XPU) == (one, one)
    assert devices.parse_xpu_smi('{"device_list": {"a": 1}}') == ()


ALL = "\n".join((QUERY, ROCM, NPU, CNMON, GMI, XPU))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(data=st.data())
def test_no_text_makes_a_parser_raise(data):
    sample = data.draw(st.sampled_from([QUERY, ROCM, NPU, CNMON, GMI, XPU, ALL]))
    start = data.draw(st.integers(0, len(sample)))
    stop = data.draw(st.integers(start, len(sample)))
    put = data.draw(
        st.one_of(
            st.text(max_size=20),
            st.sampled_from(["[" * 5000, '{"a":' * 3000, "9" * 5000, ",,,\n", "NaN", "\x00"]),
        )
    )
    text = sample[:start] + put + sample[stop:]
    for tool in DRIVER_TOOLS:
        for device in tool.parse(text):
            assert 0 <= device.memory_bytes < 1e30
            assert 0 < len(device.name) <= 66
            assert device.name.isprintable()
    for parse in (host.number, host.cpu_list_length, host.quota_cores):
        assert parse(text) >= 0
    assert host.group_limit_bytes(text) >= 0
    assert host.port_bits_per_second(text) >= 0
    assert host.speed_bits_per_second(text) >= 0
    host.port_state(text)
    host.processor_model(text)
    host.limit_of(text, "Max open files")
    parse_torch(text)
    parse_torch(MARK + text)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ("0-3\n", 4),
        ("0", 1),
        ("0-3,8,10-11", 7),
        ("", 0),
        ("3-0", 0),
        ("0-3,x", 0),
        ("0-99999999999", 0),
    ],
)
def test_lists_of_cpus(text, length):
    assert host.cpu_list_length(text) == length


def test_limits_of_control_groups():
    assert host.quota_cores("250000 100000") == 2.5
    assert host.quota_cores("max 100000") == 0
    assert host.quota_cores("-1 100000") == 0  # version 1: no quota
    assert host.quota_cores("1 0") == 0
    assert host.group_limit_bytes("1073741824\n") == 2**30
    assert host.group_limit_bytes("max") == 0
    assert host.group_limit_bytes("9223372036854771712") == 0  # version 1: no limit


def test_ports_and_interfaces():
    assert host.port_state("4: ACTIVE\n") == "ACTIVE"
    assert host.port_state("ACTIVE") == ""
    assert host.port_bits_per_second("2.5 Gb/sec (1X SDR)") == 2.5e9
    assert host.port_bits_per_second("400 GB/sec") == 0
    assert host.speed_bits_per_second("25000\n") == 25e9
    assert host.speed_bits_per_second("-1\n") == 0


def test_limits_of_the_process():
    text = "Max locked memory         unlimited            unlimited            bytes\n"
    assert host.limit_of(text, "Max locked memory") == (0.0, True)
    assert host.limit_of(text.replace("unlimited", "65536"), "Max locked memory") == (
        65536.0,
        False,
    )
    assert host.limit_of("", "Max locked memory") == (0.0, False)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("eth0", "eth0"), ("enxb83fd2112233", "enx*"), ("wg-10.20.30.40", "wg-*"), ("ib0", "ib0")],
)
def test_addresses_in_names_are_not_shown(name, shown):
    assert host.without_addresses(name) == shown


def test_what_can_be_measured_is_what_profiling_opens():
    assert ("cuda", *(plugin.name for plugin in PLUGINS)) == look.MEASURED_TYPES


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Traceback (most recent call last):\n  ImportError: no torch\n",
        MARK,
        MARK + "[]",
        MARK + '{"version": 3}',
        MARK + '{"version": "2.8',
        "2.8.0",
    ],
)
def test_answers_of_torch_that_are_none(text):
    assert parse_torch(text) is None


def test_an_answer_of_torch_with_odd_parts_keeps_the_rest():
    answer = parse_torch(
        MARK + '{"version": "2.8.0", "backends": ["gloo", 3], "devices": [7, {"type": "npu", '
        '"name": "Ascend910B2", "memory": "x"}, {"type": "npu", "name": "A", "memory": true}]}'
    )
    assert answer is not None
    assert answer.torch.backends == ("gloo",)
    assert answer.torch.device_types == ("npu",)
    assert [device.memory_bytes for device in answer.devices] == [0.0, 0.0]
