"""`hetplan emit`: a plan as everything that starts its trainer."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, PredictorFile, Stores, say
from hetplan.cli.options import emit as print_result

if TYPE_CHECKING:
    from hetplan.emitters.emission import Emission
    from hetplan.emitters.folder import Written
    from hetplan.emitters.trainer_launch import EmitOptions
    from hetplan.errors import Fault
    from hetplan.search.result import SearchResult

TRAINERS = ("megatron", "megatron-bridge", "mindspeed", "flagscale", "torchtitan", "deepspeed")
"""As in `hetplan.emitters.emission`, which is imported when it is needed."""
EMISSION_SCHEMA = "hetplan.emission/1"


def emit(
    plan: Annotated[Path, typer.Argument(help="Plan file that `hetplan plan` wrote.")],
    target: Annotated[
        str,
        typer.Option("--target", help=f"What to write for: {', '.join(TRAINERS)}."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Replace what hetplan emit wrote there. Other files stay.",
        ),
    ] = False,
    nearest: Annotated[
        Path | None,
        typer.Option(
            help="Where the target cannot run the plan: search for the fastest one that it can, "
            "and write it to this file."
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(help="Cluster file whose node names and launch domains to take instead."),
    ] = None,
    trainer_folder: Annotated[
        str,
        typer.Option(help="The trainer's checkout on the hosts. Default: $TRAINER_FOLDER there."),
    ] = "",
    python: Annotated[str, typer.Option(help="Interpreter on the hosts.")] = "python3",
    data: Annotated[
        list[str] | None,
        typer.Option(help="Data, as the trainer names them; may be repeated. Default: made up."),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="Tokenizer's model or folder on the hosts.")] = "",
    save: Annotated[str, typer.Option(help="Folder for checkpoints on the hosts.")] = "",
    load: Annotated[str, typer.Option(help="Checkpoints to start from.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.")] = 50,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate", "--lr", help="Needed with --data. Default: 1e-5 with made-up data."
        ),
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(help="Further arguments for the trainer, as in '--log-interval 1'."),
    ] = None,
    predictor: PredictorFile = None,
    store: Stores = None,
    as_json: AsJson = False,
) -> None:
    """Write the folder that starts a plan under a trainer.

    What the target cannot express is refused with every reason, and nothing is written; --nearest
    finds the plan that it can.
    """
    from hetplan.emitters.trainer_launch import EmitOptions
    from hetplan.errors import InputError

    if target not in TRAINERS:
        known = ", ".join(TRAINERS)
        raise InputError(f"--target {target!a}: nothing is written for that; it is for {known}")
    try:
        more = tuple(word for text in extra or () for word in shlex.split(text))
    except ValueError as error:
        raise InputError(f"--extra: {error}; quote as in a shell") from None
    options = EmitOptions(
        trainer_folder=trainer_folder,
        python=python,
        data=tuple(data or ()),
        tokenizer=tokenizer,
        save=save,
        load=load,
        steps=steps,
        learning_rate=learning_rate,
        extra_arguments=more,
    )
    if nearest is None and (predictor is not None or store):
        raise InputError("--predictor and --store belong to --nearest, which searches")
    again = (*_words_again(options, extra or []), *(["--force"] if force else []))
    asked = _Asked(plan, target, out, nearest, cluster, again)
    result = asked.read(force=force)
    refused = asked.refusals(result, options)
    if refused:
        asked.refuse(refused)
        _show_nearest(asked, result, options, predictor, store)
        raise typer.Exit(InputError.exit_code)
    _emit_folder(asked, result, options, force=force, as_json=as_json)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The files that the command line names, and the target."""

    plan: Path
    target: str
    out: Path
    nearest: Path | None
    cluster: Path | None
    again: tuple[str, ...]
    """The user's other options, for commands that are to be run instead."""

    def read(self, *, force: bool) -> SearchResult:
        """The plan, with hosts of the cluster file; an InputError before any work is put in."""
        from hetplan.cli.options import check_replaceable
        from hetplan.cluster.load import load_cluster
        from hetplan.emitters.folder import check_place
        from hetplan.emitters.renamed import with_hosts_of
        from hetplan.errors import InputError
        from hetplan.search.files import SCHEMA, load_legal_plan

        check_place(self.out, force=force)
        if self.nearest is not None:
            if self.nearest.resolve() == self.plan.resolve():
                raise InputError(f"--nearest {self.nearest} is the plan itself; name another file")
            check_replaceable(self.nearest, SCHEMA, "plan")
        result = load_legal_plan(self.plan)
        if self.cluster is not None:
            result = with_hosts_of(result, load_cluster(self.cluster), str(self.cluster))
        return result

    def refusals(self, result: SearchResult, options: EmitOptions) -> tuple[Fault, ...]:
        """Why the target cannot run the plan; an InputError where anything else is wrong."""
        from hetplan.emitters.emission import plan_faults, refusals, trainer_named
        from hetplan.errors import InputError

        try:
            found = refusals(result, trainer_named(self.target), options)
        except InputError as error:
            raise InputError(*self._placed(error.faults)) from None
        refused = plan_faults(found)
        if found and not refused:
            raise InputError(*found)
        return self._placed(found)

    def refuse(self, faults: tuple[Fault, ...]) -> None:
        """Say all reasons; an InputError with them where no search was asked for."""
        from hetplan.errors import Fault, InputError

        if self.nearest is None:
            where = [f"--cluster={self.cluster}"] if self.cluster is not None else []
            command = self.command(self.plan, "--nearest", "nearest.json", *where)
            hint = f"the nearest plan that {self.target} can run is found by: {command}"
            raise InputError(*faults, Fault(message=hint))
        say(f"target {self.target} cannot run {self.plan}:")
        for fault in faults:
            say(f"  {fault}")

    def command(self, plan: Path, *more: str) -> str:
        """This command for another plan, as a line for a shell."""
        words = ["hetplan", "emit", str(plan), "--target", self.target, "--out", str(self.out)]
        return shlex.join([*words, *more, *self.again])

    def _placed(self, faults: tuple[Fault, ...]) -> tuple[Fault, ...]:
        from hetplan.emitters.emission import plan_faults
        from hetplan.search.files import placed_faults

        of_plan = plan_faults(faults)
        return (
            *placed_faults(self.plan, of_plan),
            *(fault for fault in faults if fault not in of_plan),
        )


