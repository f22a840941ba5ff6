import os
import stat

import pytest

from hetplan.errors import InputError
from hetplan.files import shipped
from hetplan.files.shipped import default_store, shipped_folder
from hetplan.files.writing import append_line, write_atomically


def test_write_replaces_whole_files_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "plan.json"
    write_atomically(path, "one\n")
    path.chmod(0o640)
    write_atomically(path, "zwei ä\n")
    assert path.read_text(encoding="utf-8") == "zwei ä\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    write_atomically(path, "old\n")

    def fail(source, target):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match="choose another place"):
        write_atomically(path, "new\n")
    assert path.read_text() == "old\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_symlink_keeps_pointing_at_the_new_content(tmp_path):
    (tmp_path / "real.json").write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real.json")
    write_atomically(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"


def test_a_missing_folder_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="folder does not exist; create it"):
        write_atomically(tmp_path / "none" / "plan.json", "x")
    with pytest.raises(InputError, match="folder does not exist; create it"):
        append_line(tmp_path / "none" / "journal", "x")


def test_append_closes_a_half_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    append_line(path, "one")
    with path.open("a") as stream:
        stream.write("half")
    append_line(path, "two")
    assert path.read_text() == "one\nhalf\ntwo\n"
    with pytest.raises(ValueError, match="one line"):
        append_line(path, "a\nb")


def test_shipped_folders_in_a_checkout_and_installed(tmp_path, monkeypatch):
    assert (shipped_folder("configs") / "models").is_dir()
    package = tmp_path / "hetplan"
    (package / "shipped" / "configs").mkdir(parents=True)
    monkeypatch.setattr(shipped.hetplan, "__file__", str(package / "__init__.py"))
    assert shipped_folder("configs") == package / "shipped" / "configs"


def test_default_store_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_store() == tmp_path / "hetplan" / "profiles"
    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_store() == tmp_path / ".local" / "share" / "hetplan" / "profiles"
