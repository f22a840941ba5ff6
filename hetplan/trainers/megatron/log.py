"""Megatron-LM's iteration lines and timers, and those of the trainers that kept its lines.

     iteration       10/     100 | consumed samples:         2560 | elapsed time per iteration (ms):
     1234.5 | throughput per GPU (TFLOP/s/GPU): 180.1 | ... | global batch size:   256 | ...

A line is the mean over the steps since the line before (`--log-interval`; megatron/training/
training.py, `training_log`). The timers below it (megatron/core/timers.py; `--timing-log-level 2`
for those of the passes) are means over the same steps, in three forms by `--timing-log-option`:

    (min, max) time across ranks (ms):          max time across ranks (ms):    times across ranks...
        forward-backward ......: (1.00, 2.00)       forward-backward ...: 2.00   forward-backward:
                                                                                     rank  0: 1.00

Versions before 2022 print one line, `time (ms) | forward-compute: 53.79 | ...`, of one rank. Minima
are over the ranks that ran the timer. Newer versions stop the clock of a step for checkpoints and
evaluations, older ones do not; the step after either is marked in both. ezpz's logger writes
`elapsed_time_per_iteration_ms=29570.0`. Settings come from the list of arguments that a run begins
with; `printed_arguments` reads that list as a launch.
"""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

from hetplan.errors import Fault, InputError
from hetplan.importers.lines import finite_number
from hetplan.trainers.launch_values import GIVEN_FILE, Given, LaunchHost, LaunchText, Setting
from hetplan.trainers.log_lines import log_lines
from hetplan.trainers.megatron.flags import FLAGS, Takes
from hetplan.trainers.training_log import (
    IN_PASSES,
    ONE_OF,
    WAITING,
    LogForm,
    LoggedTimer,
    LogReader,
    Mark,
    Quantity,
    TimerRanks,
    Trainer,
    meanings,
)
from hetplan.units import MEBIBYTE

_MEMORY = re.compile(r"max[ _-]allocated\s{0,2}[:=]\s{0,4}([\d.]{1,24})")
_BLOCK = re.compile(r"(\(min, max\) time|max time|times) across ranks \(ms\)")
_ROW = re.compile(
    r"(?:^|\s)([A-Za-z][\w/-]{1,60}) {0,2}\.{2,60}: {0,2}"
    r"(?:\(([\d.eE+]{1,24}), {0,2}([\d.eE+]{1,24})\)|([\d.eE+]{1,24}))\s{0,8}$",
    re.ASCII,
)
_ODD_ROW = re.compile(
    r"(?:^|\s)[A-Za-z][\w/-]{1,60} {0,2}\.{2,60}: {0,2}\(.{0,80}\)\s{0,8}$", re.ASCII
)
_NO_TIMES = "timers whose figures are no times (negative, not finite, least above most): left out"
_NAME = re.compile(r"\s{1,8}([A-Za-z][\w/-]{1,60}):\s{0,4}$", re.ASCII)
_RANK = re.compile(r"\s{1,16}rank\s{1,8}\d{1,7}: {0,2}([\d.eE+]{1,24})\s{0,4}$", re.ASCII)
_ONE_LINE = re.compile(r"time \(ms\)((?: \| [\w/ -]{1,60}: [\d.eE+]{1,24})+)\s{0,4}$", re.ASCII)
_ARGUMENT = re.compile(r"(?:^|\s)([a-z][a-z_]{1,60}) \.{3,60} (\d{1,12})\s{0,4}$", re.ASCII)
_FACTS = {
    "world_size": "world_size",
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "micro_batch_size": "microbatch_size",
    "seq_length": "sequence_length",
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
}
"""Megatron's arguments that say which run it is; the global batch may rise, lines say it."""
ARGUMENTS = b"------------------------ arguments ------------------------"
"""The line above the list of arguments that Megatron-LM prints at its start."""
_END = "end of arguments"
_PRINTED = re.compile(r"(?:^|\s)([a-z][a-z0-9_]{1,80}) (?:\.{1,60} )?(.{0,4000})$", re.ASCII)
_BY_ARGUMENT = {flag.argument: flag for flag in FLAGS.values()}
_DERIVED = ("encoder_num_layers", "decoder_num_layers", "encoder_seq_length")
"""Arguments that arguments.py fills in from others."""
_NOT_OF_A_STEP = ("checkpoint", "evaluate", "interval-time", "setup", "iterators", "model and")


def _elapsed(unit: str) -> re.Pattern[str]:
    return re.compile(
        r"elapsed[ _]time[ _]per[ _]iteration[ _]"
        rf"\(?{unit}\)?\s{{0,2}}[:=]\s{{0,6}}([\d.eE+]{{1,24}}) {{0,2}}\|"
    )


