"""Every value that is written to disk keeps its form: one file per type and schema number.

Where a form changes, raise the schema number here and in the product, let the reader accept the
older files, and run `python tests/golden/test_golden.py`: it writes the newest file's value in the
new form. Fill in what the new form can say, and commit the file. A file that exists is never
rewritten.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from hetplan.cluster.devices import DeviceKinds
from hetplan.cluster.spec import Cluster
from hetplan.comparison.compare import Comparison
from hetplan.cost.estimate_values import Estimate
from hetplan.files.encoding import encode
from hetplan.files.reading import decode, read_document
from hetplan.importers.records import Imported
from hetplan.job.spec import Job
from hetplan.launchers.numerics import Numerics
from hetplan.launchers.run_log import RunLog
from hetplan.lint.findings import Findings
from hetplan.machine.report import MachineReport
from hetplan.model.spec import ModelSpec
from hetplan.plans.plan import Plan
from hetplan.predict.fit import FittedLaws
from hetplan.profiling.pacing import Pace
from hetplan.profiling.samples import (
    LATER_COLUMNS,
    LayerSample,
    LinkSample,
    OperatorSample,
    Provenance,
    header,
    read_samples,
    row,
)
from hetplan.runtime.checkpoint_contents import CheckpointManifest
from hetplan.search.result import SearchResult

FOLDER = Path(__file__).parent

SCHEMAS = {
    CheckpointManifest: "hetplan.checkpoint/4",
    Comparison: "hetplan.comparison/1",
    ModelSpec: "hetplan.model-value/3",
    Cluster: "hetplan.cluster-value/10",
    Job: "hetplan.job-value/9",
    Plan: "hetplan.plan-value/5",
    Estimate: "hetplan.estimate/5",
    SearchResult: "hetplan.plan/16",
    Provenance: "hetplan.provenance/2",
    Pace: "hetplan.pace/2",
    FittedLaws: "hetplan.predictor/2",
    RunLog: "hetplan.run/3",
    Imported: "hetplan.import/5",
    MachineReport: "hetplan.doctor/2",
    DeviceKinds: "hetplan.device-kinds/3",
    Findings: "hetplan.findings/2",
    Numerics: "hetplan.numerics/1",
}
"""Current schema of every type that is written to disk."""

ROWS = {LayerSample: 2, LinkSample: 3, OperatorSample: 1}
"""Every kind of CSV file, which has no schema line, and the number of its current form."""


def golden(type_: type, number: str | int, suffix: str = "json") -> Path:
    """The file of a type's form."""
    return FOLDER / f"{type_.__name__}.v{number}.{suffix}"


@pytest.mark.parametrize("type_", SCHEMAS, ids=lambda type_: type_.__name__)
def test_every_value_that_is_written_keeps_its_form(type_):
    schema = SCHEMAS[type_]
    path = golden(type_, schema.rpartition("/")[2])
    assert path.is_file(), f"{path.name} is missing: run `python tests/golden/test_golden.py`"
    value = decode(read_document(path), type_, schema=schema)
    assert encode(value, schema=schema) == path.read_text(encoding="utf-8"), (
        f"the form of {type_.__name__} has changed: raise its schema number, keep {path.name} for "
        "readers of old files, and write the new golden file"
    )


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.name)
def test_golden_files_of_every_number_are_read(path):
    type_ = next(each for each in SCHEMAS if each.__name__ == path.name.partition(".")[0])
    assert decode(read_document(path), type_, schema=SCHEMAS[type_])


@pytest.mark.parametrize("type_", ROWS, ids=lambda type_: type_.__name__)
def test_every_csv_file_keeps_its_form_and_older_ones_are_read(type_):
    path = golden(type_, ROWS[type_], "csv")
    (sample,) = read_samples(path, type_)
    assert path.read_text(encoding="utf-8") == f"{header(type_)}\n{row(sample)}\n"
    for number in range(1, ROWS[type_]):
        older = golden(type_, number, "csv")
        (read,) = read_samples(older, type_)
        names = older.read_text(encoding="utf-8").partition("\n")[0].split(",")
        later = [name for name in header(type_).split(",") if name not in names]
        assert later
        assert {name: getattr(read, name) for name in later} == {
            name: LATER_COLUMNS[name] for name in later
        }
        assert replace(read, **{name: getattr(sample, name) for name in later}) == sample


def write_missing() -> None:
    """The value of the newest file there is, in the current form."""
    for type_, schema in SCHEMAS.items():
        number = int(schema.rpartition("/")[2])
        if not golden(type_, number).exists():
            value = decode(read_document(golden(type_, number - 1)), type_, schema=schema)
            golden(type_, number).write_text(encode(value, schema=schema), encoding="utf-8")


if __name__ == "__main__":
    write_missing()
