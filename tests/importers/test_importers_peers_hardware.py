"""Sailor's network fits, Galvatron's and SimuMax's files: figures come out, traps are named."""

from __future__ import annotations

import copy
import json
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from importers_peer_files import DEVICE, context, gpt, simumax_data

from hetplan.errors import InputError
from hetplan.importers import galvatron, sailor_network, simumax
from hetplan.importers.sailor_network import STATED_BYTES
from hetplan.job.spec import Precision

# ---- Sailor's network


def network(leaf: object, *, name: str = "X200-64") -> str:
    return json.dumps({name: {"2": leaf}}, indent=1)


def sailor_bandwidth(a: float, b: float, c: float, size: float) -> float:
    """Bytes per second, by the definition in the reference's README."""
    exponent = math.log2(size / 1e6)
    return (a * exponent**2 + b * exponent + c) * 1e9


coefficient = st.floats(min_value=-5.0, max_value=50.0, allow_nan=False)


@given(st.floats(-3.0, 3.0), coefficient, coefficient, st.floats(1e6, 1e12))
def test_figures_are_the_parabola_where_it_is_positive_and_rises(
    a: float, b: float, c: float, most: float
) -> None:
    imported = sailor_network.parse(network([[a, b, c], most]), context("net.json"))
    figures = {path.message_bytes: path.bandwidth_bytes_per_second for path in imported.paths}
    assert figures.pop(None) == most
    previous = 0.0
    for size, figure in sorted(figures.items()):  # type: ignore[type-var]
        assert figure is not None
        assert 0 < figure <= most
        # Rising, but for rounding.
        assert figure >= previous * (1 - 1e-9)
        assert figure == pytest.approx(min(sailor_bandwidth(a, b, c, size), most), rel=1e-9)
        previous = figure
    refused = [size for size in STATED_BYTES if size not in figures]
    for size in refused:
        here = sailor_bandwidth(a, b, c, size)
        # Smaller messages are faster, but for rounding at the very top or bottom.
        assert here <= 0 or sailor_bandwidth(a, b, c, size * 0.999999) >= here * (1 - 1e-8)
    assert bool(refused) == bool(imported.skipped)


@given(st.floats(0.01, 3.0), st.floats(0.1, 20.0), st.floats(-20.0, 0.0), st.booleans())
def test_the_size_below_which_a_fit_is_negative_is_its_root(
    a: float, b: float, c: float, falling: bool
) -> None:
    a = -a if falling else a
    assume(b * b - 4 * a * c > 0)
    imported = sailor_network.parse(network([[a, b, c], 1e12]), context("net.json"))
    said = [line for line in imported.skipped if "negative below" in line]
    for line in said:
        root = float(line.split("negative below ")[1].split()[0])
        assert sailor_bandwidth(a, b, c, root) == pytest.approx(0.0, abs=2e9 * b / root + 1e6)
        assert sailor_bandwidth(a, b, c, root * 1.01) > 0


def test_a_fit_without_a_good_size_and_one_without_a_measurement_are_skipped() -> None:
    data = {"a": [[-1.0, 0.5, -2.0], 1e9], "b": [[0.0, 0.0, 0.0], 0], "c": [[0, 0, 2.5], 9e9]}
    imported = sailor_network.parse(json.dumps(data), context("net.json"))
    assert [line.split(": ", 1)[1] for line in imported.skipped] == [
        "a: the parabola is negative or falls at every size",
        "b: largest bandwidth 0 B/s, not measured",
    ]
    assert {path.measured for path in imported.paths} == {"send/recv a", "send/recv c"}
    constant = [path for path in imported.paths if path.measured == "send/recv c"]
    assert len(constant) == len(STATED_BYTES) + 1


def test_copies_of_another_gpus_fit_are_noted_and_directions_are_not() -> None:
    fit, other = [[0.1, 2.0, 3.0], 9e9], [[0.2, 1.0, 3.0], 9e9]
    data = {
        "A": {"2": fit, "4": fit},
        "B": {"2": fit},
        "zone-1": {"zone-2": other},
        "zone-2": {"zone-1": other},
    }
    imported = sailor_network.parse(json.dumps(data, indent=1), context("net.json"))
    notes = [note for note in imported.notes if "copy" in note]
    assert notes == [
        "line 3 A 2 and line 21 B 2 are equal to the last digit (3 fits in all): one is a copy"
    ]


