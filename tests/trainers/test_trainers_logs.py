"""Trainers' logs: every form that they print, and what real files do to it."""

from __future__ import annotations

import gzip
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from training_logs_rendered import (
    megatron_arguments,
    megatron_line,
    megatron_timers,
    nemo_line,
    torchtitan_line,
)

from hetplan.errors import InputError
from hetplan.trainers.read_log import read_training_log
from hetplan.trainers.training_log import LoggedTimer, Mark, MemoryKind, TimerRanks, Trainer

TIMERS = {"forward-backward": (900.5, 1000.25), "optimizer": (10.0, 12.0)}


def written(folder: Path, lines: Sequence[str], name: str = "train.log", end: str = "\n") -> Path:
    path = folder / name
    path.write_bytes((end.join(lines) + end).encode())
    return path


def read(folder: Path, lines: Sequence[str], **settings):
    return read_training_log([written(folder, lines)], **settings)


def test_megatrons_lines_and_timers(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        [
            megatron_arguments(world_size=64, tensor_model_parallel_size=8, seq_length=2048),
            megatron_line(10, 2000.0),
            "[Rank 0] (after 10 iterations) memory (MB) | allocated: 100.0 | "
            "max allocated: 2048.0 | reserved: 3000.0 | max reserved: 3000.0",
            megatron_line(20, 1234.5),
            megatron_timers(TIMERS),
        ],
    )
    assert log.trainer is Trainer.MEGATRON
    assert [step.seconds for step in log.steps] == pytest.approx([2.0, 1.2345])
    assert [step.iteration for step in log.steps] == [10, 20]
    assert log.steps[0].marks == (Mark.FIRST,)
    assert log.steps[1].global_batch_size == 256
    assert log.steps[1].timers[0] == LoggedTimer(
        name="forward-backward", least_seconds=0.9005, most_seconds=1.00025
    )
    assert {fact.name: fact.value for fact in log.facts} == {
        "world_size": 64,
        "tp": 8,
        "sequence_length": 2048,
    }
    assert (log.peak_memory_bytes, log.memory_kind) == (2.0**31, MemoryKind.ALLOCATED)


@pytest.mark.parametrize(
    ("form", "ranks"),
    [
        ("minmax", TimerRanks.ALL),
        ("all", TimerRanks.ALL),
        ("max", TimerRanks.ALL),
        ("line", TimerRanks.LAST),
    ],
)
def test_every_form_of_timers(tmp_path: Path, form: str, ranks: TimerRanks) -> None:
    log = read(tmp_path, [megatron_line(1, 2000.0), megatron_timers(TIMERS, form)])
    found = {timer.name: timer for timer in log.steps[0].timers}
    assert set(found) == set(TIMERS)
    assert found["forward-backward"].most_seconds == pytest.approx(1.00025)
    least = 0.9005 if form in ("minmax", "all") else 1.00025
    assert found["forward-backward"].least_seconds == pytest.approx(least)
    assert found["optimizer"].ranks is ranks


def test_checkpoints_and_evaluations_mark_the_steps_after_them(tmp_path: Path) -> None:
    log = read(
        tmp_path,
        [
            *(megatron_line(at, 1000.0) for at in (10, 20)),
            "saving checkpoint at iteration      20 to /ckpt in torch_dist format",
            "  successfully saved checkpoint from iteration      20 to /ckpt [ t 1/8, p 1/4 ]",
            "(min, max) time across ranks (ms):",
            "    save-checkpoint ................................: (24895.07, 24895.13)",
            megatron_line(30, 9000.0),
            " validation loss at iteration 30 | lm loss value: 1.0E+01 | lm loss PPL: 2.0E+04 |",
            *(megatron_line(at, 1000.0, skipped=at == 50) for at in (40, 50, 60)),
        ],
    )
    assert {step.iteration: step.marks for step in log.steps} == {
        10: (Mark.FIRST,),
        20: (),
        30: (Mark.CHECKPOINT,),
        40: (Mark.EVALUATION,),
        50: (Mark.SKIPPED,),
        60: (),
    }
    assert not any(timer.name == "save-checkpoint" for step in log.steps for timer in step.timers)


