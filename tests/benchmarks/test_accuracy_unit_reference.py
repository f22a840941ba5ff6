"""The published unit data: how much of it is used, and that its traps are where they were seen."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from statistics import median

import pytest

from hetplan.benchmarks.accuracy import unit
from hetplan.benchmarks.accuracy.unit import UnitData, read_unit
from hetplan.cluster.catalogue import load_catalogue
from hetplan.profiling.samples import (
    LayerSample,
    LinkSample,
    OperatorSample,
    header,
    read_samples,
    row,
)

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "reference"
pytestmark = pytest.mark.skipif(
    not (REFERENCE / "unit").is_dir(), reason="published measurements are not here"
)
A100, GH200 = "nvidia-a100-40gb-sxm", "nvidia-gh200-96gb"


@lru_cache(maxsize=1)
def data() -> UnitData:
    return read_unit(REFERENCE)


def operators(device: str, operator: str, phase: str) -> list[OperatorSample]:
    return [
        each
        for population in data().populations
        for each in population.operators
        if (each.device, each.operator, each.phase) == (device, operator, phase)
    ]


def links(name: str) -> list[LinkSample]:
    return [each for one in data().populations for each in one.links if each.link == name]


def rate(sample: OperatorSample) -> float:
    return 2 * sample.batch * sample.m * sample.n * sample.k / sample.median_seconds


def test_every_population_has_one_provenance_and_a_known_kind() -> None:
    kinds = {kind.kind for kind in load_catalogue()}
    for population in data().populations:
        (provenance,) = population.provenance
        assert provenance.tool
        assert {each.device for each in population.layers} <= {provenance.device}
        assert {each.device for each in population.operators} <= {provenance.device}
        if population.layers or population.operators:
            assert provenance.device in kinds


def test_as_many_rows_are_counted_out_as_the_readme_names() -> None:
    notes = "\n".join(data().notes)
    assert "90 rows not used: layer_times.csv, single passes: 1e7 us" in notes
    assert "2368 rows not used: collectives.csv: 1e12 us" in notes
    assert "106 rows not used: collectives.csv: 1e9 us" in notes
    assert "55 rows not used: layer_profiles: OPT-30 on A100-40: float32 itself" in notes


def test_a_backward_product_is_one_product() -> None:
    for device, peak in ((A100, 312e12), (GH200, 989e12)):
        forward = [rate(each) for each in operators(device, "matrix_product", "forward")]
        gradients = operators(device, "matrix_product", "input_gradient")
        # Counted as two products the largest would run at nearly twice the peak rate.
        assert 0.5 * peak < max(rate(each) for each in gradients) < peak
        assert median(map(rate, gradients)) < 1.3 * median(forward)


def test_products_of_every_table_stay_below_the_peak() -> None:
    for device, peak in (("nvidia-b200-180gb-sxm", 2250e12), ("nvidia-a100-80gb-pcie", 312e12)):
        for phase in ("forward", "input_gradient", "weight_gradient"):
            found = operators(device, "matrix_product", phase)
            assert found
            assert max(map(rate, found)) < peak
        assert {each.output_precision for each in found} <= {"float32", "bfloat16"}


def test_memory_passes_stay_below_the_memorys_bandwidth() -> None:
    # The fused softmax is causal and does not read what it masks, so it is not among them.
    for operator in ("norm", "activation", "attention_dropout"):
        found = operators(A100, operator, "forward")
        assert found
        for each in found:
            width = 2 if each.precision == "float16" else 4
            moved = 2 * width * each.batch * each.m * each.n
            assert moved / each.median_seconds < 1555e9


def test_link_times_have_bandwidths_of_their_links() -> None:
    largest = {
        (each.group_size, each.operation): each.message_bytes / each.median_seconds
        for each in sorted(links(unit.VTRAIN_A100_NODE), key=lambda each: each.message_bytes)
    }
    assert 2 * 7 / 8 * largest[8, "all_reduce"] == pytest.approx(229e9, rel=0.02)
    for name in unit.SAILOR_NODES:
        assert {each.operation for each in links(name)} == {
            "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv",
        }  # fmt: skip
    crossing = {each.group_size for each in links(unit.GALVATRON_NODES)}
    assert crossing == {2, 4, 8, 16}
    assert {each.nodes for each in links(unit.GALVATRON_NODES)} == {2}


def test_what_remains_of_sliced_layers_is_their_slice() -> None:
    rows: dict[tuple[str, int, str, int, int], LayerSample] = {
        (each.device, each.hidden_size, each.phase, each.microbatch_size, each.tp): each
        for population in data().populations
        for each in population.layers
        if each.layer == "transformer"
    }
    shares = [
        each.median_seconds * tp / rows[device, hidden, phase, size, 1].median_seconds
        for (device, hidden, phase, size, tp), each in rows.items()
        if device in (A100, GH200) and tp in (2, 4) and size >= 8 and phase != "optimizer:adamw"
        if (device, hidden, phase, size, 1) in rows
    ]
    assert len(shares) > 20
    assert median(shares) == pytest.approx(1.05, abs=0.05)
    assert all(0.9 < share < 1.3 for share in shares)


def test_samples_go_through_a_store_file(tmp_path: Path) -> None:
    for sample_type in (OperatorSample, LayerSample, LinkSample):
        name = {OperatorSample: "operators", LayerSample: "layers", LinkSample: "links"}
        samples = tuple(
            each for one in data().populations for each in getattr(one, name[sample_type])[::17]
        )
        path = tmp_path / f"{name[sample_type]}.csv"
        path.write_text("\n".join([header(sample_type), *map(row, samples)]) + "\n")
        assert read_samples(path, sample_type) == samples
        assert len(samples) > 20
