from contextlib import suppress

import pytest
from cluster_texts import DEFAULTS, cluster, island
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetplan.cluster.catalogue import load_catalogue
from hetplan.cluster.links import LossRecovery
from hetplan.cluster.load import load_cluster
from hetplan.errors import InputError

KINDS = load_catalogue()

TEXT = (
    cluster(
        {
            "north": island(
                "fast",
                device="nvidia-a100-80gb-sxm",
                more=(
                    "        nics: {per_node: 4, bandwidth: 200 Gbit/s, rails: 4}\n"
                    "        pcie_switches: 4\n"
                    "        numa_nodes: [0, 0, 0, 0, 1, 1, 1, 1]\n"
                    '        node_names: ["n[1-2]"]\n'
                    "        price: 2.5 USD/h\n"
                    "        power: 700 W\n"
                    "        power_cap: 300 W\n"
                    "        clock_ratio: 0.9\n"
                    "        speed_spread: 0.03\n"
                ),
            ).replace("bandwidth: 25 GB/s, ", ""),
            "south": island("slow"),
        },
        "region_links:\n"
        "  - between: [north, south]\n"
        "    bandwidth_shared: 100 Gbit/s\n"
        "    round_trip: 30 ms\n"
        "    streams: 8\n"
        "    window: 16 MiB\n"
        "    loss: 0.0001\n"
        "    segment: 8960 B\n"
        "    loss_recovery: go-back-n\n"
        "    price: 0.02 USD/GB\n"
        "    compute_share: 0.15\n"
        "    equal_cost_paths: 8\n"
        "sites:\n"
        "  - name: here\n"
        "    power_limit: 100 kW\n"
        "    energy_price: 0.09 USD/kWh\n"
        "    pue: 1.3\n",
    )
).replace("name: north\n", "name: north\n    site: here\n")


def faults(tmp_path, text: str) -> list[tuple[str, str]]:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    try:
        load_cluster(path, KINDS)
    except InputError as error:
        return [(fault.field, fault.message) for fault in error.faults if fault.line]
    return []


def test_a_file_with_every_figure_is_read(tmp_path):
    assert faults(tmp_path, TEXT) == []
    found = load_cluster(tmp_path / "cluster.yaml", KINDS)
    fast = found.island("fast")
    assert (fast.price_usd_per_device_hour, fast.power_watts) == (2.5, 700.0)
    assert (fast.power_cap_watts, fast.clock_ratio, fast.speed_spread) == (300.0, 0.9, 0.03)
    slow = found.island("slow")
    assert (slow.power_cap_watts, slow.clock_ratio, slow.speed_spread) == (None, 1.0, None)
    link = found.link_between("fast", "slow")
    assert (link.streams, link.window_bytes, link.loss) == (8, 16 * 2**20, 1e-4)
    assert (link.segment_bytes, link.price_usd_per_byte) == (8960.0, 0.02 / 1e9)
    assert (link.compute_share, link.equal_cost_paths) == (0.15, 8)
    assert link.loss_recovery is LossRecovery.GO_BACK_N
    assert fast.intra_node.loss_recovery is LossRecovery.RENO
    assert (fast.intra_node.compute_share, fast.intra_node.equal_cost_paths) == (0.0, None)
    assert link.latency_seconds == 0.015
    assert found.sites[0].regions == ("north",)
    assert found.site_of("north") is found.sites[0]
    assert (found.site_of("south"), found.sites[0].pue) == (None, 1.3)
    assert found.sites[0].price_usd_per_joule == pytest.approx(0.09 / 3.6e6)