def test_torchtitan_with_colours_ranks_and_validation(tmp_path: Path) -> None:
    lines = [
        "[rank0]:[titan] - root - INFO - Building device mesh with parallelism: pp=1, "
        "dp_replicate=1, dp_shard=8, cp=1, tp=2, ep=1, etp=1",
        "[rank0]:[titan] - root - INFO - Training starts at step 1, with local batch size 8, "
        "global batch size 64, gradient accumulation steps 1, sequence length 8192, total steps 9",
    ]
    for step in (1, 10, 20, 30):
        for rank in range(4):
            rate = 512 if step == 1 else 5000 - rank
            lines.append(f"[rank{rank}]:{torchtitan_line(step, rate, memory=40 + rank)}")
        if step == 10:
            lines.append("[rank0]:[titan] - root - INFO - Saving the checkpoint (or staging).")
        if step == 20:
            lines.append(
                "[rank0]:\x1b[33mvalidate step: 20  \x1b[32mloss:  7.1  memory: 10.00GiB(9.00%)  "
                "tps: 9,000\x1b[39m"
            )
    log = read(tmp_path, lines)
    assert log.trainer is Trainer.TORCHTITAN
    assert [(step.iteration, step.tokens_per_second) for step in log.steps] == [
        (1, 512.0), (10, 4997.0), (20, 4997.0), (30, 4997.0),
    ]  # fmt: skip
    assert [step.marks for step in log.steps] == [
        (Mark.FIRST,), (), (Mark.CHECKPOINT,), (Mark.EVALUATION,),
    ]  # fmt: skip
    assert log.memory_kind is MemoryKind.RESERVED
    assert log.peak_memory_bytes == 43 * 2.0**30
    facts = {fact.name: fact.value for fact in log.facts}
    assert facts["world_size"] == 16
    assert (facts["tp"], facts["global_batch_size"], facts["sequence_length"]) == (2, 64, 8192)


def test_nemo_counts_steps_from_zero(tmp_path: Path) -> None:
    log = read(tmp_path, [f"[default0]:{nemo_line(at, 12.0 + at)}" for at in range(3)])
    assert log.trainer is Trainer.NEMO
    assert [(step.iteration, step.seconds) for step in log.steps] == [(1, 12), (2, 13), (3, 14)]
    assert log.peak_memory_bytes == 70833405952


