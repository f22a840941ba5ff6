import pytest
from counted_steps import steps_of

from hetplan.cluster.load import load_cluster
from hetplan.cluster.spec import Transport
from hetplan.errors import InputError
from hetplan.files.encoding import encode

TEXT = """schema: hetplan.cluster/1
name: small
regions:
  - name: north
    islands:
      - name: fast
        device: nvidia-a100-80gb-sxm
        nodes: 2
        devices_per_node: 8
        intra_node: {bandwidth: 300 GB/s, latency: 3 us}
        inter_node: {bandwidth: 200 Gbit/s, latency: 5 us, samples: roce}
  - name: south
    islands:
      - name: slow
        device: amd-mi210
        nodes: 4
        devices_per_node: 4
        intra_node: {bandwidth: 32 GB/s, latency: 3 us}
        inter_node:
          bandwidth: 100 Gbit/s
          latency: 5 us
          transport: host-staged
        memory: 60 GiB
        nodes_out: [3, 1]
links:
  - between: [slow, fast]
    bandwidth: 10 Gbit/s
    latency: 15 ms
"""


def write(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def faults(path):
    with pytest.raises(InputError) as caught:
        load_cluster(path)
    assert {fault.file for fault in caught.value.faults} == {str(path)}
    return [(fault.line, fault.field, fault.message) for fault in caught.value.faults]


def test_a_file_becomes_a_cluster(tmp_path):
    cluster = load_cluster(write(tmp_path, TEXT))
    fast, slow = cluster.islands
    assert cluster.regions == ("north", "south")
    assert (fast.num_devices, slow.num_devices) == (16, 16)
    assert fast.memory_bytes == 80 * 2**30
    assert slow.memory_bytes == 60 * 2**30
    assert slow.nodes_out == (1, 3)
    assert slow.usable_nodes == (0, 2)
    assert fast.inter_node.bandwidth_bytes_per_second == 25e9
    assert fast.inter_node.transport is Transport.DEVICE_DIRECT
    assert fast.inter_node.samples == "roce"
    assert slow.inter_node.transport is Transport.HOST_STAGED
    link = cluster.link_between("fast", "slow")
    assert link.latency_seconds == pytest.approx(0.015)
    assert link.bandwidth_bytes_per_second == 1.25e9
    assert link.transport is Transport.HOST_STAGED
    assert fast.device.peak("bfloat16") == 312e12


@pytest.mark.parametrize(
    ("change", "line", "field"),
    [
        (("300 GB/s", "300"), 10, "regions[0].islands[0].intra_node.bandwidth"),
        (("nvidia-a100-80gb-sxm", "nvidia-a100-80tb"), 7, "regions[0].islands[0].device"),
        (("name: slow", "name: fast"), 14, "regions[1].islands[0].name"),
        (("name: south", "name: north"), 12, "regions[1].name"),
        (("[slow, fast]", "[slow, fsat]"), 26, "links[0].between[1]"),
        (
            (
                "links:\n  - between: [slow, fast]\n    bandwidth: 10 Gbit/s\n    latency: 15 ms\n",
                "",
            ),
            1,
            "links",
        ),
        (("[3, 1]", "[3, 4]"), 24, "regions[1].islands[0].nodes_out[1]"),
        (("[3, 1]", "[0, 1, 2, 3]"), 24, "regions[1].islands[0].nodes_out"),
        (("60 GiB", "65 GiB"), 23, "regions[1].islands[0].memory"),
        (
            ("latency: 15 ms\n", "latency: 15 ms\n    transport: device-direct\n"),
            29,
            "links[0].transport",
        ),
        (
            (
                "latency: 15 ms\n",
                "latency: 15 ms\n  - {between: [fast, slow], bandwidth: 1 GB/s, latency: 1 ms}\n",
            ),
            29,
            "links[1].between",
        ),
        (("name: fast", "name: fast/1"), 6, "regions[0].islands[0].name"),
    ],
)
def test_faults(tmp_path, change, line, field):
    assert change[0] in TEXT
    found = faults(write(tmp_path, TEXT.replace(*change, 1)))
    assert (line, field) in [entry[:2] for entry in found], found


def test_faults_of_keys_types_and_rules_come_together(tmp_path):
    text = TEXT.replace("300 GB/s", "300").replace("amd-mi210", "amd-mi21").replace("[3, 1]", "[9]")
    text = text.replace("[slow, fast]", "[slow, quick]").replace("nodes: 2", "nodse: 2")
    assert [(line, field) for line, field, _ in faults(write(tmp_path, text))] == [
        (6, "regions[0].islands[0].nodes"),
        (8, "regions[0].islands[0].nodse"),
        (10, "regions[0].islands[0].intra_node.bandwidth"),
        (15, "regions[1].islands[0].device"),
        (24, "regions[1].islands[0].nodes_out[0]"),
        (25, "links"),
        (26, "links[0].between[1]"),
    ]


OWN = """devices:
  - kind: amd-mi210
    vendor: ours
    peak: {bfloat16: 256 TFLOP/s}
    memory_bandwidth: 1 TB/s
    provenance: measured
    source: our own measurements
"""


def test_a_file_may_bring_its_own_device_kinds(tmp_path):
    cluster = load_cluster(write(tmp_path, TEXT + OWN))
    device = cluster.islands[1].device
    assert (device.vendor, device.provenance) == ("ours", "measured")
    assert device.memory_bytes == 60 * 2**30
    text = (TEXT + OWN).replace("        memory: 60 GiB\n", "")
    (fault,) = faults(write(tmp_path, text))
    assert fault[:2] == (14, "regions[1].islands[0].memory")
    assert "required for device kind amd-mi210" in fault[2]
    wrong = faults(write(tmp_path, TEXT + OWN.replace("256 TFLOP/s", "256")))
    assert wrong[0][:2] == (32, "devices[0].peak.bfloat16")
    assert "256 TFLOP/s" in wrong[0][2]
    twice = faults(write(tmp_path, TEXT + OWN + OWN.removeprefix("devices:\n")))
    assert twice[0][1] == "devices[1].kind"


def test_loading_grows_with_islands_not_with_devices(tmp_path):
    few = write(tmp_path, TEXT)
    few_steps = steps_of(lambda: load_cluster(few))
    text = TEXT.replace("nodes: 2", "nodes: 6250").replace("nodes: 4", "nodes: 12500")
    path = write(tmp_path, text)
    assert steps_of(lambda: load_cluster(path)) == few_steps
    cluster = load_cluster(path)
    assert cluster.num_devices == 100_000
    assert len(encode(cluster, schema="hetplan.cluster-value")) < 10_000