ISLAND = "regions[0].islands[0]."
LINK = "region_links[0]."


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("per_node: 4", "per_node: 3", ISLAND + "nics.per_node"),
        ("rails: 4", "rails: 3", ISLAND + "nics.rails"),
        ("rails: 4", "of_device: [0, 0, 1, 1, 2, 2, 3, 4]", ISLAND + "nics.of_device[7]"),
        (
            "inter_node: {latency",
            "inter_node: {bandwidth: 26 GB/s, latency",
            ISLAND + "inter_node.bandwidth",
        ),
        ("[0, 0, 0, 0, 1, 1, 1, 1]", "[0, 0, 0, 1, 1, 1, 1]", ISLAND + "numa_nodes"),
        ('["n[1-2]"]', '["n[1-3]"]', ISLAND + "node_names"),
        ('["n[1-2]"]', '["n[1-99999999999]"]', ISLAND + "node_names[0]"),
        ("price: 2.5 USD/h", "price: 2.5", ISLAND + "price"),
        ("price: 2.5 USD/h", "price: 2.5 EUR/h", ISLAND + "price"),
        ("energy_price: 0.09 USD/kWh", "energy_price: 0.09 EUR/kWh", "sites[0].energy_price"),
        ("energy_price: 0.09 USD/kWh", "energy_price: -1 USD/kWh", "sites[0].energy_price"),
        ("pue: 1.3", "pue: 0.9", "sites[0].pue"),
        ("pue: 1.3", "pue: .nan", "sites[0].pue"),
        ("power: 700 W", "power: -700 W", ISLAND + "power"),
        ("power_cap: 300 W", "power_cap: 401 W", ISLAND + "power_cap"),
        ("power_cap: 300 W", "host_launch: 0 us", ISLAND + "host_launch"),
        ("power_cap: 300 W", "host_launch: 1 s", ISLAND + "host_launch"),
        ("speed_spread: 0.03", "speed_spread: 3", ISLAND + "speed_spread"),
        ("loss_recovery: go-back-n", "loss_recovery: go_back_n", LINK + "loss_recovery"),
        ("power_limit: 100 kW", "power_limit: 2 kW", "sites[0].power_limit"),
        ("site: here", "site: there", "regions[0].site"),
        ("    round_trip: 30 ms\n", "", LINK + "latency"),
        ("round_trip: 30 ms", "round_trip: 30 ms\n    latency: 15 ms", LINK + "round_trip"),
        ("    streams: 8\n", "", LINK + "window"),
        ("    loss: 0.0001\n", "", LINK + "segment"),
        ("    loss: 0.0001\n", "", LINK + "loss_recovery"),
        ("bandwidth_shared: 100 Gbit/s", "bandwidth: 100 Gbit/s", LINK + "bandwidth"),
        ("    bandwidth_shared: 100 Gbit/s\n", "", LINK + "bandwidth_per_device"),
        (
            "bandwidth_shared: 100 Gbit/s",
            "bandwidth_shared: 100 Gbit/s\n    bandwidth_per_device: 200 Gbit/s",
            LINK + "bandwidth_per_device",
        ),
        ("[north, south]", "[north, suoth]", LINK + "between[1]"),
        (
            "round_trip: 30 ms",
            "round_trip: 30 ms\n    transport: device-direct",
            LINK + "transport",
        ),
    ],
)
def test_faults(tmp_path, old, new, field):
    assert old in TEXT
    found = faults(tmp_path, TEXT.replace(old, new, 1))
    assert field in [place for place, _ in found], found


def test_a_region_link_spares_its_pairs_only(tmp_path):
    regions = {name: island(f"{name}1") + island(f"{name}2") for name in ("x", "y", "z")}
    rest = "region_links:\n  - {between: [y, x], bandwidth_per_device: 1 GB/s, latency: 1 ms}\n"
    found = faults(tmp_path, cluster(regions, rest))
    # Three pairs inside the regions, and four each between x and z and between y and z.
    assert len(found) == 11
    assert found[0][1].startswith("no link between islands x1 and x2; add `between: [x1, x2]`")
    assert found[-1][1].startswith("1 more pairs of islands have no link")
    listed = "links:\n  - {between: [z1, x1], bandwidth_per_device: 1 GB/s, latency: 1 ms}\n"
    found = faults(tmp_path, cluster(regions, rest + listed))
    assert len(found) == 10
    assert not any("x1 and z1" in message for _, message in found)


def test_the_first_form_keeps_its_meaning(tmp_path):
    old = "links:\n  - {between: [a, b], bandwidth: 1 GB/s, latency: 1 ms}\n"
    regions = {"r": island("a") + island("b")}
    assert faults(tmp_path, cluster(regions, old, schema="hetplan.cluster/1")) == []
    link = load_cluster(tmp_path / "cluster.yaml", KINDS).link_between("a", "b")
    assert link.bandwidth_bytes_per_second == link.among(64).bandwidth_bytes_per_second == 1e9
    ((field, _),) = faults(tmp_path, cluster(regions, old))
    assert field == "links[0].bandwidth"


def test_a_default_that_cannot_be_direct_is_said_once(tmp_path):
    regions = {
        "r": "".join(island(f"a{n}") for n in range(20))
        + "".join(island(f"n{n}", device="nvidia-a100-80gb-sxm") for n in range(20))
    }
    default = DEFAULTS.replace("latency: 20 us", "latency: 20 us, transport: device-direct")
    ((field, message),) = faults(tmp_path, cluster(regions, default))
    assert field == "links_default.within_region.transport"
    assert "a0 is amd and n0 is nvidia" in message


@given(data=st.data())
@settings(
    derandomize=True,
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_damaged_files_give_a_cluster_or_an_input_error(tmp_path, data):
    start = data.draw(st.integers(0, len(TEXT)))
    stop = data.draw(st.integers(start, min(len(TEXT), start + 30)))
    put = data.draw(
        st.sampled_from(
            ["", "x", "7", "[", "{", "]", "}", ":", "- ", "null", "\n", '"', "9" * 30, "-1", "[]"]
        )
    )
    path = tmp_path / "cluster.yaml"
    path.write_text(TEXT[:start] + put + TEXT[stop:])
    with suppress(InputError):
        load_cluster(path, KINDS)