def _emit_folder(
    asked: _Asked, result: SearchResult, options: EmitOptions, *, force: bool, as_json: bool
) -> None:
    from hetplan.emitters.emission import emit_plan
    from hetplan.emitters.folder import write_folder

    emission = emit_plan(result, asked.target, options)
    written = write_folder(asked.out, emission.files, asked.target, force=force)
    if as_json:
        print_result(_json(asked, emission, written))
        return
    sheet = emission.sheet
    say(
        f"wrote {len(written.files)} files to {asked.out}: {sheet.world_size:,} ranks on "
        f"{len(sheet.hosts):,} hosts for {emission.launch.title}"
    )
    for what, paths in (
        ("replaced, though changed by hand", written.edited),
        ("removed, of an earlier emission", written.removed),
        ("kept, as changed by hand", written.kept),
    ):
        if paths:
            say(f"{what}: {', '.join(paths)}")
    for remark in (*sheet.remarks, *emission.launch.remarks):
        say(f"- {remark}")
    # A name that begins with "-" would be taken for an option.
    place = str(asked.out) if not str(asked.out).startswith("-") else f"./{asked.out}"
    start = shlex.join(["bash", f"{place}/start-all.sh"])
    say(f"read {place}/README.md first; it starts with: {start}")


def _json(asked: _Asked, emission: Emission, written: Written) -> str:
    import json

    sheet = emission.sheet
    return json.dumps(
        {
            "schema": EMISSION_SCHEMA,
            "target": asked.target,
            "folder": str(asked.out),
            "files": list(written.files),
            "edited": list(written.edited),
            "removed": list(written.removed),
            "kept": list(written.kept),
            "world_size": sheet.world_size,
            "hosts": len(sheet.hosts),
            "agents": len(sheet.agents),
            "data_outermost": sheet.data_outermost,
            "master": sheet.master.address,
            "port": sheet.port,
            "barrier_port": sheet.barrier_port,
            "placement_remarks": list(sheet.remarks),
            "trainer_remarks": list(emission.launch.remarks),
        },
        indent=2,
    )


def _show_nearest(
    asked: _Asked,
    result: SearchResult,
    options: EmitOptions,
    predictor: Path | None,
    store: list[Path] | None,
) -> None:
    """Search, write what was found and say how it differs from what was asked for."""
    from hetplan.cli.options import read_predictor
    from hetplan.cli.progress import ProgressLine, shown_on
    from hetplan.emitters.emission import trainer_named
    from hetplan.emitters.nearest import nearest_plan, plan_differences
    from hetplan.search.files import save_result
    from hetplan.units import format_seconds

    if asked.nearest is None:
        return
    predict, digest = read_predictor(predictor, store)
    with ProgressLine("closing candidates") as line:
        found = nearest_plan(
            result,
            trainer_named(asked.target),
            options,
            predict,
            digest=digest,
            progress=shown_on(line),
        )
    save_result(found.result, asked.nearest)
    step = found.result.estimate.step_seconds
    more = step / found.refused_seconds - 1.0
    say(
        f"wrote {asked.nearest}: a step of {format_seconds(step)}, against "
        f"{format_seconds(found.refused_seconds)} of the refused plan ({more:+.1%})"
    )
    for change in found.changes:
        say(f"  job: {change}")
    cluster = result.inputs.cluster
    for difference in plan_differences(result.plan, found.result.plan, cluster):
        say(f"  {difference}")
    say(f"emit it with: {asked.command(asked.nearest)}")


def _words_again(options: EmitOptions, extra: list[str]) -> list[str]:
    """The options as somebody would type them again; with `=`, as values may begin with a dash."""
    from hetplan.emitters.trainer_launch import EmitOptions

    plain = EmitOptions()
    given: list[tuple[str, object, object]] = [
        ("--trainer-folder", options.trainer_folder, plain.trainer_folder),
        ("--python", options.python, plain.python),
        ("--tokenizer", options.tokenizer, plain.tokenizer),
        ("--save", options.save, plain.save),
        ("--load", options.load, plain.load),
        ("--steps", options.steps, plain.steps),
        ("--learning-rate", options.learning_rate, plain.learning_rate),
    ]
    return [
        *(f"--data={each}" for each in options.data),
        *(f"{name}={value}" for name, value, default in given if value != default),
        *(f"--extra={each}" for each in extra),
    ]
