from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hetplan.cluster.devices import DeviceKind, HostInterface
from hetplan.cluster.launch_domains import DEFAULT_DOMAIN, LaunchDomain, Scheduler
from hetplan.cluster.node import Nics, RingNics
from hetplan.cluster.spec import Cluster, Island
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.job.run import KindFailures, Run
from hetplan.job.spec import Forbids, Job, LengthShare, Pins, RecomputeModule, Variation
from hetplan.model.layers import (
    Attention,
    Experts,
    LayerRun,
    TransformerLayer,
)
from hetplan.model.numerics import Router
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


def within(kind, notes):
    """Numbers, or words, within the limits of an annotated type."""
    limits = {}
    for note in (limit for field in notes for limit in getattr(field, "metadata", ())):
        limits |= {
            key: getattr(note, key) for key in ("ge", "gt", "le", "lt") if hasattr(note, key)
        }
    if kind is str:
        return st.from_regex(r"[a-z][a-z0-9]{0,4}", fullmatch=True)
    least, most = limits.get("ge", limits.get("gt")), limits.get("le", limits.get("lt"))
    if kind is int:
        return st.integers(least, most)
    return st.floats(
        least, most, exclude_min="gt" in limits, exclude_max="lt" in limits, allow_nan=False
    )


def special_fields(hint):
    """Fields that must go together with others of the same value."""
    if hint is Nics:
        alone = {"rails": st.none(), "of_device": st.just(())}
        return alone | {"rings": st.none() | st.sampled_from(RingNics)}
    if hint is Island:
        fields = {name: st.just(()) for name in ("switch_of_device", "numa_node_of_device")}
        fields |= {"nodes": st.integers(3, 99), "nodes_out": st.sampled_from([(), (0,), (2, 1)])}
        return (
            fields
            | {"node_names": st.just(()), "node_parts": st.just(()), "power_cap_watts": st.none()}
            | {"devices_per_node": st.integers(1, 99)}
        )
    if hint is HostInterface:
        return {"pcie_generation": st.integers(1, 6), "lanes": st.sampled_from([1, 8, 16])}
    if hint is DeviceKind:
        names = ("overlap_compute_slowdown", "overlap_communication_slowdown")
        return dict.fromkeys(names, st.just(0.0) | st.floats(1, 10))
    if hint is Cluster:
        islands = st.lists(strategy(Island), max_size=2, unique_by=lambda island: island.name)
        return {"islands": islands.map(tuple), "launch_domains": st.just(())}
    if hint is Attention:
        heads = {"num_heads": st.just(12), "num_kv_heads": st.sampled_from([1, 2, 3, 4, 6, 12])}
        return heads | {"head_dim": st.integers(1, 10**4)}
    if hint is Experts:
        return {"num_experts": st.just(8), "experts_per_token": st.integers(1, 8)} | {
            "shared_ffn_hidden_size": st.integers(1, 10**4)
        }
    if hint is TransformerLayer:
        return {"num_norms": st.sampled_from([2, 4])}
    if hint is LayerRun:
        return {"count": st.integers(1, 10**4)}
    if hint is ModelSpec:
        runs = st.lists(strategy(LayerRun), min_size=1, max_size=2).map(tuple)
        return {"layer_runs": runs, "num_mtp_layers": st.just(1)} | {
            "mtp_layer": strategy(TransformerLayer)
        }
    if hint is Router:
        return {"num_groups": st.just(8), "groups_per_token": st.just(4)}
    if hint is Job:
        alone = st.builds(LengthShare, length=st.integers(1, 2**20), share=st.just(1.0))
        lengths = st.lists(alone, max_size=1).map(tuple)
        return {"sequence_length": st.just(2**20), "sequence_lengths": lengths}
    if hint is Pins:
        some = st.lists(st.sampled_from(RecomputeModule), min_size=1, max_size=2).map(tuple)
        return {"recompute_modules": st.none() | some}
    if hint is Run:
        kinds = st.lists(strategy(KindFailures), max_size=2, unique_by=lambda each: each.kind)
        return {"kind_failures": kinds.map(tuple)}
    if hint is Variation:
        return {"of": st.sampled_from([("a",), ("a", "b")])}
    if hint is Forbids:
        return {"nodes": st.sampled_from([(), ("a/0",), ("a/0", "b/17")])}
    if hint is SearchResult:
        return {"schema": st.just("hetplan.plan/8")}
    return {}


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
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        return within(kind, notes)
    if get_origin(hint) in (Union, UnionType):
        return st.one_of(*map(strategy, get_args(hint)))
    if get_origin(hint) is tuple:
        parts = get_args(hint)
        if Ellipsis in parts:
            return st.lists(strategy(parts[0]), max_size=2).map(tuple)
        return st.tuples(*map(strategy, parts))
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    if hint is LaunchDomain:
        words = st.from_regex(r"[a-z][a-z0-9]{0,9}", fullmatch=True)
        addresses = [(), (("n[1-2]", "10.0.0.[1-2]"), ("m", "fd00::1"))]
        return st.builds(
            hint,
            name=words.filter(lambda name: name != DEFAULT_DOMAIN),
            islands=st.lists(words, min_size=1, max_size=2, unique=True).map(tuple),
            interface=st.just("") | words,
            first_port=st.integers(1024, 2000),
            last_port=st.integers(2001, 65535),
            fabric_devices=st.lists(words, max_size=2).map(tuple),
            addresses=st.sampled_from(addresses),
            scheduler=st.just(Scheduler.SLURM),
            time_limit_seconds=st.none() | st.floats(60, 1e6),
        )
    hints = get_type_hints(hint, include_extras=True)
    fields = special_fields(hint)
    return st.builds(hint, **fields, **{n: strategy(hints[n]) for n in hints if n not in fields})


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
