import json
from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hetplan.cluster.devices import DeviceKind, HostInterface
from hetplan.cluster.launch_domains import DEFAULT_DOMAIN, LaunchDomain, Scheduler
from hetplan.cluster.node import Nics, RingNics
from hetplan.cluster.spec import Cluster, Island, Link
from hetplan.errors import InputError
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.job.spec import Job, LengthShare
from hetplan.model.layers import (
    Attention,
    Experts,
    LatentAttention,
    LayerRun,
    Mlp,
    TransformerLayer,
)
from hetplan.model.numerics import RotaryScaling, Router
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan
from hetplan.predict.predictor import Prediction
from hetplan.search.result import SearchResult

steady = settings(
    derandomize=True,
    deadline=None,
    max_examples=40,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # to shrink a whole search result takes minutes
)


def strategy(hint):
    """Values of a frozen dataclass's type, without registering anything for other tests."""
    special = {
        int: st.integers(1, 2**40),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=5),
        bool: st.booleans(),
        NoneType: st.none(),
    }
    if hint in special:
        return special[hint]
    if get_origin(hint) in (Union, UnionType):
        return st.one_of(*map(strategy, get_args(hint)))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if Ellipsis in parts:
            return st.lists(strategy(parts[0]), max_size=2).map(tuple)
        return st.tuples(*map(strategy, parts))
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    fields = {name: strategy(each) for name, each in get_type_hints(hint).items()}
    positive = st.floats(0, 1e30, exclude_min=True)
    positive_constant = st.floats(0, 1e12, exclude_min=True)
    if hint is Link:
        fields |= {"bandwidth_bytes_per_second": positive, "latency_seconds": st.floats(0, 1e30)}
        fields |= {"segment_bytes": positive, "oversubscription": st.floats(1, 1e6)}
        for name in ("shared_bandwidth_bytes_per_second", "window_bytes", "price_usd_per_byte"):
            fields[name] = st.none() | positive
        fields["loss"] = st.none() | st.floats(0, 1, exclude_max=True)
        fields["compute_share"] = st.floats(0, 1, exclude_max=True)
    if hint is Nics:
        fields |= {"bandwidth_bytes_per_second": positive, "of_device": st.just(())}
        fields |= {"per_node": st.integers(1, 64), "most_per_device": st.integers(1, 8)}
        # With rails a ring stays on the rail of its devices: no other NICs may be said.
        railed = {"rails": st.just(1), "rings": st.none() | st.just(RingNics.OWN)}
        plain = {"rails": st.none(), "rings": st.none() | st.sampled_from(RingNics)}
        return st.builds(hint, **fields | railed) | st.builds(hint, **fields | plain)
    if hint is Island:
        fields |= {"nodes": st.integers(3, 99), "devices_per_node": st.integers(1, 99)}
        fields |= {"memory_bytes": positive, "nodes_out": st.sampled_from([(), (0,), (2, 1)])}
        fields |= {"clock_ratio": st.floats(0.1, 1.5), "power_cap_watts": st.none()}
        fields["speed_spread"] = st.none() | st.floats(0, 0.5)
        for name in ("switch_of_device", "numa_node_of_device", "node_names"):
            fields[name] = st.just(())
    if hint is HostInterface:
        fields = {"pcie_generation": st.integers(1, 6), "lanes": st.sampled_from([1, 8, 16])}
    if hint is DeviceKind:
        slowdown = st.just(0.0) | st.floats(1, 10)
        fields |= {"overlap_compute_slowdown": slowdown, "overlap_communication_slowdown": slowdown}
    if hint is Cluster:
        islands = st.lists(strategy(Island), max_size=2, unique_by=lambda island: island.name)
        fields["islands"] = islands.map(tuple)
        fields["launch_domains"] = st.just(())
    if hint is LaunchDomain:
        words = st.from_regex(r"[a-z][a-z0-9]{0,9}", fullmatch=True)
        fields = {"name": words.filter(lambda name: name != DEFAULT_DOMAIN)}
        fields |= {"islands": st.lists(words, min_size=1, max_size=2, unique=True).map(tuple)}
        fields |= {"interface": st.just("") | words, "image": st.just("") | words}
        fields |= {"first_port": st.integers(1024, 2000), "last_port": st.integers(2001, 65535)}
        fields |= {"fabric_devices": st.lists(words, max_size=2).map(tuple)}
        fields["addresses"] = st.sampled_from([(), (("n[1-2]", "10.0.0.[1-2]"), ("m", "fd00::1"))])
        limit = st.none() | st.floats(60, 1e6)
        slurm = {"scheduler": st.just(Scheduler.SLURM), "time_limit_seconds": limit}
        return st.builds(hint, **fields) | st.builds(hint, **fields | slurm)
    if hint in (ModelSpec, LayerRun, Attention, LatentAttention, Mlp, Experts):
        fields |= {
            name: st.integers(1, 10**4) if each is int else st.none() | st.integers(1, 10**4)
            for name, each in get_type_hints(hint).items()
            if each in (int, int | None)
        }
    if hint is Attention:
        fields["num_heads"] = st.just(12)
        fields["num_kv_heads"] = st.sampled_from([1, 2, 3, 4, 6, 12])
    if hint is Experts:
        fields["num_experts"] = st.just(10**4)
    if hint is TransformerLayer:
        fields["num_norms"] = st.sampled_from([2, 4])
    if hint is ModelSpec:
        fields["layer_runs"] = st.lists(strategy(LayerRun), min_size=1, max_size=2).map(tuple)
        fields["num_mtp_layers"], fields["mtp_layer"] = st.just(1), strategy(TransformerLayer)
        fields |= {name: st.none() | positive_constant for name in ("norm_epsilon", "rotary_base")}
        fields["rotary_fraction"] = st.none() | st.floats(0, 1, exclude_min=True)
    if hint in (RotaryScaling, Router):
        fields |= {
            name: st.none() | (positive_constant if float in get_args(each) else st.integers(1, 9))
            for name, each in get_type_hints(hint).items()
            if {int, float} & {*get_args(each)}
        }
    if hint is Router:
        groups = st.sampled_from([(None, None), (8, 4)])
        return groups.flatmap(
            lambda pair: st.builds(
                Router,
                **fields | {"num_groups": st.just(pair[0]), "groups_per_token": st.just(pair[1])},
            )
        )
    if hint is Job:
        fraction = st.floats(0, 1, exclude_max=True)
        fields |= {"gap": fraction, "memory_reserve_fraction": fraction}
        fields |= {"expert_load_factor": st.floats(1, 1e6)}
        fields["data_loading_seconds"] = st.floats(0, 1e9)
        fields["sequence_length"] = st.just(2**40)
        alone = st.builds(LengthShare, length=st.integers(1, 2**40), share=st.just(1.0))
        fields["sequence_lengths"] = st.lists(alone, max_size=1).map(tuple)
        fields |= {"seed": st.integers(0, 2**31 - 1), "total_tokens": st.none() | st.just(10**18)}
        fields |= {"quantile": st.none() | st.floats(0.5, 0.99)}
        fields["checkpoint_interval_steps"] = st.none() | st.integers(1, 2**40)
    if hint is SearchResult:
        fields["schema"] = st.just("hetplan.plan/8")
    return st.builds(hint, **fields)


