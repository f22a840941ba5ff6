"""An emitted folder is whole or says that it is not, and nothing of a person's is lost."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hetplan.errors import InputError
from hetplan.schedulers.launch import EmittedFile
from hetplan.trainers import folder as folder_module
from hetplan.trainers.folder import MANIFEST, changed_files, read_manifest, write_folder

FILES = (
    EmittedFile(path="start-here.sh", text="echo here\n", executable=True),
    EmittedFile(path="train/plan.yaml", text="a: 1\n"),
    EmittedFile(path="README.md", text="read me\n"),
)


def names(place: Path) -> set[str]:
    return {str(each.relative_to(place)) for each in place.rglob("*") if not each.is_dir()}


def test_a_new_folder_holds_the_files_and_their_manifest(tmp_path: Path) -> None:
    out = tmp_path / "run"
    written = write_folder(out, FILES, "megatron")
    assert written.files == tuple(each.path for each in FILES)
    assert names(out) == {*written.files, MANIFEST}
    assert (out / "train/plan.yaml").read_text() == "a: 1\n"
    manifest = read_manifest(out)
    assert manifest is not None
    assert (manifest.target, manifest.complete) == ("megatron", True)
    assert changed_files(out, manifest) == ()
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_scripts_can_be_run_and_other_files_cannot(tmp_path: Path) -> None:
    write_folder(tmp_path / "run", FILES, "megatron")
    assert os.access(tmp_path / "run/start-here.sh", os.X_OK)
    assert not stat.S_IMODE((tmp_path / "run/README.md").stat().st_mode) & 0o111


def test_a_folder_with_anything_in_it_is_refused_without_force(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"not empty.*--force"):
        write_folder(tmp_path, FILES, "megatron")
    assert names(tmp_path) == {"notes.txt"}


def test_force_keeps_other_files_and_replaces_its_own(tmp_path: Path) -> None:
    write_folder(tmp_path, FILES, "megatron")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "README.md").write_text("changed by hand")
    newer = (EmittedFile(path="start-here.sh", text="echo there\n"), *FILES[2:])
    written = write_folder(tmp_path, newer, "flagscale", force=True)
    assert written.edited == ("README.md",)
    assert written.removed == ("train/plan.yaml",)
    assert names(tmp_path) == {"start-here.sh", "README.md", MANIFEST, "notes.txt"}
    assert not (tmp_path / "train").exists()
    assert (tmp_path / "start-here.sh").read_text() == "echo there\n"
    assert not os.access(tmp_path / "start-here.sh", os.X_OK)
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.target == "flagscale"


def test_an_old_file_that_was_changed_by_hand_stays(tmp_path: Path) -> None:
    write_folder(tmp_path, FILES, "megatron")
    (tmp_path / "train/plan.yaml").write_text("a: 2\n")
    written = write_folder(tmp_path, FILES[:1], "megatron", force=True)
    assert (written.kept, written.removed) == (("train/plan.yaml",), ("README.md",))
    assert (tmp_path / "train/plan.yaml").read_text() == "a: 2\n"
    # Now it is the person's own.
    with pytest.raises(InputError, match="is not from hetplan emit"):
        write_folder(tmp_path, FILES, "megatron", force=True)


def test_force_does_not_replace_what_no_manifest_names(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(InputError, match=r"README.md: is not from hetplan emit"):
        write_folder(tmp_path, FILES, "megatron", force=True)
    assert names(tmp_path) == {"README.md"}
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.parametrize("link", ["train", "start-here.sh", MANIFEST])
def test_links_inside_are_not_followed(tmp_path: Path, link: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "plan.yaml").write_text("not yours")
    run = tmp_path / "run"
    write_folder(run, FILES, "megatron")
    if link == "train":
        (run / "train/plan.yaml").unlink()
        (run / "train").rmdir()
        (run / "train").symlink_to(outside)
    else:
        (run / link).unlink()
        (run / link).symlink_to(outside / "plan.yaml")
    with pytest.raises(InputError, match="is a symbolic link"):
        write_folder(run, FILES, "megatron", force=True)
    assert (outside / "plan.yaml").read_text() == "not yours"


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a//b", ".hidden", "a/../b", "a b", "", "-x"])
def test_paths_that_leave_the_folder_are_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(InputError, match="cannot be the path"):
        write_folder(tmp_path / "run", (EmittedFile(path=path, text=""),), "megatron")
    assert not (tmp_path / "run").exists()


class Killed(BaseException):
    """Stands for a signal that ends the program."""


@pytest.mark.parametrize("at", range(5))
def test_what_a_kill_leaves_behind_can_be_emitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    older = (*FILES[:2], EmittedFile(path="old.txt", text="old"))
    write_folder(tmp_path, older, "megatron")
    newer = (EmittedFile(path="start-here.sh", text="echo new\n"), *FILES[1:])
    writes = 0
    write = folder_module.write_atomically

    def dying(path: Path, text: str) -> None:
        nonlocal writes
        if writes == at:
            raise Killed
        writes += 1
        write(path, text)

    monkeypatch.setattr(folder_module, "write_atomically", dying)
    with pytest.raises(Killed):
        write_folder(tmp_path, newer, "flagscale", force=True)
    monkeypatch.undo()
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    # Killed before anything was written the old folder is there, whole; later it says incomplete.
    assert manifest.complete == (at == 0)
    assert (at == 0) == (changed_files(tmp_path, manifest) == () and manifest.complete)
    write_folder(tmp_path, newer, "flagscale", force=True)
    assert names(tmp_path) == {*(each.path for each in newer), MANIFEST}
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.complete


def test_a_kill_while_a_new_folder_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(path: Path, text: str) -> None:
        raise Killed

    monkeypatch.setattr(folder_module, "write_atomically", dying)
    with pytest.raises(Killed):
        write_folder(tmp_path / "run", FILES, "megatron")
    assert list(tmp_path.iterdir()) == []


def test_two_emissions_do_not_write_one_folder_at_one_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, FILES, "megatron")
    second: list[str] = []
    write = folder_module._write

    def slowly(folder: Path, each: EmittedFile) -> None:
        monkeypatch.setattr(folder_module, "_write", write)
        with pytest.raises(InputError, match="another hetplan emit writes there now") as caught:
            write_folder(tmp_path, FILES[:1], "flagscale", force=True)
        second.append(str(caught.value))
        write(folder, each)

    monkeypatch.setattr(folder_module, "_write", slowly)
    write_folder(tmp_path, FILES, "megatron", force=True)
    assert len(second) == 1
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.complete
    assert all((tmp_path / entry.path).is_file() for entry in manifest.files)
    write_folder(tmp_path, FILES[:1], "flagscale", force=True)


def test_what_a_kill_left_half_written_goes_with_the_next_emission(tmp_path: Path) -> None:
    write_folder(tmp_path, FILES, "megatron")
    left = (f".{MANIFEST}.77.tmp", ".start-here.sh.123.tmp", "train/.plan.yaml.9.tmp")
    mine = (".start-here.sh.mine.tmp", ".notes.7.tmp", "start-here.sh.7.tmp")
    for name in (*left, *mine):
        (tmp_path / name).write_text("half")
    write_folder(tmp_path, FILES, "megatron", force=True)
    assert names(tmp_path) == {*(each.path for each in FILES), MANIFEST, *mine}
