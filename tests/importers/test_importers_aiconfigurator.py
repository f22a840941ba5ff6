"""AIConfigurator's tables: into a store, through the fit, to a kind that counts as measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetplan.cluster.catalogue import load_catalogue
from hetplan.errors import InputError
from hetplan.importers.storing import import_provenance, store_imported
from hetplan.importers.table import import_file, import_text
from hetplan.predict.fit import fit_stores
from hetplan.predict.operator.values import sample_operator
from hetplan.profiling.store import read_populations

HEADER = "framework,version,device,op_name,kernel_source,gemm_dtype,m,n,k,latency\n"
SIZES = [(m, n, k) for m in (1024, 4096, 8192) for n in (2048, 8192) for k in (2048, 8192)]


def row(m: int, n: int, k: int, dtype: str = "bfloat16", version: str = "1.2", **more: str) -> str:
    # 2 us for a launch, and 500 TFLOP/s (1,000 in FP8).
    rate = 1e15 if dtype == "fp8" else 5e14
    latency = more.get("latency") or f"{(2e-6 + 2.0 * m * n * k / rate) * 1e3:.9f}"
    return f"SGLang,{version},NVIDIA H100 80GB HBM3,gemm,torch,{dtype},{m},{n},{k},{latency}\n"


def test_a_table_makes_its_kind_a_measured_one(tmp_path: Path) -> None:
    table = tmp_path / "gemm_perf.txt"
    table.write_text(
        HEADER
        + "".join(row(*sizes) for sizes in SIZES)
        + "".join(row(*sizes, dtype="fp8") for sizes in SIZES)
        + row(1024, 2048, 2048, version="1.10", latency="0.05")
        + row(1024, 2048, 2048, dtype="int8")
    )
    imported = import_file(None, table)
    assert imported.skipped == ("1 rows: gemm_dtype 'int8', of which no plan makes use",)
    assert any("1 rows of older versions" in note for note in imported.notes)
    assert any("bursts" in note for note in imported.notes)
    provenance = import_provenance(table, imported, measured_on="2026-01-02")
    assert provenance.device == "nvidia-h100-80gb-sxm"
    stored = store_imported(imported, tmp_path / "store", provenance)
    assert stored.added == 2 * len(SIZES)
    assert store_imported(imported, tmp_path / "store", provenance).already_there == stored.added
    (population,) = read_populations(tmp_path / "store")
    # 1.10 is newer than 1.2.
    assert {each.median_seconds for each in population.operators if each.m * each.n < 3e6} == {
        5e-5,
        *(
            each.median_seconds
            for each in imported.operator_samples
            if each.m == 1024 and each.n == 2048 and (each.k > 2048 or each.precision != "bfloat16")
        ),
    }
    predictor, _ = fit_stores(tmp_path / "store")
    kind = next(each for each in load_catalogue() if each.kind == provenance.device)
    laws = {law.precision: law for law in predictor.laws.operators}
    assert set(laws) == {"bfloat16", "float8"}
    large = replace(imported.operator_samples[0], m=16384, n=8192, k=8192)
    for name, rate in (("bfloat16", 5e14), ("float8", 1e15)):
        seconds = laws[name].seconds(sample_operator(large))
        assert seconds == pytest.approx(2.0 * 16384 * 8192 * 8192 / rate, rel=0.1)
    assert kind.peak("float8") > kind.peak("bfloat16")


@pytest.mark.parametrize(
    ("text", "line", "field", "words"),
    [
        (HEADER + row(1024, 2048, 2048, latency="0"), 2, "latency", "above 0"),
        (HEADER + row(1024, 2048, 2048, latency="nan"), 2, "latency", "milliseconds"),
        (HEADER + row(1024, 2048, 2048) + row(0, 2048, 2048), 3, "m", "at least 1"),
        (HEADER + "a,b\n", 2, "", "2 columns where the header has 10"),
        (HEADER, 1, "", "at least one row"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", 1, "", "git lfs pull"),
        (
            HEADER + row(1024, 2048, 2048) + row(1, 2, 3).replace("H100 80GB HBM3", "L40S"),
            1,
            "",
            "several devices",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, line: int, field: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        import_text(text, "gemm_perf.txt")
    fault = error.value.faults[0]
    assert (fault.line, fault.field) == (line, field)
    assert words in fault.message


def test_messages_of_collectives_are_elements() -> None:
    text = "nccl_dtype,num_gpus,message_size,op_name,latency\nhalf,8,1024,all_gather,0.5\n"
    (sample,) = import_text(text, "nccl.txt", link="node").links
    assert (sample.message_bytes, sample.group_size, sample.median_seconds) == (2048, 8, 5e-4)
