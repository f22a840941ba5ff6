import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from hetplan.errors import HetplanError, InputError
from hetplan.files.writing import (
    ScratchFolder,
    append_line,
    check_writable,
    write_atomically,
    write_together,
)


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


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    left = tmp_path / f".plan.json.{os.getuid()}.tmp"
    left.write_text("half of")
    check_writable(tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []
    left.write_text("half of")
    write_atomically(tmp_path / "plan.json", "whole\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]
    left.symlink_to("/etc/passwd")
    with pytest.raises(InputError, match="choose another place"):
        write_atomically(tmp_path / "plan.json", "new\n")


def test_the_folder_of_a_killed_process_goes_with_the_next_start(tmp_path, monkeypatch):
    place = tmp_path / "temporary"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".lock").touch()
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    child = os.fork()
    if child == 0:
        folder = ScratchFolder("run")
        (folder.path / "rank-0.log").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert list(place.glob("*/rank-0.log"))
    # Killed before it had its lock; somebody else's link to a folder that has one.
    (place / "hetplan-run-new").mkdir()
    (place / "hetplan-run-link").symlink_to(tmp_path / "mine")
    kept = ScratchFolder("run")
    (kept.path / "rank-0.log").write_text("of a run that failed")
    kept.keep()
    live = ScratchFolder("run")
    with ScratchFolder("run") as last:
        names = {"hetplan-run-link", kept.path.name, live.path.name, last.name}
        assert {each.name for each in place.iterdir()} == names
    live.remove()
    assert {each.name for each in place.iterdir()} == {"hetplan-run-link", kept.path.name}
    assert [each.name for each in kept.path.iterdir()] == ["rank-0.log"]
    assert (tmp_path / "mine" / ".lock").exists()


@pytest.mark.parametrize("last", ["os.remove", "os.rmdir"])
def test_a_ctrl_c_while_a_folder_is_removed_leaves_nothing(tmp_path, monkeypatch, last):
    """Nor one while a file's lock is released, or a file that was not renamed is removed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name = last.removeprefix("os.").replace("remove", "unlink")
    called, function = [], getattr(os, name)

    def broken_off(*where, **options):
        called.append(where)
        if len(called) == 1:
            raise KeyboardInterrupt
        function(*where, **options)

    def work():
        check_writable(tmp_path / "plan.json") if last == "os.remove" else None
        ScratchFolder("run").remove()

    monkeypatch.setattr(os, name, broken_off)
    with pytest.raises(KeyboardInterrupt):
        work()
    assert list(tmp_path.iterdir()) == []


def test_writers_at_the_same_time_wait_for_each_other(tmp_path):
    """And none removes the other's file as one that was left."""
    path, done = tmp_path / "plan.json", []

    def write(text):
        for _ in range(50):
            write_atomically(path, text)
            check_writable(path)
        done.append(text)

    writers = [threading.Thread(target=write, args=(text * 1000,)) for text in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(text[0] for text in done) == list("abcd")
    assert path.read_text() in done
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_symlink_keeps_pointing_at_the_new_content(tmp_path):
    (tmp_path / "real.json").write_text("old")
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "real.json")
    write_atomically(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "real.json").read_text() == "new"


def test_append_closes_a_half_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    append_line(path, "one")
    with path.open("a") as stream:
        stream.write("half")
    append_line(path, "two")
    assert path.read_text() == "one\nhalf\ntwo\n"
    with pytest.raises(ValueError, match="one line"):
        append_line(path, "a\nb")


def test_of_several_files_all_are_written_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / name for name in ("model.yaml", "cluster.yaml", "job.yaml")]
    paths[1].write_text("old")
    synced = []

    def full_disk(handle: int) -> None:
        synced.append(handle)
        if len(synced) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(HetplanError, match=r"cannot write .*job\.yaml: No space left on device"):
        write_together(dict.fromkeys(paths, "new"))
    assert [*tmp_path.iterdir()] == [paths[1]]
    assert paths[1].read_text() == "old"
    monkeypatch.undo()
    write_together(dict.fromkeys(paths, "new"))
    assert {path.read_text() for path in tmp_path.iterdir()} == {"new"}
    assert len([*tmp_path.iterdir()]) == 3


def test_what_was_kept_stays_whoever_locks_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a user's folder of logs, in which another run was killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = ScratchFolder("run")
    (kept.path / "log").write_text("mine")
    kept.keep()
    own = tmp_path / "hetplan-run-mine"
    own.mkdir()
    for folder in (kept.path, own):
        code = f"import os; from pathlib import Path; from hetplan.files.locks import Lock;\
 held = Lock(Path({str(folder)!r})).take(); os._exit(9)"
        subprocess.run([sys.executable, "-c", code], check=False)
        assert (folder / ".lock").exists()
    ScratchFolder("run").remove()
    assert (kept.path / "log").read_text() == "mine"
    assert own.is_dir()
