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
from hetplan.lint.reading import Asked, read_all
from hetplan.lint.registry import RULES, findings
from hetplan.model.spec import LayerKind
from hetplan.model.work import layer_work

# A failing seed tells as much as a small one: there is nothing to shrink.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
SEEDS = st.integers(min_value=0, max_value=2**32)


def check(bundle: Bundle, *parts: str) -> Findings:
    with tempfile.TemporaryDirectory() as name:
        bundle.write(Path(name), *parts)
        return findings(read_all([Path(name)], Asked()))


@given(seed=SEEDS)
@settings(max_examples=15, deadline=None, derandomize=True, phases=PHASES)
def test_nothing_is_said_of_measurements_that_obey_physics(seed: int) -> None:
    found = check(Bundle.draw(seed))
    assert found.findings == ()
    assert found.skipped == ()
    assert len(found.files) == 19  # 16 parts, three of them with a provenance beside them


class Fault(NamedTuple):
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
    bundle.cities[0]["bandwidth_gbit_per_s"] = -0.5


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


def fit_goes_negative(bundle: Bundle) -> None:
    bundle.network["inter"]["A100-40"]["V100-16"] = [[0.1, 1.5, 3.0], 12e9]


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


def copied_values(bundle: Bundle) -> None:
    for row in rows(bundle.collectives, gpu="V100-16"):
        wanted = {key: row[key] for key in ("op", "ranks", "size_bytes")}
        other = rows(bundle.collectives, gpu="A100-40", **wanted)[0]
        # The slower device's times under the faster one's name: physics has nothing against it.
        other.update(time_us=row["time_us"], busbw_GBps=row["busbw_GBps"])


def copied_fits(bundle: Bundle) -> None:
    bundle.network["intra"]["A100-40"] = bundle.network["intra"]["V100-16"]


def copied_figures(bundle: Bundle) -> None:
    bundle.figures["H100"] = bundle.figures["B200"]


def copied_runs(bundle: Bundle) -> None:
    # Equal to 0.1 %: the neighbours' law has nothing against it.
    first, second = min(
        ((a, b) for a in bundle.runs for b in bundle.runs if a is not b),
        key=lambda pair: abs(pair[0]["step_time_s"] - pair[1]["step_time_s"]),
    )
    for key in ("step_time_s", "tflops_per_gpu", "mfu"):
        first[key] = second[key]
    first["peak_mem_gib"] = second["peak_mem_gib"] = 41.25


def derived_values(bundle: Bundle) -> None:
    bundle.network["inter"]["A100-40"]["V100-16"] = bundle.network["intra"]["V100-16"]["2"]


def degrees_do_not_multiply(bundle: Bundle) -> None:
    bundle.runs[0]["gpus"] = 60
    bundle.runs[0].update(tflops_per_gpu="", mfu="")


def batch_does_not_divide(bundle: Bundle) -> None:
    bundle.runs[0].update(global_batch=511, tflops_per_gpu="", mfu="")


def stages_of_another_model(bundle: Bundle) -> None:
    rows(bundle.runs, pp=2)[0]["other"] = "layers_per_stage=11/14"


def layers_twice(bundle: Bundle) -> None:
    bundle.plan["pipeline_list"][0]["layers_per_stage"][1][0] = 11


def a_stage_too_few(bundle: Bundle) -> None:
    bundle.cases["cases"][0]["planners"][0]["plan"]["layers"] = [26]


def profile_too_short(bundle: Bundle) -> None:
    profile = bundle.profiles["GPT-Neo-2.7"]["A100-40"]
    for by_tp in profile.values():
        for layers in by_tp.values():
            for layer in range(20, 34):
                del layers[str(layer)]


def other_sizes(bundle: Bundle) -> None:
    bundle.sizes["OPT-350"]["1"]["25"]["params_floats"] = 2048


def mfu_disagrees(bundle: Bundle) -> None:
    bundle.runs[0]["mfu"] *= 0.5


