"""A profile store: what is written is read back, what is wrong is named, nothing is mixed."""

import json
import logging
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiling_samples import LAYER, LINK, NORM, PRODUCT, PROVENANCE, layer

from hetplan.errors import InputError
from hetplan.files.reading import read_text
from hetplan.profiling.samples import (
    LayerSample,
    header,
    inspect_samples,
    read_samples,
    row,
)
from hetplan.profiling.store import (
    FILES,
    LayerWriter,
    LinkWriter,
    OperatorWriter,
    population_name,
    read_populations,
    read_store,
)

SAMPLES = (LAYER, PRODUCT, LINK)
each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=lambda each: type(each).__name__)


def opened(store, sample, provenance=PROVENANCE):
    """A writer of samples like this one."""
    if sample is LINK:
        return LinkWriter(store, LINK.link, provenance)
    return {LAYER: LayerWriter, PRODUCT: OperatorWriter}[sample](store, provenance)


def written(store, *samples, provenance=PROVENANCE):
    writer = LayerWriter(store, provenance)
    for sample in samples:
        writer.append(sample)
    return writer


def test_samples_are_read_back_exactly(tmp_path) -> None:
    samples = (LAYER, layer(tp=2, steady=False), layer(median_seconds=1e-7, clock_hertz=1.98e9))
    layers = written(tmp_path, *samples)
    LinkWriter(tmp_path, "long", PROVENANCE).append(LINK)
    operators = OperatorWriter(tmp_path, PROVENANCE)
    operators.append(PRODUCT)
    operators.append(NORM)
    assert operators.folder == layers.folder
    found = read_store(tmp_path)
    assert (found.layers, found.links, found.operators) == (samples, (LINK,), (PRODUCT, NORM))
    assert found.provenance == (PROVENANCE, PROVENANCE)
    parts = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.csv")}
    assert parts == {"cpu", "links"}


_VALUES = {
    "int": st.integers(min_value=1, max_value=2**40),
    "float": st.floats(min_value=1e-9, max_value=1e6),
    "bool": st.booleans(),
    "str": st.sampled_from(["cpu", "a, b", '"quoted"']),
}


@each_sample
@given(data=st.data())
def test_every_sample_is_read_back_exactly(tmp_path_factory, sample, data) -> None:
    fixed = ("operator", "phase", "precision", "output_precision", "measured_on")
    values = {
        field.name: data.draw(_VALUES[field.type])
        for field in fields(sample)
        if field.name not in fixed
    }
    changed = replace(sample, **values)
    path = tmp_path_factory.getbasetemp() / "read-back.csv"
    path.write_text(f"{header(type(sample))}\n{row(changed)}\n", encoding="utf-8")
    assert read_samples(path, type(sample)) == (changed,)


def test_a_population_is_one_set_of_circumstances(tmp_path) -> None:
    written(tmp_path, LAYER)
    later = replace(PROVENANCE, measured_on="2026-05-05", command="other", hetplan_version="9")
    written(tmp_path, layer(tp=2), provenance=later)
    assert len(read_populations(tmp_path)) == 1
    for change in (
        {"driver": "Linux 7"},
        {"torch_version": "3"},
        {"threads": 2},
        {"paced": "slow"},
        {"device_name": "Another"},
    ):
        written(tmp_path, layer(tp=4), provenance=replace(PROVENANCE, **change))
    populations = read_populations(tmp_path)
    assert len(populations) == 6
    for population in populations:
        (provenance,) = population.provenance
        assert bool(population.layers[0].tp == 4) == (provenance != PROVENANCE)
        folder = tmp_path / "cpu" / population_name(provenance)
        assert json.loads((folder / "provenance.json").read_text())["threads"] == (
            provenance.threads
        )


def test_several_folders_and_parts_of_a_store_can_be_read(tmp_path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    writer = written(one, LAYER)
    written(two, layer(tp=2))
    assert len(read_store(one, two).layers) == 2
    assert len(read_store(one, one / "cpu", writer.folder).layers) == 1
    with pytest.raises(InputError, match="no such folder"):
        read_store(tmp_path / "three")


def test_a_kill_at_any_byte_leaves_a_readable_store(tmp_path, caplog) -> None:
    samples = [layer(sequence_length=length) for length in (16, 32, 64)]
    writer = written(tmp_path, *samples)
    path = writer.folder / "layers.csv"
    data = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(data) if byte == ord("\n")]
    for length in range(ends[0], len(data) + 1):
        path.write_bytes(data[:length])
        whole = sum(end <= length for end in ends) - 1
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert read_store(tmp_path).layers == tuple(samples[:whole])
        assert bool(caplog.records) == (length not in ends)
        if length % 7 == 0 or length in ends:
            # A second run goes on from there, and the torn line does not spoil its rows.
            again = written(tmp_path)
            assert list(again.samples) == samples[:whole]
            again.append(samples[-1])
            assert list(read_store(tmp_path).layers) == [*samples[:whole], samples[-1]]


def test_a_kill_before_the_first_row_leaves_a_readable_store(tmp_path) -> None:
    writer = written(tmp_path)
    assert read_store(tmp_path).layers == ()
    (writer.folder / "layers.csv").unlink()
    assert read_store(tmp_path).layers == ()
    (writer.folder / "provenance.json").unlink()
    assert read_populations(tmp_path) == ()
    written(tmp_path, LAYER)
    assert read_store(tmp_path).layers == (LAYER,)


def test_samples_without_provenance_are_refused(tmp_path) -> None:
    writer = written(tmp_path, LAYER)
    (writer.folder / "provenance.json").unlink()
    with pytest.raises(InputError, match=r"provenance\.json"):
        read_store(tmp_path)


