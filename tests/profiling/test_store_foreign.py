"""What somebody else put into a population's folder is read, or named, and never lost."""

import pytest
from profiling_samples import LAYER, LINK, PRODUCT, PROVENANCE, layer

from hetplan.errors import InputError
from hetplan.profiling.samples import (
    LayerSample,
    LinkSample,
    OperatorSample,
    header,
    inspect_samples,
    read_samples,
    row,
)
from hetplan.profiling.store import LayerWriter, LinkWriter, OperatorWriter

WRITERS = {
    "layers.csv": (lambda store: LayerWriter(store, PROVENANCE), LayerSample, LAYER),
    "links.csv": (lambda store: LinkWriter(store, LINK.link, PROVENANCE), LinkSample, LINK),
    "operators.csv": (lambda store: OperatorWriter(store, PROVENANCE), OperatorSample, PRODUCT),
}
FOREIGN = {
    "no newline": b"device,operator,seconds",
    "another header": b"device,seconds\ncpu,1.5\ncpu,2.5",
    "binary": b"\x89PNG\r\n\x1a\n\x00\x01\xff\xfe",
    "binary without a line": b"\x00\xff" * 50,
    "our header in half": b"device,",
    "empty": b"",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=list(FOREIGN))
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_of_others_is_refused_and_stays_as_it_is(tmp_path, name, content) -> None:
    make, sample_type, sample = WRITERS[name]
    writer = make(tmp_path)
    path = writer.folder / name
    path.write_bytes(content)
    for write in (
        lambda: make(tmp_path),
        lambda: writer.append(sample),
        lambda: writer.add_new([sample]),
    ):
        with pytest.raises(InputError) as caught:
            write()
        assert all(fault.file == str(path) for fault in caught.value.faults)
        assert path.read_bytes() == content
    assert inspect_samples(path, sample_type).faults


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_file_that_a_spreadsheet_saved_is_read_and_added_to(tmp_path, newline) -> None:
    path = LayerWriter(tmp_path, PROVENANCE).folder / "layers.csv"
    lines = newline.join((header(LayerSample), row(LAYER), ""))
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode())
    assert read_samples(path, LayerSample) == (LAYER,)
    LayerWriter(tmp_path, PROVENANCE).append(layer(microbatch_size=8))
    assert read_samples(path, LayerSample) == (LAYER, layer(microbatch_size=8))
    assert path.read_text(encoding="utf-8").startswith("device,")


def test_a_header_that_is_no_text_is_one_fault(tmp_path) -> None:
    path = tmp_path / "layers.csv"
    path.write_bytes(b"PK\x03\x04\x00\xff\nrest\n")
    (fault,) = inspect_samples(path, LayerSample).faults
    assert "the header cannot be read" in fault.message