FORM = LogForm(
    trainer=Trainer.MEGATRON,
    words=(
        *(b"iteration", b"time across ranks", b"times across ranks", b"time (ms)", b"memory (MB)"),
        *(b"checkpoint", b"evaluat", b"validation", b"....", b"rank ", b":\n", b":\r"),
    ),
    example="`iteration 10/ 100 | ... elapsed time per iteration (ms): ... |`",
    iteration=re.compile(
        r"iteration\s{0,2}[ =:]\s{0,10}(\d{1,12})\s{0,4}/\s{0,12}\d{1,12} {0,2}\|"
    ),
    time=(
        "seconds",
        (
            (_elapsed("ms"), 1e-3),
            # Megatron-DeepSpeed printed seconds for a while (2022).
            (_elapsed("s"), 1.0),
        ),
    ),
    figures=(
        (
            "tokens_per_second",
            re.compile(r"throughput \(token/sec/GPU\):\s{0,4}([\d.]{1,20}) {0,2}\|"),
            1.0,
        ),
        (
            "global_batch_size",
            re.compile(r"global[ _]batch[ _]size\s{0,2}[:=]\s{0,10}(\d{1,12}) {0,2}\|"),
            1.0,
        ),
    ),
    ends_with_line=False,
    skipped=re.compile(
        r"number[ _]of[ _](?:skipped|nan)[ _]iterations\s{0,2}[:=]\s{0,10}0*([1-9]\d{0,9})"
    ),
    events=(
        (re.compile(r"saving checkpoint at iteration\s{1,10}(\d{1,12})"), Mark.CHECKPOINT),
        (re.compile(r"saved checkpoint from iteration\s{1,10}(\d{1,12})"), Mark.CHECKPOINT),
        (re.compile(r"save-checkpoint[\w-]{0,20} \.{2,60}:()"), Mark.CHECKPOINT),
        (re.compile(r"time \(ms\) \| save-checkpoint:()"), Mark.CHECKPOINT),
        (re.compile(r"validation loss at iteration\s{1,10}(\d{1,12})"), Mark.EVALUATION),
        (re.compile(r"validation after iteration\s{1,10}(\d{1,12})"), Mark.EVALUATION),
        (re.compile(r"(?:^|\s)evaluate \.{2,60}:()"), Mark.EVALUATION),
    ),
)


TIMERS = meanings(
    ("forward-backward", Quantity.SCHEDULE, "holds bubble, transfers and, in new versions, "
     "the reduction"),
    ("forward-compute", Quantity.FORWARD, f"{IN_PASSES}, and batch-generator"),
    ("backward-compute", Quantity.BACKWARD, f"{IN_PASSES}, and recomputation"),
    ("batch-generator", Quantity.DATA, "inside forward-compute"),
    ("forward-recv", Quantity.WAITS, WAITING),
    ("forward-send", Quantity.WAITS, WAITING),
    ("backward-recv", Quantity.WAITS, WAITING),
    ("backward-send", Quantity.WAITS, WAITING),
    ("forward-send-forward-recv", Quantity.WAITS, WAITING),
    ("forward-send-backward-recv", Quantity.WAITS, WAITING),
    ("backward-send-forward-recv", Quantity.WAITS, WAITING),
    ("backward-send-backward-recv", Quantity.WAITS, WAITING),
    ("forward-backward-send-forward-backward-recv", Quantity.WAITS, WAITING),
    ("all-grads-sync", Quantity.REDUCTION, "what nothing hides"),
    ("grads-all-reduce", Quantity.REDUCTION, "after the passes"),
    ("grads-reduce-scatter", Quantity.REDUCTION, "after the passes"),
    ("backward-params-all-reduce", Quantity.REDUCTION, "after the passes"),
    ("embedding-grads-all-reduce", Quantity.EMBEDDING, "waits for the other end included"),
    ("backward-embedding-all-reduce", Quantity.EMBEDDING, "waits for the other end included"),
    ("layernorm-grads-all-reduce", None, "sums of what sequence parallelism leaves whole"),
    ("non-tensor-parallel-grads-all-reduce", None, "sums of what tp leaves whole"),
    ("conditional-embedder-grads-all-reduce", None, "models with a conditional embedder"),
    ("params-all-gather", Quantity.GATHERING, "what nothing hides"),
    ("backward-gather-model-params", Quantity.GATHERING, "after the update"),
    ("optimizer", Quantity.END, "holds the norm and, without overlap, the gathering"),
    ("optimizer-clip-main-grad", Quantity.NORM, ""),
    ("optimizer-inner-step", Quantity.UPDATE, ONE_OF),
    ("optimizer-copy-to-main-grad", Quantity.UPDATE, ONE_OF),
    ("optimizer-unscale-and-check-inf", Quantity.UPDATE, ONE_OF),
    ("optimizer-count-zeros", Quantity.UPDATE, ONE_OF),
    ("optimizer-copy-main-to-model-params", Quantity.UPDATE, ONE_OF),
    # Megatron-LM of 2020.
    ("forward", Quantity.FORWARD, IN_PASSES),
    ("backward-backward", Quantity.BACKWARD, f"{IN_PASSES}, and recomputation"),
    ("backward-allreduce", Quantity.REDUCTION, "after the passes"),
    ("batch generator", Quantity.DATA, "inside forward"),
)  # fmt: skip
"""What each timer counts."""


