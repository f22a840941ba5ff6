"""On measurements that obey physics lint says nothing; one fault in them makes one rule speak."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lint_samples import Bundle

from hetplan.lint.findings import Findings
from hetplan.lint.known import known_model
from hetplan.lint.launches import RULES as LAUNCH_RULES
from hetplan.lint.reading import LaunchContext, read_all
from hetplan.lint.registry import RULES, findings
from hetplan.model.spec import LayerKind
from hetplan.model.work import layer_work

# A failing seed tells as much as a small one: there is nothing to shrink.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
SEEDS = st.integers(min_value=0, max_value=2**32)


def check(bundle: Bundle, *parts: str) -> Findings:
    with tempfile.TemporaryDirectory() as name:
        bundle.write(Path(name), *parts)
        return findings(read_all([Path(name)], LaunchContext()))


@given(seed=SEEDS)
@settings(max_examples=5, deadline=None, derandomize=True, phases=PHASES)
def test_nothing_is_said_of_measurements_that_obey_physics(seed: int) -> None:
    found = check(Bundle.draw(seed))
    assert found.findings == ()
    assert found.skipped == ()
    assert len(found.files) == 11  # 8 parts, three of them with a provenance beside them


class Damage(NamedTuple):
    """One way to damage a bundle."""

    rule: str
    parts: tuple[str, ...]
    damage: Callable[[Bundle], None]
    also: frozenset[str] = frozenset()
    """What the same fault breaks by necessity."""


def rows(table: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    found = [row for row in table if all(row[key] == value for key, value in wanted.items())]
    assert found
    return found


def scaled(table: list[dict[str, Any]], column: str, factor: float) -> None:
    for row in table:
        row[column] = round(row[column] * factor, 6)


def set_all(table: list[dict[str, Any]], **values: Any) -> None:
    for row in table:
        row.update(values)


def time_not_positive(bundle: Bundle) -> None:
    bundle.layers[7]["fwd_us"] = 0.0


def time_sentinel(bundle: Bundle) -> None:
    bundle.layers[7].update(fwd_us=1e7, bwd_us=1e7)


def faster_than_peak(bundle: Bundle) -> None:
    for column in ("fwd_us", "bwd_us"):
        scaled(rows(bundle.operators, gpu="A100-40"), column, 0.2)


def slower_than_class(bundle: Bundle) -> None:
    for column in ("fwd_us", "bwd_us"):
        scaled(rows(bundle.layers, gpu="A100-40", model="OPT-30"), column, 8.0)


def one_label_two_precisions(bundle: Bundle) -> None:
    """The narrow model in TF32, the wide one in true float32: 19.5 TFLOP/s and less."""
    set_all(bundle.layers, dtype="fp32")
    bundle.layers[:] = [
        row for row in rows(bundle.layers, gpu="A100-40") if row["model"] != "GPT-Neo-2.7"
    ]
    for row in rows(bundle.layers, layer=1):
        spec = known_model(row["model"])
        assert spec is not None
        work = layer_work(spec, LayerKind.TRANSFORMER, row["mbs"], 2048, row["tp"])
        rate = 17e12 if row["model"] == "OPT-30" else 80e12
        row["fwd_us"] = round(work.flops / rate * 1e6, 3)
        row["bwd_us"] = round(2 * work.flops / rate * 1e6, 3)


def backward_not_measured(bundle: Bundle) -> None:
    set_all(rows(bundle.layers, layer=0), bwd_us=2.0)


def input_gradient_only(bundle: Bundle) -> None:
    scaled(bundle.operators, "bwd_us", 0.5)


def backward_faster(bundle: Bundle) -> None:
    for row in rows(bundle.layers, layer=25):
        row["fwd_us"], row["bwd_us"] = row["bwd_us"], row["fwd_us"]


def communication_inside(bundle: Bundle) -> None:
    for row in rows(bundle.operators, op="mlp-2"):
        row["fwd_us"] += 300.0 * row["mbs"] * (row["tp"] > 1)


def warm_up_inside(bundle: Bundle) -> None:
    for row in rows(bundle.layers, model="OPT-30", mbs=1, layer=1):
        row["fwd_us"] *= 3
        row["bwd_us"] *= 3


def times_do_not_grow(bundle: Bundle) -> None:
    for row in rows(bundle.layers, model="OPT-30", layer=1, mbs=4):
        wanted = {"tp": row["tp"], "gpu": row["gpu"], "mbs": 8}
        after = rows(bundle.layers, model="OPT-30", layer=1, **wanted)[0]
        row["fwd_us"], row["bwd_us"] = after["fwd_us"], after["bwd_us"]


def mixed_precisions(bundle: Bundle) -> None:
    bundle.layers += [
        {**row, "dtype": "bf16", "fwd_us": row["fwd_us"] * 1.01, "bwd_us": row["bwd_us"] * 1.01}
        for row in bundle.layers
    ]


def failure_as_number(bundle: Bundle) -> None:
    bundle.collectives[5].update(time_us=1e12, busbw_GBps=0)


def bandwidth_not_positive(bundle: Bundle) -> None:
    bundle.collectives[5]["time_us"] = 0


def missing_size(bundle: Bundle) -> None:
    bundle.collectives[5]["size_bytes"] = ""


def bandwidth_above_link(bundle: Bundle) -> None:
    for row in rows(bundle.collectives, gpu="V100-16"):
        row["time_us"] = round(row["time_us"] / 8, 6)
        row["busbw_GBps"] *= 8


def unit_slip(bundle: Bundle) -> None:
    scaled(bundle.collectives, "busbw_GBps", 1e9 / 2**30)


def columns_disagree(bundle: Bundle) -> None:
    for row in bundle.collectives[10::19]:
        row["busbw_GBps"] *= 0.7


def flat_then_steep(bundle: Bundle) -> None:
    series = rows(bundle.collectives, gpu="A100-40", op="all_reduce", ranks=8)
    large = [row for row in series if row["size_bytes"] in (2**24, 2**25, 2**26)]
    for row in large:
        row["time_us"] = large[-1]["time_us"]
        row["busbw_GBps"] = row["size_bytes"] * 1.75 / row["time_us"] / 1e3


def no_small_messages(bundle: Bundle) -> None:
    bundle.collectives[:] = [row for row in bundle.collectives if row["size_bytes"] >= 2**20]


def efficiency_above_one(bundle: Bundle) -> None:
    rows(bundle.efficiencies, op="matmul")[3]["efficiency"] = 1.07


def efficiency_not_positive(bundle: Bundle) -> None:
    bundle.efficiencies[3]["efficiency"] = 0.0


def causal_full(bundle: Bundle) -> None:
    rows(bundle.efficiencies, op="sdp_fwd")[3]["efficiency"] = 1.19


def key_ignored(bundle: Bundle) -> None:
    row = bundle.efficiencies[3]
    shape = row["shape"].replace("bf16", "fp32")
    bundle.efficiencies.append({**row, "shape": shape, "efficiency": row["efficiency"] * 0.8})


def quantiles(bundle: Bundle) -> None:
    sample = bundle.layer_samples[4]
    bundle.layer_samples[4] = replace(sample, p10_seconds=sample.median_seconds * 1.01)


def outliers(bundle: Bundle) -> None:
    bundle.link_samples[2] = replace(bundle.link_samples[2], outliers=26)


def activations(bundle: Bundle) -> None:
    bundle.layer_samples[:] = [
        replace(sample, activation_bytes=sample.activation_bytes / 24)
        for sample in bundle.layer_samples
    ]


def clocks(bundle: Bundle) -> None:
    bundle.layer_samples[3] = replace(bundle.layer_samples[3], clock_hertz=0.9e9)


def populations(bundle: Bundle) -> None:
    bundle.other_samples[:] = [
        replace(
            sample,
            median_seconds=sample.median_seconds * 1.7,
            p10_seconds=sample.p10_seconds * 1.7,
            p90_seconds=sample.p90_seconds * 1.7,
        )
        for sample in bundle.other_samples
    ]


def link_flat(bundle: Bundle) -> None:
    bundle.link_samples[:] = [
        replace(sample, median_seconds=0.02, p10_seconds=0.02, p90_seconds=0.0201)
        if sample.message_bytes >= 2**24
        else sample
        for sample in bundle.link_samples
    ]


def another_device(bundle: Bundle) -> None:
    bundle.other_samples[:] = [
        replace(sample, device="b-device") for sample in bundle.layer_samples
    ]


def _island(bundle: Bundle) -> dict[str, Any]:
    found: dict[str, Any] = bundle.cluster["regions"][0]["islands"][0]
    return found


def all_devices_added(bundle: Bundle) -> None:
    _island(bundle)["inter_node"]["bandwidth"] = "3.2 TB/s"


def bits_for_bytes(bundle: Bundle) -> None:
    _island(bundle)["intra_node"]["bandwidth"] = "450 Gbit/s"


def milliseconds(bundle: Bundle) -> None:
    _island(bundle)["inter_node"]["latency"] = "5 ms"


FAULTS = (
    Damage("time-not-positive", ("layers",), time_not_positive),
    Damage("time-sentinel", ("layers",), time_sentinel),
    Damage("faster-than-peak", ("operators",), faster_than_peak),
    Damage("slower-than-class", ("layers",), slower_than_class),
    Damage(
        "one-label-two-precisions",
        ("layers",),
        one_label_two_precisions,
        frozenset({"faster-than-peak"}),  # TF32 is above the float32 peak
    ),
    Damage("backward-not-measured", ("layers",), backward_not_measured),
    Damage("input-gradient-only", ("operators",), input_gradient_only),
    Damage("backward-faster-than-forward", ("layers",), backward_faster),
    Damage("communication-inside", ("operators",), communication_inside),
    Damage("warm-up-inside", ("layers",), warm_up_inside),
    Damage("times-do-not-grow", ("layers",), times_do_not_grow),
    Damage("mixed-precisions", ("layers",), mixed_precisions),
    Damage("failure-as-number", ("collectives",), failure_as_number),
    Damage("bandwidth-not-positive", ("collectives",), bandwidth_not_positive),
    Damage("missing-size", ("collectives",), missing_size),
    Damage("bandwidth-above-link", ("collectives",), bandwidth_above_link),
    Damage("unit-slip", ("collectives",), unit_slip),
    Damage("columns-disagree", ("collectives",), columns_disagree),
    Damage("flat-then-steep", ("collectives",), flat_then_steep),
    Damage("no-small-messages", ("collectives",), no_small_messages),
    Damage("efficiency-above-one", ("efficiencies",), efficiency_above_one),
    Damage("efficiency-not-positive", ("efficiencies",), efficiency_not_positive),
    Damage("causal-attention-counted-full", ("efficiencies",), causal_full),
    Damage("key-ignores-a-column", ("efficiencies",), key_ignored),
    Damage("copied-values", ("layer_samples", "other_samples"), another_device),
    Damage("quantiles-out-of-order", ("layer_samples",), quantiles),
    Damage("more-outliers-than-runs", ("link_samples",), outliers),
    Damage("activations-below-input", ("layer_samples",), activations),
    Damage("clocks-differ", ("layer_samples",), clocks),
    Damage("populations-disagree", ("layer_samples", "other_samples"), populations),
    Damage("link-times-do-not-grow", ("link_samples",), link_flat),
    Damage("link-unlike-its-devices", ("cluster",), all_devices_added),
    Damage("link-unlike-its-devices", ("cluster",), bits_for_bytes),
    Damage("link-unlike-its-devices", ("cluster",), milliseconds),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.rule}-{fault.damage.__name__}")
@given(seed=SEEDS)
@settings(max_examples=1, deadline=None, derandomize=True, phases=PHASES)
def test_one_fault_makes_one_rule_speak(fault: Damage, seed: int) -> None:
    bundle = Bundle.draw(seed, *fault.parts)
    fault.damage(bundle)
    found = check(bundle, *fault.parts)
    assert {finding.rule for finding in found.findings} == {fault.rule} | fault.also, found.findings


def test_every_rule_has_a_fault() -> None:
    # Those of launches have theirs in test_lint_launch_rules.py.
    elsewhere = {"file-is-wrong", *(rule.id for rule in LAUNCH_RULES)}
    assert {fault.rule for fault in FAULTS} == {rule.id for rule in RULES} - elsewhere


def test_rules_have_names_of_their_own() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.explanation.endswith(".")
        assert rule.advice.endswith(".")
