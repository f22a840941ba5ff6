"""What lint makes of files: what hetplan ships is clean, garbage is a clean error."""

from __future__ import annotations

from pathlib import Path

import pytest
from lint_samples import Bundle

from hetplan.errors import InputError
from hetplan.files.shipped import shipped_folder
from hetplan.lint.reading import LaunchContext, Reading, read_all
from hetplan.lint.registry import findings
from hetplan.profiling.store import read_populations


def read(*paths: Path, context: LaunchContext | None = None) -> Reading:
    return read_all(paths, context or LaunchContext())


@pytest.mark.parametrize("name", ["profiles", "configs"])
def test_nothing_is_said_of_what_hetplan_ships(name: str) -> None:
    found = findings(read(shipped_folder(name)))  # type: ignore[arg-type]
    assert found.findings == ()
    assert found.files


def test_kinds_are_recognised_by_shape_and_not_by_name(tmp_path: Path) -> None:
    Bundle.draw(1).write(tmp_path)
    for number, path in enumerate(sorted(tmp_path.iterdir())):
        if path.is_file():
            path.rename(tmp_path / f"{number}{path.suffix}")
    reading = read(tmp_path)
    assert reading.skipped == ()
    assert reading.faults == ()
    for name in ("collectives", "layer_samples", "link_samples", "clusters"):
        assert getattr(reading.inputs, name), name


BROKEN = (b"\x00\xff\xfe\x01", b"\x00\xff\n\x01", b"colour,taste\nred,sweet\n", b"")


@pytest.mark.parametrize("name", ["layers.csv", "links.csv", "operators.csv"])
@pytest.mark.parametrize("content", BROKEN)
def test_samples_that_a_fit_refuses_are_told(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "drawn").mkdir()
    Bundle.draw(1).write(tmp_path / "drawn", "layer_samples")
    provenance = next((tmp_path / "drawn").rglob("provenance.json")).read_text()
    folder = tmp_path / "store" / "cpu" / "population"
    folder.mkdir(parents=True)
    (folder / "provenance.json").write_text(provenance)
    (folder / name).write_bytes(content)
    with pytest.raises(InputError):
        read_populations(tmp_path / "store")
    reading = read(tmp_path / "store")
    assert reading.skipped == ()
    assert {fault.file for fault in reading.faults} == {str(folder / name)}
    # Without a provenance beside it it is anybody's file.
    (folder / "provenance.json").unlink()
    assert len(read(tmp_path / "store").skipped) == (1 if content else 0)


def test_wrong_cells_are_faults_with_their_line(tmp_path: Path) -> None:
    bundle = Bundle.draw(1, "collectives")
    bundle.collectives[2]["time_us"] = "fast"
    bundle.collectives[4]["busbw_GBps"] = "1" + "0" * 400
    bundle.write(tmp_path, "collectives")
    reading = read(tmp_path)
    assert [(fault.line, fault.field) for fault in reading.faults] == [
        (4, "time_us"),
        (6, "busbw_GBps"),
    ]
    assert [each.rule for each in findings(reading).findings] == ["file-is-wrong"] * 2
