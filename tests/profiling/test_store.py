import json
import logging
from dataclasses import replace

import pytest
from profiling_samples import LAYER, LINK, PROVENANCE, layer

from hetplan.errors import InputError
from hetplan.profiling.samples import LayerSample, header, read_samples, row
from hetplan.profiling.store import (
    LayerWriter,
    LinkWriter,
    population_name,
    read_populations,
    read_store,
)


def written(store, *samples, provenance=PROVENANCE):
    writer = LayerWriter(store, provenance)
    for sample in samples:
        writer.append(sample)
    return writer


def test_samples_are_read_back_exactly(tmp_path) -> None:
    samples = (LAYER, layer(tp=2, steady=False), layer(median_seconds=1e-7, clock_hertz=1.98e9))
    written(tmp_path, *samples)
    links = LinkWriter(tmp_path, "long", PROVENANCE)
    links.append(LINK)
    found = read_store(tmp_path)
    assert found.layers == samples
    assert found.links == (LINK,)
    assert found.provenance == (PROVENANCE, PROVENANCE)
    assert {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*.csv")} == {
        "cpu",
        "links",
    }


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


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("hidden_size", "3.5", "a whole number"),
        ("median_seconds", "fast", "a number"),
        ("median_seconds", "nan", "finite"),
        ("median_seconds", "0.0", "above 0"),
        ("p90_seconds", "-1.0", "not negative"),
        ("steady", "maybe", "true or false"),
        ("device", "", "a name"),
        ("repeats", "0", "above 0"),
    ],
)
def test_faults_name_file_line_and_column(tmp_path, column, value, message) -> None:
    names = header(LayerSample).split(",")
    cells = row(LAYER).split(",")
    cells[names.index(column)] = value
    path = tmp_path / "layers.csv"
    path.write_text("\n".join((header(LayerSample), row(LAYER), ",".join(cells))) + "\n")
    with pytest.raises(InputError) as caught:
        read_samples(path, LayerSample)
    (fault,) = caught.value.faults
    assert (fault.file, fault.line, fault.field) == (str(path), 3, column)
    assert message in fault.message


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
