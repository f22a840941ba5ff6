"""What a job still needs measured, and `hetplan profile list`."""

import json

from profiling_models import GPT
from profiling_samples import CLUSTER, JOB, LAYER, LINK, MODEL, PROVENANCE, invoke, layer

from hetplan.cluster.devices import DeviceKind
from hetplan.cluster.spec import Cluster, Island, IslandLink, Link, Transport
from hetplan.job.spec import Precision
from hetplan.profiling.grid import points
from hetplan.profiling.measure_layers import unit_shapes, units
from hetplan.profiling.needs import (
    layer_need,
    link_need,
    link_places,
)
from hetplan.profiling.store import LayerWriter, LinkWriter

WORK = units(
    points(
        (GPT,),
        sequence_lengths=(16,),
        microbatch_sizes=(1, 2),
        tp_degrees=(1,),
        precisions=(Precision.FLOAT32,),
    )
)
FAST = DeviceKind(
    kind="acme-one",
    vendor="acme",
    peak_flops_per_second=(("float32", 1e12),),
    memory_bytes=1e9,
    memory_bandwidth_bytes_per_second=1e12,
    provenance="datasheet",
    source="a test",
)
WIRE = Link(bandwidth_bytes_per_second=1e9, latency_seconds=1e-5, transport=Transport.HOST_STAGED)
NEAR = Link(
    bandwidth_bytes_per_second=1e11,
    latency_seconds=1e-6,
    transport=Transport.DEVICE_DIRECT,
    samples="near",
)


def island(name: str, nodes: int, devices: int) -> Island:
    return Island(
        name=name,
        region="here",
        device=FAST,
        nodes=nodes,
        devices_per_node=devices,
        intra_node=NEAR,
        inter_node=WIRE,
        memory_bytes=1e9,
    )


def test_what_is_held_is_not_missing() -> None:
    shapes = [shape for unit in WORK for shape in unit_shapes(unit)]
    assert len(shapes) == len(set(shapes)) == 2 * 3 * 2 + 4
    nothing = layer_need("cpu", None, WORK, ())
    assert (nothing.missing, nothing.missing_samples, nothing.seconds) == (WORK, 16, None)
    both = [layer(phase="forward"), layer(phase="backward")]
    some = layer_need("cpu", None, WORK, both)
    assert some.missing_samples == 14
    assert layer_need("acme-one", None, WORK, both).missing_samples == 16
    kinds = [unit.kind for unit in nothing.missing]
    costs = [unit.point.flops(unit.kind) for unit in nothing.missing]
    assert costs == sorted(costs)
    assert set(kinds) == {"embedding", "transformer", "head"}


def test_places_where_devices_talk() -> None:
    left, right, alone = island("left", 4, 8), island("right", 1, 1), island("alone", 1, 2)
    links = (IslandLink(between=("left", "right"), link=WIRE),)
    cluster = Cluster(name="c", islands=(left, right, alone), links=links)
    places = {place.name: place for place in link_places(cluster)}
    # `alone` and `left` refer to the same samples: measured once, in the first.
    assert list(places) == ["near", "left-nodes", "left-right"]
    assert (places["near"].nodes, places["near"].processes_per_node) == (1, 8)
    assert (places["left-nodes"].nodes, places["left-nodes"].processes_per_node) == (2, 1)
    assert [place.is_named for place in places.values()] == [True, False, False]
    need = link_need(places["near"], (4096, 8192), ())
    assert {case.group_size for case in need.cases} == {2, 4, 8}
    held = {case for case in need.cases if case.message_bytes == 4096}
    rest = link_need(places["near"], (4096, 8192), held)
    assert {case.message_bytes for case in rest.missing} == {8192}
    assert 0 < rest.seconds < need.seconds


def test_a_list_shows_damage_and_what_is_missing(tmp_path) -> None:
    for name, text in (("m.yaml", MODEL), ("j.yaml", JOB), ("c.yaml", CLUSTER)):
        (tmp_path / name).write_text(text)
    store = tmp_path / "store"
    writer = LayerWriter(store, PROVENANCE)
    writer.append(LAYER)
    path = writer.folder / "layers.csv"
    path.write_text(path.read_text() + "spoilt\n")
    LinkWriter(store, "lo", PROVENANCE).append(LINK)
    job = ("--model", tmp_path / "m.yaml", "--job", tmp_path / "j.yaml")
    shown = invoke("list", "--store", store, *job, "--cluster", tmp_path / "c.yaml").stdout
    assert f"damage: {path}:3" in shown
    assert "Still to measure, cheapest first" in shown
    assert f"here: hetplan profile layers --model {tmp_path / 'm.yaml'}" in shown
    assert "--nproc-per-node 2 -m hetplan profile links lo" in shown
    listed = json.loads(
        invoke("list", "--store", store, *job, "--cluster", tmp_path / "c.yaml", "--json").stdout
    )
    assert listed["schema"] == "hetplan.store/1"
    assert [each["layer_rows"] for each in listed["populations"]] == [1, 0]
    assert listed["populations"][0]["damage"][0]["line"] == 3
    seconds = [need["seconds"] for need in listed["needs"]]
    assert seconds == sorted(seconds, key=lambda each: float("inf") if each is None else each)
    by_name = {need["name"]: need for need in listed["needs"]}
    assert by_name["cpu"]["missing_samples"] == by_name["cpu"]["needed_samples"] - 1
    assert by_name["lo"]["here"] is True
    alone = json.loads(invoke("list", "--store", tmp_path / "none", *job, "--json").stdout)
    assert alone["populations"] == []
    assert alone["needs"]
    refused = invoke("list", "--store", store, "--cluster", tmp_path / "c.yaml", code=2)
    assert "add --model and --job" in refused.stderr
    assert "no such folder" in invoke("list", "--store", tmp_path / "none", code=2).stderr


def test_what_the_command_of_the_list_measures_is_then_not_missing(tmp_path) -> None:
    shapes = ("--microbatch", "1", "--tp", "1")
    (tmp_path / "m.yaml").write_text(MODEL)
    (tmp_path / "j.yaml").write_text(JOB)
    job = ("--model", tmp_path / "m.yaml", "--job", tmp_path / "j.yaml", *shapes)
    invoke("layers", "--store", tmp_path / "store", "--device", "cpu", *job)
    listed = json.loads(invoke("list", "--store", tmp_path / "store", *job, "--json").stdout)
    assert {need["name"]: need["missing_samples"] for need in listed["needs"]}["cpu"] == 0
