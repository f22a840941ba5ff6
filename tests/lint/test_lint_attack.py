"""Shipped measurements made slightly wrong, and files with more faults than anybody reads."""

import csv
import io
import shutil

import pytest
from counted_steps import steps_of

from hetplan.files.shipped import shipped_folder
from hetplan.lint.reading import LaunchContext, read_all
from hetplan.lint.registry import findings

TIMES = ("median_seconds", "p10_seconds", "p90_seconds")


@pytest.fixture
def store(tmp_path):
    shutil.copytree(shipped_folder("profiles"), tmp_path / "store")
    return tmp_path / "store"


def edit(path, change):
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    change(rows)
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path.write_text(out.getvalue())


def test_the_steps_of_reading_grow_no_faster_than_the_rows(store):
    path = next(store.rglob("layers.csv"))
    text = path.read_text()

    def steps(copies):
        def lengthen(rows):
            first = rows[:100]
            rows[:] = [
                {
                    **row,
                    "sequence_length": int(row["sequence_length"]) + 4096 * at,
                    **{each: float(row[each]) * (1 + at / 97) for each in TIMES},
                }
                for at in range(copies)
                for row in first
            ]

        path.write_text(text)
        edit(path, lengthen)
        return steps_of(lambda: findings(read_all([path], LaunchContext())))

    assert steps(16) < 2.1 * steps(8)


def test_a_file_of_a_million_faults_is_told_in_a_page(store):
    path = next(store.rglob("layers.csv"))
    head = path.read_text().split("\n", 1)[0]
    path.write_text(head + "\n" + "x\n" * 5000)
    seen = findings(read_all([path], LaunchContext())).findings
    assert len(seen) == 21
    assert sum(each.count for each in seen) == 5000
    assert seen[-1].lines[0] == 22  # line 1 is the header, lines 2 to 21 are told one by one