def counts_recompute(bundle: Bundle) -> None:
    hidden, layers, sequence, vocabulary = 3072, 30, 2048, 50257
    body = 72 * layers * hidden * hidden + 12 * layers * hidden * sequence
    head = 6 * vocabulary * hidden
    factor = (body * 4 / 3 + head) / (body + head)
    for column in ("tflops_per_gpu", "mfu"):
        scaled(bundle.runs, column, factor)


def counts_causal_half(bundle: Bundle) -> None:
    hidden, layers, sequence, vocabulary = 3072, 30, 2048, 50257
    square = 12 * layers * hidden * sequence
    body = 72 * layers * hidden * hidden + 6 * vocabulary * hidden
    for column in ("tflops_per_gpu", "mfu"):
        scaled(bundle.runs, column, (body + square / 2) / (body + square))


def rate_disagrees(bundle: Bundle) -> None:
    for column in ("tflops_per_gpu", "mfu"):
        scaled(bundle.runs, column, 0.63)


def mixed_kinds(bundle: Bundle) -> None:
    bundle.runs[3]["step_time_kind"] = "derived: from tokens/s"


def recompute_not_said(bundle: Bundle) -> None:
    set_all(bundle.runs, recompute="")


def tp_crosses_nodes(bundle: Bundle) -> None:
    bundle.runs[:] = rows(bundle.runs, tp=4)
    set_all(bundle.runs, gpus_per_node=2)


def precision_contradicted(bundle: Bundle) -> None:
    """Runs of one stage whose time is the sum of a float32 profile's layers."""
    profile = bundle.profiles["OPT-350"]["A100-40"]
    template = bundle.runs[0]
    bundle.runs[:] = []
    for size, tp in ((1, 1), (2, 1), (2, 2), (4, 2)):
        step = 8 * sum(f + b for f, b, _ in profile[str(size)][str(tp)].values())
        bundle.runs.append(
            {
                **template,
                "model": "opt-350m",
                "params_b": 0.35,
                "layers": 24,
                "hidden": 1024,
                "ffn_hidden": 4096,
                "gpu": "A100-40",
                "gpus": tp,
                "tp": tp,
                "pp": 1,
                "dp": 1,
                "micro_batch": size,
                "global_batch": 8 * size,
                "other": "layers_per_stage=26",
                "tflops_per_gpu": "",
                "mfu": "",
                "step_time_s": round(step * 1.05, 4),
            }
        )