class MegatronLog(LogReader):
    """Also reads the timers below a step, its memory, and the list of arguments."""

    def __init__(self, form: LogForm = FORM) -> None:
        super().__init__(form)
        self._timer = ""
        """Name above the `rank` lines."""

    def other(self, text: str) -> None:
        """A timer, memory or an argument."""
        if "max" in text and "memory (MB)" in text and (memory := _MEMORY.search(text)):
            # report_memory (training/utils.py) divides bytes by 1024 * 1024.
            peak = (finite_number(memory.group(1)) or 0.0) * MEBIBYTE
            self.log.peak_memory_bytes = max(self.log.peak_memory_bytes, peak)
        elif "time (ms) |" in text:
            self._one_line(text)
        elif (row := _ROW.search(text)) is not None:
            self._row(row)
        elif self.has_step and _ODD_ROW.search(text):
            self.log.note(_NO_TIMES)
        elif _BLOCK.search(text):
            self._timer = ""
        elif (rank := _RANK.match(text)) is not None:
            self._add(self._timer, finite_number(rank.group(1)))
        elif (name := _NAME.match(text)) is not None:
            self._timer = name.group(1)
        elif not self.log.steps and (setting := _ARGUMENT.search(text)) is not None:
            known = _FACTS.get(setting.group(1))
            if known is not None:
                self.log.fact(known, int(setting.group(2)))

    def _row(self, row: re.Match[str]) -> None:
        least = finite_number(row.group(2) or row.group(4))
        most = finite_number(row.group(3) or row.group(4))
        self._add(row.group(1), least, most)

    def _one_line(self, text: str) -> None:
        found = _ONE_LINE.search(text)
        for part in found.group(1).split(" | ")[1:] if found is not None else ():
            name, _, value = part.rpartition(": ")
            self._add(name, finite_number(value), ranks=TimerRanks.LAST)

    def _add(
        self,
        name: str,
        least: float | None,
        most: float | None = None,
        ranks: TimerRanks = TimerRanks.ALL,
    ) -> None:
        """Milliseconds of a timer, to the last step's; those of several ranks are one timer."""
        most = least if most is None else most
        if not self.has_step or not name:
            return
        if least is None or most is None or least > most:
            self.log.note(_NO_TIMES)
            return
        if any(word in name for word in _NOT_OF_A_STEP):
            return
        step = self.log.steps[-1]
        known = {timer.name: timer for timer in step.timers}
        before = known.get(name)
        known[name] = LoggedTimer(
            name=name,
            least_seconds=min(least / 1e3, before.least_seconds if before else least / 1e3),
            most_seconds=max(most / 1e3, before.most_seconds if before else most / 1e3),
            ranks=ranks,
        )
        self.log.steps[-1] = replace(step, timers=tuple(known.values()))


# ---- the list of arguments


def printed_arguments(
    path: Path, trainer: str, given: Given = (), hosts: tuple[LaunchHost, ...] = ()
) -> LaunchText:
    """The launch of a run, from the list of arguments in its log.

    The list has every argument, defaults included, as arguments.py leaves them; those of `FLAGS`
    become settings. An InputError where the log has no such list, or its end is missing.
    """
    settings: list[Setting] = []
    inside = complete = False
    for line in log_lines(path, (ARGUMENTS, b" . ", b"...", b"end of arguments", b"  ")):
        if _END in line.text:
            complete = inside
            break
        if ARGUMENTS.decode() in line.text:
            settings, inside = [], True
        elif inside and (printed := _PRINTED.search(line.text)) is not None:
            values = _flag_values(printed.group(1), printed.group(2).strip())
            if values is not None:
                name, words = values
                settings.append(Setting(name=name, values=words, file=str(path), line=line.number))
    if not complete:
        message = (
            "holds no complete list of Megatron-LM's arguments: the lines between `arguments` and "
            "`end of arguments` that the first rank prints at its start"
        )
        raise InputError(Fault(file=str(path), message=message))
    for at, (name, value) in enumerate(given, start=1):
        values_given = () if value.lower() == "true" else (value,)
        flag_name = name.replace("_", "-")
        settings.append(Setting(name=flag_name, values=values_given, file=GIVEN_FILE, line=at))
    return LaunchText(trainer=trainer, settings=tuple(settings), hosts=hosts)


def _flag_values(argument: str, printed: str) -> tuple[str, tuple[str, ...]] | None:
    """The flag of a printed argument and its values; None where it has its default or no flag."""
    if argument == "world_size":
        return "world-size", (printed,)
    known = _BY_ARGUMENT.get(argument)
    if known is None or printed in ("None", "") or argument in _DERIVED:
        return None
    if known.takes in (Takes.SWITCH, Takes.OFF):
        wanted = "True" if known.takes is Takes.SWITCH else "False"
        return (known.name, ()) if printed == wanted else None
    if printed.startswith("["):
        try:
            entries = ast.literal_eval(printed)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            entries = []
        if entries and all(isinstance(entry, str) for entry in entries):
            return known.name, tuple(entries)
    # An enumeration is printed with its class: AttnBackend.auto.
    return known.name, (re.sub(r"^[A-Z]\w*\.", "", printed),)