@pytest.mark.parametrize(
    "prefix",
    [
        "[default7]:", "[rank7]: ", "7: ", "15: [default7]:", "[1,7]<stdout>: ",
        "2026-01-02T03:04:05.123Z ", "node-7: ",
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_launchers_put_before_a_line(tmp_path: Path, prefix: str, end: str) -> None:
    block = [megatron_line(10, 2000.0), *megatron_timers(TIMERS).split("\n")]
    block += [megatron_line(20, 1000.0), *megatron_timers(TIMERS, "all").split("\n")]
    path = written(tmp_path, [prefix + line for line in block], end=end)
    log = read_training_log([path])
    assert [step.seconds for step in log.steps] == [2.0, 1.0]
    assert len(log.steps[0].timers) == 2
    if not prefix.startswith(("2026", "node")):
        assert len(log.steps[1].timers) == 2


def test_files_of_a_run_that_was_restarted_are_parts_of_it(tmp_path: Path) -> None:
    first = written(tmp_path, [megatron_line(at, 1000.0) for at in range(10, 110, 10)], "1.log")
    second = written(tmp_path, [megatron_line(at, 1000.0) for at in range(90, 200, 10)], "2.log")
    for paths in ([first, second], [second, first]):
        log = read_training_log(paths)
        assert len(log.steps) == 21
        assert {step.attempt for step in log.steps} == {0, 1}
        assert sum(Mark.FIRST in step.marks for step in log.steps) == 2


def test_a_line_that_was_cut_off_does_not_become_a_short_step(tmp_path: Path) -> None:
    whole = "\n".join(megatron_line(at, 12345.6) for at in (10, 20, 30)) + "\n"
    for end in range(len(whole) // 2, len(whole), 5):
        path = tmp_path / "cut.log"
        path.write_text(whole[:end])
        try:
            log = read_training_log([path])
        except InputError:
            continue
        assert all(step.seconds == pytest.approx(12.3456) for step in log.steps)
    titan = "\n".join(torchtitan_line(at, 21734) for at in (10, 20)) + "\n"
    for end in range(0, len(titan), 3):
        path.write_text(titan[:end])
        try:
            log = read_training_log([path])
        except InputError:
            continue
        assert all(step.tokens_per_second == 21734 for step in log.steps)


def test_gzip_whole_and_broken(tmp_path: Path) -> None:
    text = "\n".join(megatron_line(at, 1000.0) for at in range(10, 5010, 10)) + "\n"
    path = tmp_path / "train.log.gz"
    packed = gzip.compress(text.encode(), mtime=0)
    path.write_bytes(packed)
    assert len(read_training_log([path]).steps) == 500
    path.write_bytes(packed[: len(packed) // 2])
    assert 0 < len(read_training_log([path]).steps) < 500
    path.write_bytes(packed[:4] + b"xx")
    with pytest.raises(InputError, match="gzip"):
        read_training_log([path])


def test_what_is_no_log_is_refused_and_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.log"
    empty.write_text(" \n")
    with pytest.raises(InputError, match=r"empty\.log: the file is empty"):
        read_training_log([empty])
    with pytest.raises(InputError, match="is a folder"):
        read_training_log([tmp_path])
    empty.write_bytes(b"\x28\xb5\x2f\xfddata")
    with pytest.raises(InputError, match="packed by zstd"):
        read_training_log([empty])
    empty.write_bytes(megatron_line(10, 1000.0).encode("utf-16-le"))
    with pytest.raises(InputError, match="UTF-16"):
        read_training_log([empty])
    with pytest.raises(InputError, match="not a regular file"):
        read_training_log([Path("/dev/zero")])
    with pytest.raises(InputError, match="No such file"):
        read_training_log([tmp_path / "none.log"])
    other = written(tmp_path, ["Epoch 1: loss 3.2, 12 s", "step: 10  loss: 3"], "other.log")
    with pytest.raises(InputError, match="no line of a finished step"):
        read_training_log([other])
    with pytest.raises(InputError, match="known: megatron"):
        read_training_log([other], trainer="alpa")


def test_files_of_two_trainers_or_two_runs_are_refused(tmp_path: Path) -> None:
    one = written(tmp_path, [megatron_line(10, 1000.0)], "a.log")
    two = written(tmp_path, [torchtitan_line(10, 5000)], "b.log")
    with pytest.raises(InputError, match="megatron and torchtitan"):
        read_training_log([one, two])
    assert read_training_log([two, one], trainer="megatron").trainer is Trainer.MEGATRON
    three = written(tmp_path, [megatron_arguments(world_size=8), megatron_line(1, 1.0)], "c.log")
    four = written(tmp_path, [megatron_arguments(world_size=9), megatron_line(2, 1.0)], "d.log")
    with pytest.raises(InputError, match=r"world_size 8.*9: these are different runs"):
        read_training_log([three, four])


def test_a_large_log_is_not_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.log"
    noise = b"x" * 999_999 + b"\n"
    with path.open("wb") as stream:
        stream.write(megatron_line(10, 1000.0).encode() + b"\n")
        for _ in range(24):
            stream.write(noise)
        stream.write(b"y" * 8_000_000)  # one line without an end
    tracemalloc.start()
    try:
        log = read_training_log([path])
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(log.steps) == 1
    assert most < 2_000_000, f"{most} bytes for a log of 32 MB"


@pytest.mark.parametrize(
    "words",
    [
        "global_step: 1 | ", "iteration 1/ 2 | ", "step: 1 ", "[rank0]:", "a ..: ", "\x1b[",
        "time (ms) | a: 1 ", "global batch size 1 ", "Saving a ",
        "elapsed time per iteration (ms): ", "0/1, ", "12: ",
    ],
)  # fmt: skip
def test_a_hostile_line_does_not_hang_an_expression(tmp_path: Path, words: str) -> None:
    line = (words * (60_000 // len(words))) + " train_step_timing in s: x tps: "
    path = written(tmp_path, [line] * 5 + [megatron_line(10, 1000.0)])
    began = time.process_time()
    assert len(read_training_log([path]).steps) >= 1
    # Against a hang, which only time shows (work inside regular expressions): 30 times what the
    # slowest takes (0.1 s). Twice as slow for every character more would take for ever.
    assert time.process_time() - began < 3.0