def slower_than_neighbours(bundle: Bundle) -> None:
    for row in bundle.runs[4::11]:
        row["step_time_s"] = round(row["step_time_s"] * 1.4, 5)
        row["tflops_per_gpu"] = round(row["tflops_per_gpu"] / 1.4, 2)
        row["mfu"] = round(row["mfu"] / 1.4, 4)


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
    Fault("time-not-positive", ("layers",), time_not_positive),
    Fault("time-sentinel", ("layers",), time_sentinel),
    Fault("faster-than-peak", ("operators",), faster_than_peak),
    Fault("slower-than-class", ("layers",), slower_than_class),
    Fault(
        "one-label-two-precisions",
        ("layers",),
        one_label_two_precisions,
        frozenset({"faster-than-peak"}),  # TF32 is above the float32 peak
    ),
    Fault("backward-not-measured", ("layers",), backward_not_measured),
    Fault("input-gradient-only", ("operators",), input_gradient_only),
    Fault("backward-faster-than-forward", ("layers",), backward_faster),
    Fault("communication-inside", ("operators",), communication_inside),
    Fault("warm-up-inside", ("layers",), warm_up_inside),
    Fault("times-do-not-grow", ("layers",), times_do_not_grow),
    Fault("mixed-precisions", ("layers",), mixed_precisions),
    Fault("failure-as-number", ("collectives",), failure_as_number),
    Fault("bandwidth-not-positive", ("cities",), bandwidth_not_positive),
    Fault("missing-size", ("collectives",), missing_size),
    Fault("bandwidth-above-link", ("collectives",), bandwidth_above_link),
    Fault("unit-slip", ("collectives",), unit_slip),
    Fault("columns-disagree", ("collectives",), columns_disagree),
    Fault("flat-then-steep", ("collectives",), flat_then_steep),
    Fault("no-small-messages", ("collectives",), no_small_messages),
    Fault("fit-goes-negative", ("network",), fit_goes_negative),
    Fault("efficiency-above-one", ("efficiencies",), efficiency_above_one),
    Fault("efficiency-not-positive", ("efficiencies",), efficiency_not_positive),
    Fault("causal-attention-counted-full", ("efficiencies",), causal_full),
    Fault("key-ignores-a-column", ("efficiencies",), key_ignored),
    Fault("copied-values", ("collectives",), copied_values),
    Fault("copied-values", ("network",), copied_fits),
    Fault("copied-values", ("figures",), copied_figures),
    Fault("copied-values", ("runs",), copied_runs),
    Fault("copied-values", ("layer_samples", "other_samples"), another_device),
    Fault("derived-values", ("network",), derived_values),
    Fault("degrees-do-not-multiply", ("runs",), degrees_do_not_multiply),
    Fault("batch-does-not-divide", ("runs",), batch_does_not_divide),
    Fault("layer-list-mismatch", ("runs",), stages_of_another_model),
    Fault("layer-list-mismatch", ("plan",), layers_twice),
    Fault("layer-list-mismatch", ("cases",), a_stage_too_few),
    Fault("profile-of-another-model", ("profiles",), profile_too_short),
    Fault("profile-of-another-model", ("sizes",), other_sizes),
    Fault("mfu-disagrees", ("runs",), mfu_disagrees),
    Fault("rate-counts-recompute", ("runs",), counts_recompute),
    Fault("rate-counts-causal-half", ("runs",), counts_causal_half),
    Fault("rate-disagrees", ("runs",), rate_disagrees),
    Fault("mixed-step-time-kinds", ("runs",), mixed_kinds),
    Fault("recompute-not-said", ("runs",), recompute_not_said),
    Fault("tp-crosses-nodes", ("runs",), tp_crosses_nodes),
    Fault("precision-label-contradicted", ("runs", "profiles"), precision_contradicted),
    Fault("slower-than-neighbours", ("runs",), slower_than_neighbours),
    Fault("quantiles-out-of-order", ("layer_samples",), quantiles),
    Fault("more-outliers-than-runs", ("link_samples",), outliers),
    Fault("activations-below-input", ("layer_samples",), activations),
    Fault("clocks-differ", ("layer_samples",), clocks),
    Fault("populations-disagree", ("layer_samples", "other_samples"), populations),
    Fault("link-times-do-not-grow", ("link_samples",), link_flat),
    Fault("link-unlike-its-devices", ("cluster",), all_devices_added),
    Fault("link-unlike-its-devices", ("cluster",), bits_for_bytes),
    Fault("link-unlike-its-devices", ("cluster",), milliseconds),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.rule}-{fault.damage.__name__}")
@given(seed=SEEDS)
@settings(max_examples=3, deadline=None, derandomize=True, phases=PHASES)
def test_one_fault_makes_one_rule_speak(fault: Fault, seed: int) -> None:
    bundle = Bundle.draw(seed, *fault.parts)
    fault.damage(bundle)
    found = check(bundle, *fault.parts)
    assert {finding.rule for finding in found.findings} == {fault.rule} | fault.also, found.findings


def test_every_rule_has_a_fault() -> None:
    # Those of launches have theirs in tests/trainers/test_trainers_rules.py.
    elsewhere = {"file-is-wrong", *(rule.id for rule in LAUNCH_RULES)}
    assert {fault.rule for fault in FAULTS} == {rule.id for rule in RULES} - elsewhere


def test_rules_have_names_of_their_own() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.explanation.endswith(".")
        assert rule.advice.endswith(".")
