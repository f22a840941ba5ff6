"""The JSON Schemas of all input files: `python -m hetplan.job.schemas configs/schemas`."""

from __future__ import annotations

import sys
from pathlib import Path

from hetplan.cluster.catalogue import DEVICES_SCHEMA, DevicesForm
from hetplan.cluster.file_form import CLUSTER_SCHEMA, ClusterForm
from hetplan.files.quantities import schema_text
from hetplan.files.writing import write_atomically
from hetplan.job.load import JOB_SCHEMA, JobForm
from hetplan.job.sweep_form import SWEEP_SCHEMA, SweepForm
from hetplan.model.load import MODEL_SCHEMA, ModelForm


def input_schemas() -> tuple[tuple[str, str], ...]:
    """(file name, text) of every schema."""
    forms = (
        ("model", ModelForm, MODEL_SCHEMA, "hetplan model"),
        ("cluster", ClusterForm, CLUSTER_SCHEMA, "hetplan cluster"),
        ("devices", DevicesForm, DEVICES_SCHEMA, "hetplan device kinds"),
        ("job", JobForm, JOB_SCHEMA, "hetplan job"),
        ("sweep", SweepForm, SWEEP_SCHEMA, "hetplan sweep"),
    )
    return tuple(
        (f"{name}.schema.json", schema_text(form, schema=schema, title=title))
        for name, form, schema, title in forms
    )


def write_schemas(folder: Path) -> None:
    """Write every schema into this folder, which must exist."""
    for name, text in input_schemas():
        write_atomically(folder / name, text)


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