CELLS = (
    (LAYER, "hidden_size", "3.5", "a whole number"),
    (LAYER, "median_seconds", "fast", "a number"),
    (LAYER, "median_seconds", "nan", "finite"),
    (LAYER, "median_seconds", "0.0", "above 0"),
    (LAYER, "p90_seconds", "-1.0", "not negative"),
    (LAYER, "steady", "maybe", "true or false"),
    (LAYER, "device", "", "a name"),
    (LAYER, "repeats", "0", "above 0"),
    (PRODUCT, "operator", "matmul", "found 'matmul'; it is one of matrix_product"),
    (PRODUCT, "phase", "sideways", "found 'sideways'; it is one of forward"),
    (PRODUCT, "precision", "fp4", "found 'fp4'; it is one of float32"),
    (PRODUCT, "output_precision", "", "a name must stand here"),
    (PRODUCT, "m", "0", "must be above 0"),
    (PRODUCT, "k", "-1", "not negative"),
    (PRODUCT, "measured_on", "yesterday", "a date as"),
)


@pytest.mark.parametrize(("sample", "column", "text", "words"), CELLS)
def test_a_wrong_cell_is_named_and_the_rest_is_kept(tmp_path, sample, column, text, words) -> None:
    kind = type(sample)
    names, cells = header(kind).split(","), row(sample).split(",")
    cells[names.index(column)] = text
    path = tmp_path / "samples.csv"
    path.write_text("\n".join((header(kind), ",".join(cells), row(sample))) + "\n")
    found = inspect_samples(path, kind)
    assert found.samples == (sample,)
    (fault,) = found.faults
    assert (fault.file, fault.line, fault.field) == (str(path), 2, column)
    assert words in fault.message


def test_all_faults_of_a_file_are_listed(tmp_path) -> None:
    path = tmp_path / "layers.csv"
    broken = row(LAYER).replace("gpt", "").replace("true", "yes")
    path.write_text(f"{header(LayerSample)}\n{broken}\ntoo,short\n")
    with pytest.raises(InputError) as caught:
        read_samples(path, LayerSample)
    assert [fault.line for fault in caught.value.faults] == [2, 2, 3]
    path.write_text("device,colour\n")
    with pytest.raises(InputError, match="colour: unknown column"):
        read_samples(path, LayerSample)
    path.write_text("")
    with pytest.raises(InputError, match="header line is missing"):
        read_samples(path, LayerSample)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "links"])
def test_names_that_lead_out_of_the_store_are_refused(tmp_path, name) -> None:
    with pytest.raises(InputError, match="device kind"):
        LayerWriter(tmp_path, replace(PROVENANCE, device=name))


def test_a_store_is_tables_of_pandas_with_a_column_per_field(tmp_path) -> None:
    LayerWriter(tmp_path, PROVENANCE).append(LAYER)
    tables = read_store(tmp_path).to_pandas()
    assert list(tables["layers"].columns) == header(LayerSample).split(",")
    assert tables["layers"]["median_seconds"].tolist() == [LAYER.median_seconds]
    assert (len(tables["provenance"]), len(tables["links"]), len(tables["operators"])) == (1, 0, 0)


FOREIGN = {
    "no newline": b"device,operator,seconds",
    "another header": b"device,seconds\ncpu,1.5\ncpu,2.5",
    "binary": b"\x89PNG\r\n\x1a\n\x00\x01\xff\xfe",
    "binary without a line": b"\x00\xff" * 50,
    "our header in half": b"device,",
    "empty": b"",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=list(FOREIGN))
@each_sample
def test_a_file_of_others_is_refused_and_stays_as_it_is(tmp_path, sample, content) -> None:
    writer = opened(tmp_path, sample)
    path = writer.folder / FILES[type(sample)]
    path.write_bytes(content)
    for write in (
        lambda: opened(tmp_path, sample),
        lambda: writer.append(sample),
        lambda: writer.add_new([sample]),
    ):
        with pytest.raises(InputError) as caught:
            write()
        assert all(fault.file == str(path) for fault in caught.value.faults)
        assert path.read_bytes() == content
    assert inspect_samples(path, type(sample)).faults


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_file_that_a_spreadsheet_saved_is_read_and_added_to(tmp_path, newline) -> None:
    path = LayerWriter(tmp_path, PROVENANCE).folder / "layers.csv"
    lines = newline.join((header(LayerSample), row(LAYER), ""))
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode())
    assert read_samples(path, LayerSample) == (LAYER,)
    LayerWriter(tmp_path, PROVENANCE).append(layer(microbatch_size=8))
    assert read_samples(path, LayerSample) == (LAYER, layer(microbatch_size=8))
    assert path.read_text(encoding="utf-8").startswith("device,")


@pytest.mark.parametrize(("sample", "later"), [(LAYER, 1), (LINK, 2)])
def test_a_file_of_an_older_form_is_read_and_brought_up_to_date(tmp_path, sample, later) -> None:
    writer = opened(tmp_path, sample)
    writer.append(sample)
    path = writer.folder / FILES[type(sample)]
    older = "\n".join(line.rsplit(",", later)[0] for line in read_text(path).splitlines()) + "\n"
    path.write_text(older)
    assert read_samples(path, type(sample)) == (sample,)
    assert path.read_text() == older
    again = replace(sample, measured_on="2026-03-04")
    opened(tmp_path, sample).append(again)
    assert read_text(path).startswith(header(type(sample)))
    assert read_samples(path, type(sample)) == (sample, again)
