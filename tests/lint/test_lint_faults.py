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
from lint_samples import Bundle, timed

from hetplan.lint.findings import Findings
from hetplan.lint.launches import CHECKS as LAUNCH_CHECKS
from hetplan.lint.reading import LaunchContext, read_all
from hetplan.lint.registry import RULES, findings
from hetplan.profiling.samples import LayerSample

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
    assert len(found.files) == 8  # 5 parts, three of them with a provenance beside them


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


def retimed(bundle: Bundle, seconds: Callable[[LayerSample], float], **wanted: Any) -> None:
    """The layer samples with these columns take what `seconds` says."""
    for at, sample in enumerate(bundle.layer_samples):
        if all(getattr(sample, name) == value for name, value in wanted.items()):
            bundle.layer_samples[at] = timed(sample, seconds(sample))


def at_rate(flops_per_second: float) -> Callable[[LayerSample], float]:
    """Seconds of a transformer layer's pass at this rate."""

    def seconds(sample: LayerSample) -> float:
        h, s = sample.hidden_size, sample.sequence_length
        flops = sample.microbatch_size * s * h * (24 * h + 2 * s) / sample.tp
        return (1 if sample.phase == "forward" else 2) * flops / flops_per_second

    return seconds


def faster_than_peak(bundle: Bundle) -> None:
    retimed(bundle, at_rate(700e12), layer="transformer")


def slower_than_class(bundle: Bundle) -> None:
    retimed(bundle, at_rate(200e12), layer="transformer", hidden_size=512)
    retimed(bundle, at_rate(20e12), layer="transformer", hidden_size=2048)


def one_label_two_precisions(bundle: Bundle) -> None:
    """The narrow model in TF32, the wide one in true float32: 19.5 TFLOP/s and less."""
    bundle.layer_samples[:] = [
        replace(sample, precision="float32")
        for sample in bundle.layer_samples
        if sample.layer == "transformer"
    ]
    retimed(bundle, at_rate(80e12), hidden_size=512)
    retimed(bundle, at_rate(17e12), hidden_size=2048)
    bundle.layer_samples[:] = [
        replace(sample, activation_bytes=sample.activation_bytes * 2)
        for sample in bundle.layer_samples
    ]


def backward_not_measured(bundle: Bundle) -> None:
    retimed(bundle, lambda sample: sample.median_seconds / 100, phase="backward", layer="embedding")


def input_gradient_only(bundle: Bundle) -> None:
    retimed(bundle, lambda sample: sample.median_seconds / 2, phase="backward", layer="transformer")


def backward_faster(bundle: Bundle) -> None:
    retimed(bundle, lambda sample: sample.median_seconds / 4, phase="backward", layer="head")


def warm_up_inside(bundle: Bundle) -> None:
    retimed(
        bundle,
        lambda sample: sample.median_seconds * 3,
        microbatch_size=1,
        hidden_size=2048,
        layer="transformer",
    )


def times_do_not_grow(bundle: Bundle) -> None:
    large = {
        replace(sample, microbatch_size=4).shape: sample.median_seconds
        for sample in bundle.layer_samples
        if sample.microbatch_size == 8
    }
    retimed(bundle, lambda sample: large[sample.shape], microbatch_size=4, hidden_size=2048)


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
        timed(sample, sample.median_seconds * 1.7) for sample in bundle.other_samples
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


def bits_between_nodes(bundle: Bundle) -> None:
    _island(bundle)["inter_node"]["bandwidth"] = "390 GB/s"


def an_estimated_kind(bundle: Bundle) -> None:
    island = _island(bundle)
    island["device"] = "metax-c550-64gb"


def a_short_name(bundle: Bundle) -> None:
    island = _island(bundle)
    island["device"] = island["device"].split("-")[1]  # h100: SXM, PCIe and NVL have it


FAULTS = (
    Damage("faster-than-peak", ("layer_samples",), faster_than_peak),
    Damage("slower-than-class", ("layer_samples",), slower_than_class),
    Damage(
        "one-label-two-precisions",
        ("layer_samples",),
        one_label_two_precisions,
        frozenset({"faster-than-peak"}),  # TF32 is above the float32 peak
    ),
    Damage("backward-not-measured", ("layer_samples",), backward_not_measured),
    Damage("input-gradient-only", ("layer_samples",), input_gradient_only),
    Damage("backward-faster-than-forward", ("layer_samples",), backward_faster),
    Damage("warm-up-inside", ("layer_samples",), warm_up_inside),
    Damage("times-do-not-grow", ("layer_samples",), times_do_not_grow),
    Damage("failure-as-number", ("collectives",), failure_as_number),
    Damage("bandwidth-not-positive", ("collectives",), bandwidth_not_positive),
    Damage("missing-size", ("collectives",), missing_size),
    Damage("bandwidth-above-link", ("collectives",), bandwidth_above_link),
    Damage("unit-slip", ("collectives",), unit_slip),
    Damage("columns-disagree", ("collectives",), columns_disagree),
    Damage("copied-values", ("layer_samples", "other_samples"), another_device),
    Damage("quantiles-out-of-order", ("layer_samples",), quantiles),
    Damage("more-outliers-than-runs", ("link_samples",), outliers),
    Damage("activations-below-input", ("layer_samples",), activations),
    Damage("clocks-differ", ("layer_samples",), clocks),
    Damage("populations-disagree", ("layer_samples", "other_samples"), populations),
    Damage("link-times-do-not-grow", ("link_samples",), link_flat),
    Damage("link-unlike-its-devices", ("cluster",), all_devices_added),
    Damage("link-unlike-its-devices", ("cluster",), bits_between_nodes),
    Damage("estimated-figures", ("cluster",), an_estimated_kind),
    Damage("short-kind-name", ("cluster",), a_short_name),
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
    # Those of launches have theirs in trainers/test_trainers_rules.py.
    elsewhere = {"file-is-wrong", *LAUNCH_CHECKS}
    assert {fault.rule for fault in FAULTS} == {rule.id for rule in RULES} - elsewhere