def read_back(folder, value, schema):
    text = encode(value, schema=schema)
    path = folder / "value.json"
    path.write_text(text, encoding="utf-8")
    read = decode(read_document(path), type(value), schema=schema)
    assert encode(read, schema=schema) == text
    return read


@pytest.mark.parametrize(
    "type_",
    [
        Plan,
        Job,
        Cluster,
        LaunchDomain,
        ModelSpec,
        Prediction,
        pytest.param(SearchResult, marks=pytest.mark.slow),
    ],
)
def test_decode_inverts_encode(tmp_path, type_):
    schema = "hetplan.plan/8" if type_ is SearchResult else "x/1"

    @given(value=strategy(type_))
    @steady
    def check(value):
        assert read_back(tmp_path, value, schema) == value

    check()


def test_equal_values_give_equal_bytes():
    fields = {"log_halfwidth": 0.1, "source": "measured"}
    assert encode(Prediction(seconds=5, **fields), schema="x/1") == encode(
        Prediction(seconds=5.0, **fields), schema="x/1"
    )


def test_unknown_keys_are_found_in_nested_core_values(tmp_path):
    link = {"bandwidth_bytes_per_second": 1.0, "latency_seconds": 1.0, "transport": "host-staged"}
    data = {
        "schema": "x/1",
        "name": "c",
        "islands": [],
        "links": [{"between": ["a", "b"], "link": {**link, "bandwith": 2.0}}],
    }
    path = tmp_path / "value.json"
    path.write_text(json.dumps(data, indent=1))
    with pytest.raises(InputError) as caught:
        decode(read_document(path), Cluster, schema="x/1")
    (fault,) = caught.value.faults
    assert fault.field == "links[0].link.bandwith"
    assert json.loads(f"{{{path.read_text().splitlines()[fault.line - 1]}}}") == {"bandwith": 2.0}


def test_core_values_check_themselves_on_reading(tmp_path):
    job = {
        "name": "j",
        "global_batch_size": 0,
        "sequence_length": 1,
        "precision": "float32",
        "optimizer": "sgd",
        "target": "native",
    }
    path = tmp_path / "value.json"
    path.write_text(json.dumps({"schema": "x/1", **job}))
    with pytest.raises(InputError, match="global_batch_size is 0"):
        decode(read_document(path), Job, schema="x/1")


def test_what_cannot_be_written_is_refused():
    @dataclass(frozen=True)
    class Bad:
        value: object

    for value, error in ((float("inf"), ValueError), ({}, TypeError), (b"x", TypeError)):
        with pytest.raises(error):
            encode(Bad(value), schema="x/1")
    with pytest.raises(TypeError):
        encode([1], schema="x/1")
