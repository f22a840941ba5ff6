"""operators.csv: written, read and checked as the other files of a store are."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiling_samples import LAYER, LINK, NORM, PRODUCT, PROVENANCE

from hetplan.errors import InputError
from hetplan.files.reading import read_text
from hetplan.model.operators import OperatorClass
from hetplan.profiling.samples import (
    LinkSample,
    OperatorPhase,
    OperatorSample,
    header,
    read_samples,
    row,
)
from hetplan.profiling.store import (
    LayerWriter,
    LinkWriter,
    OperatorWriter,
    read_populations,
    read_store,
)


def written(store, *samples, provenance=PROVENANCE) -> OperatorWriter:
    writer = OperatorWriter(store, provenance)
    for sample in samples:
        writer.append(sample)
    return writer


def test_operators_stand_beside_the_layers_of_their_population(tmp_path) -> None:
    operators = written(tmp_path, PRODUCT, NORM)
    layers = LayerWriter(tmp_path, PROVENANCE)
    layers.append(LAYER)
    assert operators.folder == layers.folder
    (population,) = read_populations(tmp_path)
    assert population.operators == (PRODUCT, NORM)
    assert population.layers == (LAYER,)
    assert read_store(tmp_path).operators == (PRODUCT, NORM)
    assert OperatorWriter(tmp_path, PROVENANCE).samples == (PRODUCT, NORM)


@pytest.mark.parametrize(
    ("column", "text", "words"),
    [
        ("operator", "matmul", "found 'matmul'; it is one of matrix_product"),
        ("phase", "sideways", "found 'sideways'; it is one of forward"),
        ("precision", "fp4", "found 'fp4'; it is one of float32"),
        ("output_precision", "", "a name must stand here"),
        ("m", "0", "must be above 0"),
        ("batch", "0", "must be above 0"),
        ("k", "-1", "not negative"),
        ("median_seconds", "nan", "finite"),
        ("measured_on", "yesterday", "a date as"),
    ],
)
def test_a_wrong_cell_is_named_and_the_rest_is_kept(tmp_path, column, text, words) -> None:
    writer = written(tmp_path, PRODUCT, NORM)
    path = writer.folder / "operators.csv"
    names = header(OperatorSample).split(",")
    lines = read_text(path).splitlines()
    cells = lines[1].split(",")
    cells[names.index(column)] = text
    path.write_text("\n".join((lines[0], ",".join(cells), lines[2])) + "\n")
    with pytest.raises(InputError, match=words) as caught:
        read_populations(tmp_path)
    fault = caught.value.faults[0]
    assert (fault.line, fault.field, fault.file) == (2, column, str(path))


_COUNTS = st.integers(min_value=1, max_value=2**40)
_SECONDS = st.floats(min_value=1e-9, max_value=1e6)


@given(
    st.builds(
        OperatorSample,
        device=st.sampled_from(["cpu", "a, b", '"quoted"']),
        operator=st.sampled_from([each.value for each in OperatorClass]),
        phase=st.sampled_from([each.value for each in OperatorPhase]),
        precision=st.just("float16"),
        output_precision=st.just("float32"),
        batch=_COUNTS,
        m=_COUNTS,
        n=_COUNTS,
        k=st.integers(min_value=0, max_value=2**40),
        median_seconds=_SECONDS,
        p10_seconds=_SECONDS,
        p90_seconds=_SECONDS,
        repeats=_COUNTS,
        outliers=st.integers(min_value=0, max_value=9),
        measured_on=st.sampled_from(["", "2026-11-21"]),
    )
)
def test_every_sample_is_read_back_exactly(tmp_path_factory, sample) -> None:
    path = tmp_path_factory.getbasetemp() / "operators-read-back.csv"
    path.write_text(f"{header(OperatorSample)}\n{row(sample)}\n", encoding="utf-8")
    assert read_samples(path, OperatorSample) == (sample,)


def test_links_of_the_older_form_are_read_and_brought_up_to_date(tmp_path) -> None:
    crossing = replace(LINK, link="far", nodes=2, groups=4)
    writer = LinkWriter(tmp_path, "far", PROVENANCE)
    writer.append(replace(crossing, nodes=1, groups=1))
    path = writer.folder / "links.csv"
    lines = [line.rsplit(",", 2)[0] for line in read_text(path).splitlines()]
    path.write_text("\n".join(lines) + "\n")
    assert "nodes" not in read_text(path)
    assert read_store(tmp_path).links == (replace(crossing, nodes=1, groups=1),)
    LinkWriter(tmp_path, "far", PROVENANCE).append(crossing)
    assert read_text(path).startswith(header(LinkSample))
    assert read_store(tmp_path).links == (replace(crossing, nodes=1, groups=1), crossing)