def test_many_copies_do_not_flood_the_notes() -> None:
    data = {f"{gpu}{at}": [[0.1, 2.0, float(at)], 9e9] for gpu in ("a", "b") for at in range(100)}
    imported = sailor_network.parse(json.dumps(data), context("net.json"))
    assert len(imported.notes) == 22
    assert imported.notes[-1] == "80 more groups of names have equal fits"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "the file holds no fit"),
        ('{"a": 1.5}', "a: found 1.5; a fit"),
        ('{"a": [[1, 2], 3]}', "found 2 coefficients; a parabola has three"),
        ('{"a": [[1, 2, "3"], 3]}', "found the text 3; write a number"),
        ('{"a": [1, 2]}', "found 1; a list is expected"),
        ('{"a": [[1, 2, 3], null]}', "found null; write a number"),
        ('{"a": [[1, 2, 1e999], 1]}', "found inf; write a number"),
        ('{"a": null}', "found null; a fit"),
        ('{"a": [[1,2,3],4], "a": 1}', "this key is already on line 1"),
        ('{"\\ud800": {"\\n": 1}}', "found 1; a fit"),
    ],
)
def test_what_is_wrong_in_a_network_file_is_named(text: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        sailor_network.parse(text, context("net.json"))


def test_a_wrong_file_gives_a_screen_of_faults_and_not_thousands() -> None:
    text = json.dumps({str(at): at for at in range(5000)})
    with pytest.raises(InputError) as error:
        sailor_network.parse(text, context("net.json"))
    assert len(error.value.faults) == 31
    assert "4970 more faults" in str(error.value)


# ---- Galvatron

COMPUTATION = "computation_profiling_bf16_tiny.json"


@given(
    st.dictionaries(
        st.tuples(st.integers(1, 256), st.integers(1, 65536)),
        st.floats(1e-3, 1e5),
        min_size=1,
        max_size=6,
    )
)
def test_galvatron_layer_times_come_back_as_they_were_written(
    times: dict[tuple[int, int], float],
) -> None:
    data: dict[str, float] = {"layernum[2]_bsz8_seq4096": 96.0}
    for (batch, sequence), per_sample in times.items():
        data[f"layertype_0_bsz{batch}_seq{sequence}"] = per_sample
        data[f"layertype_other_bsz{batch}_seq{sequence}"] = 1.0
    imported = galvatron.parse(json.dumps(data), context(COMPUTATION, model=gpt()))
    found = {
        (each.microbatch_size, each.sequence_length): each.median_seconds
        for each in imported.layers
    }
    assert found == pytest.approx(
        {key: value / 1e3 * key[0] for key, value in times.items()}, rel=1e-12
    )
    assert {
        (each.device, each.layer, each.phase, each.precision, each.tp) for each in imported.layers
    } == {(DEVICE, "transformer", "forward", "bfloat16", 1)}
    assert any(note.startswith("not imported: layernum[2]_bsz8_seq4096") for note in imported.notes)


@given(
    st.dictionaries(
        st.tuples(st.sampled_from((2, 4, 8, 16)), st.booleans()), st.floats(1e-3, 1e4), min_size=1
    ),
    st.dictionaries(st.sampled_from((2, 4, 8, 16)), st.floats(1e-3, 1e4)),
)
def test_galvatron_bandwidths_come_back_as_they_were_written(
    reduces: dict[tuple[int, bool], float], pipelines: dict[int, float]
) -> None:
    data = {
        f"allreduce_size_{ranks}_consec_{int(together)}": rate
        for (ranks, together), rate in reduces.items()
    } | {f"pp_size_{stages}": rate for stages, rate in pipelines.items()}
    imported = galvatron.parse(json.dumps(data), context("allreduce_bandwidth.json"))
    assert [path.bandwidth_bytes_per_second for path in imported.paths] == pytest.approx(
        [rate * 1e9 for rate in (*reduces.values(), *pipelines.values())]
    )
    assert [path.measured for path in imported.paths] == [
        *(
            f"all_reduce bus bandwidth, {ranks} "
            + ("consecutive ranks" if together else "ranks spread over the job")
            for ranks, together in reduces
        ),
        *(f"send/recv bandwidth, pipeline of {stages} stages" for stages in pipelines),
    ]
    assert any("MiB/ms" in note for note in imported.notes)


@given(
    st.dictionaries(
        st.tuples(
            st.sampled_from(("allreduce", "all2all")),
            st.sampled_from((2, 4, 8)),
            st.integers(1, 2048),
        ),
        st.floats(1e-3, 1e5),
        min_size=1,
    )
)
def test_galvatron_times_of_collectives_become_link_samples(
    times: dict[tuple[str, int, int], float],
) -> None:
    data = {f"{name}_size_{ranks}_{size}MB_time": ms for (name, ranks, size), ms in times.items()}
    imported = galvatron.parse(json.dumps(data), context("sp_time.json", link="fabric"))
    words = {"all_reduce": "allreduce", "all_to_all": "all2all"}
    assert {
        (words[each.operation], each.group_size, each.message_bytes // 2**20): each.median_seconds
        for each in imported.links
    } == pytest.approx({key: value / 1e3 for key, value in times.items()}, rel=1e-12)
    assert {each.link for each in imported.links} == {"fabric"}


def test_galvatron_rows_that_mean_nothing_are_skipped_with_their_line() -> None:
    data = {
        "layertype_0_bsz8_seq128": 1.0,
        "layertype_0_bsz1_seq128": -0.5,
        "layertype_1_bsz8_seq128": 2.0,
        "layertype_0_bsz4_seq128": 0,
    }
    imported = galvatron.parse(json.dumps(data, indent=0), context(COMPUTATION, model=gpt()))
    assert imported.skipped == (
        "line 3: layertype_0_bsz1_seq128: -0.5, not measured",
        "line 4: layertype_1_bsz8_seq128: the model has one type of transformer layer, layertype_0",
        "line 5: layertype_0_bsz4_seq128: 0, not measured",
    )
    links = {"allreduce_size_1_8MB_time": 1.0, "all2all_size_4_0MB_time": 1.0}
    imported = galvatron.parse(json.dumps(links), context("sp_time.json", link="fabric"))
    assert not imported.links
    assert len(imported.skipped) == 2


def test_a_galvatron_key_without_sizes_takes_them_from_the_user() -> None:
    text = json.dumps({"layertype_0": 4.0})
    with pytest.raises(InputError, match="sequence length; name it"):
        galvatron.parse(text, context(COMPUTATION, model=gpt()))
    imported = galvatron.parse(text, context(COMPUTATION, model=gpt(), sequence_length=256))
    assert (imported.layers[0].microbatch_size, imported.layers[0].sequence_length) == (1, 256)
    assert any("microbatch 1" in note for note in imported.notes)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, "no key of a Galvatron profile"),
        ({"layernum[2]_bsz8_seq128": 3.0}, "found layernum"),
        ({"layertype_0": {"128": {"parameter_size": 1}}}, "memory profile"),
        ({"1_1_8": {"layernum[1]_bsz8_seq128_rank0_ms": 1}}, "memory profile"),
        ({"other_memory_pp_off": {}}, "memory profile"),
        ({"layertype_0_bsz8_seq128": "4"}, "found the text 4; write a number"),
        ({"layertype_0_bsz8_seq128": [4]}, "found a list; write a number"),
        ({"layertype_0_bsz0_seq128": 4}, "batch size and sequence length are at least 1"),
        ({"allreduce_size_8_consec_1": None}, "found null; write a number"),
        ({"allreduce_size_8_1MB_time": 1.0}, "name the link"),
        ({"overlap_coe": -1}, "more than 0"),
    ],
)
def test_what_is_wrong_in_a_galvatron_file_is_named(data: object, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        galvatron.parse(json.dumps(data), context(COMPUTATION, model=gpt()))


def test_the_precision_of_a_galvatron_file_is_that_of_its_name() -> None:
    text = json.dumps({"layertype_0_bsz8_seq128": 4.0})
    with pytest.raises(InputError, match=r"float32 was given, and the name .* says bfloat16"):
        galvatron.parse(text, context(COMPUTATION, model=gpt(), precision=Precision.FLOAT32))
    with pytest.raises(InputError, match="the file's name does not say the precision"):
        galvatron.parse(text, context("times.json", model=gpt()))
    named = context("times.json", model=gpt(), precision=Precision.FLOAT16)
    assert galvatron.parse(text, named).layers[0].precision == "float16"


def test_an_overlap_coefficient_is_a_note() -> None:
    imported = galvatron.parse('{"overlap_coe": 1.21}', context("overlap_coefficient.json"))
    assert not imported.paths
    assert not imported.layers
    assert "1.21" in imported.notes[0]


# ---- SimuMax

rate = st.floats(0.1, 1e5)
fraction = st.floats(0.01, 1.2)


@given(rate, rate, rate, rate, fraction, fraction, st.floats(0, 1e4))
def test_simumax_figures_come_back_as_they_were_written(
    tflops: float,
    memory: float,
    bandwidth: float,
    network_rate: float,
    factor: float,
    own_factor: float,
    latency: float,
) -> None:
    data: dict = simumax_data()  # type: ignore[type-arg]
    accelerator, inter = data["accelerator"], data["networks"]["inter_node"]
    accelerator["op"]["matmul"]["tflops"] = tflops
    accelerator["mem_gbs"] = memory
    accelerator["bandwidth"]["default"]["gbps"] = bandwidth
    inter["bandwidth"] |= {"gbps": network_rate, "efficient_factor": factor, "latency_us": latency}
    inter["op"]["p2p"]["efficient_factor"] = own_factor
    imported = simumax.parse(json.dumps(data), context("x200.json", device=None))
    (device,) = imported.devices
    assert (device.kind, device.vendor, device.provenance) == ("x200-64g", "nvidia", "datasheet")
    ((precision, peak),) = device.peak_flops_per_second
    assert (precision, peak) == ("bfloat16", pytest.approx(tflops * 1e12))
    assert device.memory_bytes == pytest.approx(memory * 2**30)
    assert device.memory_bandwidth_bytes_per_second == pytest.approx(bandwidth * 2**30)
    path, p2p = imported.paths
    assert path.bandwidth_bytes_per_second == pytest.approx(network_rate * factor * 2**30)
    assert path.latency_seconds == pytest.approx(latency * 1e-6)
    assert p2p.bandwidth_bytes_per_second == pytest.approx(network_rate * own_factor * 2**30)
    assert p2p.latency_seconds is None


def changed(*path_and_value: object) -> str:
    """A good file with one value replaced; `...` removes it."""
    *path, last, value = path_and_value
    data = copy.deepcopy(simumax_data())
    parent: dict = data  # type: ignore[type-arg]
    for step in path:
        parent = parent[step]
    if value is ...:
        del parent[last]
    else:
        parent[last] = value
    return json.dumps(data, indent=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (changed("sys_name", ...), "required key sys_name is missing; there are num_per_node"),
        (changed("sys_name", 5), "sys_name: found 5; a text"),
        (changed("accelerator", ...), "required key accelerator is missing"),
        (changed("accelerator", []), "required key op is missing"),
        (changed("accelerator", "mem_gbs", "64"), "found the text 64; write a number"),
        (changed("accelerator", "mem_gbs", 0), "mem_gbs: found 0; it is more than 0"),
        (changed("accelerator", "op", "matmul", "tflops", -1), "it is more than 0"),
        (changed("accelerator", "op", {}), "required key default is missing"),
        (changed("accelerator", "bandwidth", {"gbps": None}), "gbps: found null|default is miss"),
        (changed("networks", "inter_node", "bandwidth", ...), "required key bandwidth is missing"),
        (changed("networks", "inter_node", "bandwidth", "latency_us", -3), "it is 0 or more"),
        (changed("networks", "inter_node", "op", 3), "found 3; a mapping is expected"),
        (changed("networks", 3), "networks: found 3; a mapping is expected"),
        (
            changed("accelerator", "op", "matmul", "accurate_efficient_factor", {}),
            "does not say the precision",
        ),
    ],
)
def test_what_is_wrong_in_a_simumax_file_is_named(text: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        simumax.parse(text, context("x200.json"))


def test_simumax_says_what_it_leaves_out() -> None:
    data: dict = simumax_data()  # type: ignore[type-arg]
    data["FC8"] = True
    data["networks"]["intra_with_pcie"] = True
    data["accelerator"]["op"]["fp8_matmul"] = {"tflops": 360}
    data["networks"]["inter_node"]["op"] |= {
        "all_reduce": {"scale": 2, "offset": -1, "latency_us": 15.5},
        "all2all": {"scale": 1, "offset": 0},
        "all_gather": {"scale": 1, "offset": -1, "dp_fixed_bw": {"8": 10}},
    }
    imported = simumax.parse(json.dumps(data), context("x.json"))
    assert "1 shape: matmul: a shape that cannot be read ('layout')" in imported.skipped[0]
    notes = "\n".join(imported.notes)
    for part in (
        "default efficiencies are not imported: default 0.7, matmul 0.7",
        "the fp8 rate, 360 TFLOP/s, is not imported",
        "FC8",
        "inter_node all_reduce: 15.5 us more per operation",
        "inter_node all2all: offset 0 instead of -1",
        "inter_node all_gather: fixed bandwidths",
        "devices per node: 8",
    ):
        assert part in notes


def test_the_users_names_win_over_those_of_a_simumax_file() -> None:
    asked = context("x.json", device="x200", precision=Precision.FLOAT16)
    (device,) = simumax.parse(json.dumps(simumax_data()), asked).devices
    assert device.kind == "x200"
    assert device.peak_flops_per_second == (("float16", 180e12),)


def test_an_older_simumax_file_has_one_memory_bandwidth() -> None:
    one = {"efficient_factor": 0.9, "gbps": 1000, "latency_us": 40}
    imported = simumax.parse(changed("accelerator", "bandwidth", one), context("x.json"))
    assert imported.devices[0].memory_bandwidth_bytes_per_second == 1000 * 2**30
