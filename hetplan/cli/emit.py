"""`hetplan emit`: the folder that starts a plan under a trainer."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, Verbose, say, say_lines
from hetplan.cli.options import emit as print_result

if TYPE_CHECKING:
    from hetplan.schedulers.launch import EmissionOptions
    from hetplan.search.result import SearchResult
    from hetplan.trainers.emission import Emission
    from hetplan.trainers.folder import Written

TRAINERS = ("megatron", "mindspeed", "flagscale", "torchtitan")
SCHEDULERS = ("torchrun", "slurm", "kubernetes")
"""As in `hetplan.trainers` and `hetplan.schedulers`, which are imported when needed."""
EMISSION_SCHEMA = "hetplan.emission/1"
_RUN, _HOSTS = "The training run", "The hosts"


def emit(
    plan: Annotated[Path, typer.Argument(help="Plan file that `hetplan plan` wrote.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help=f"Trainer to write for: {', '.join(TRAINERS)}. Default: the plan's.",
        ),
    ] = None,
    scheduler: Annotated[
        str, typer.Option(help=f"What starts the hosts: {', '.join(SCHEDULERS)}.")
    ] = "torchrun",
    nearest: Annotated[
        Path | None,
        typer.Option(
            help="If the target cannot run the plan, write the fastest that it can to this file."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace what hetplan emit wrote. Other files stay.")
    ] = False,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Data, as the trainer names them; may be repeated. Default: mock data.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(help="Tokenizer's model or folder on the hosts.", rich_help_panel=_RUN),
    ] = "",
    steps: Annotated[int, typer.Option(min=1, help="Steps to train.", rich_help_panel=_RUN)] = 50,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            "--lr",
            help="Needed with --data. Default: 1e-5 with mock data.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    save: Annotated[
        str, typer.Option(help="Folder for checkpoints on the hosts.", rich_help_panel=_RUN)
    ] = "",
    load: Annotated[str, typer.Option(help="Checkpoint to start from.", rich_help_panel=_RUN)] = "",
    extra: Annotated[
        list[str] | None,
        typer.Option(
            help="More arguments for the trainer, as in '--log-interval 1'.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="Take node names and launch domains from this cluster file.",
            rich_help_panel=_HOSTS,
        ),
    ] = None,
    trainer_folder: Annotated[
        str,
        typer.Option(
            help="The trainer's checkout on the hosts. Default: $TRAINER_FOLDER there.",
            hidden=True,
        ),
    ] = "",
    python: Annotated[str, typer.Option(help="Interpreter on the hosts.", hidden=True)] = "python3",
    predictor: Annotated[
        Path | None, typer.Option("--predictor", help="Predictor for --nearest.", hidden=True)
    ] = None,
    store: Annotated[
        list[Path] | None,
        typer.Option("--store", help="Profile store for --nearest.", hidden=True),
    ] = None,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Write the folder that starts a plan under a trainer.

    A plan that the target cannot run is refused with every reason, and nothing is written;
    --nearest finds the fastest plan that it can run.
    """
    from hetplan.errors import Fault, InputError
    from hetplan.schedulers.launch import EmissionOptions
    from hetplan.trainers.emission import emit_plan, read_plan, sorted_refusals
    from hetplan.trainers.folder import check_place, write_folder

    try:
        words = tuple(word for text in extra or () for word in shlex.split(text))
    except ValueError as error:
        raise InputError(f"--extra: {error}; quote as in a shell") from None
    options = EmissionOptions(
        trainer_folder=trainer_folder,
        python=python,
        data=tuple(data or ()),
        tokenizer=tokenizer,
        save=save,
        load=load,
        steps=steps,
        learning_rate=learning_rate,
        extra_arguments=words,
        scheduler=scheduler,
    )
    if nearest is None and (predictor is not None or store):
        raise InputError("--predictor and --store belong to --nearest, which searches")
    check_place(out, force=force)
    if nearest is not None:
        _check_nearest(plan, nearest)
    result = read_plan(plan, cluster)
    if target is None:
        target = _target_of(result, plan)
    refused = sorted_refusals(result, target, options, plan)
    command = ["hetplan", "emit", "PLAN", f"--target={target}", f"--out={out}"]
    command += [*_changed_options(options, extra or []), *(["--force"] if force else [])]
    if refused and nearest is None:
        command[2] = str(plan)
        again = [*command, "--nearest=nearest.json"]
        again += [f"--cluster={cluster}"] if cluster is not None else []
        hint = f"the nearest plan that {target} can run is found by: {shlex.join(again)}"
        raise InputError(*refused, Fault(message=hint))
    if refused and nearest is not None:
        say(f"target {target} cannot run {plan}:")
        for fault in refused:
            say(f"  {fault}")
        _show_nearest(result, target, options, nearest, (predictor, store))
        command[2] = str(nearest)
        say(f"emit it with: {shlex.join(command)}")
        raise typer.Exit(InputError.exit_code)
    emission = emit_plan(result, target, options)
    written = write_folder(out, emission.files, force=force)
    if as_json:
        print_result(_json(emission, written, target, out))
    else:
        _show(emission, written, out, verbose)


def _target_of(result: SearchResult, file: Path) -> str:
    """The plan's own trainer; an InputError where no folder is written for it."""
    from hetplan.errors import Fault, InputError

    target = result.plan.target
    if target in TRAINERS:
        return target
    own = (
        f"`hetplan launch {shlex.quote(str(file))}` starts it"
        if target == "native"
        else "any trainer may run it"
    )
    message = f"is a plan of target {target}: {own}; --target {', '.join(TRAINERS)} emits it"
    raise InputError(Fault(file=str(file), message=message))


def _check_nearest(plan: Path, nearest: Path) -> None:
    from hetplan.cli.options import check_replaceable
    from hetplan.errors import InputError
    from hetplan.search.files import SCHEMA

    if nearest.resolve() == plan.resolve():
        raise InputError(f"--nearest {nearest} is the plan itself; name another file")
    check_replaceable(nearest, SCHEMA, "plan")


def _show(emission: Emission, written: Written, out: Path, verbose: bool) -> None:
    from hetplan.trainers.readme import LOUD
    from hetplan.units import counted

    ranks = emission.ranks
    where = f"{counted(ranks.world_size, 'rank')} on {counted(len(ranks.hosts), 'host')}"
    files = counted(len(written.files), "file")
    say_lines([f"wrote {files} to {out}: {where} for {emission.launch.title}"])
    for what, paths in (
        ("changed by hand, and kept under the same name with a ~", written.edited),
        ("removed, of an earlier emission", written.removed),
    ):
        if paths:
            say(f"{what}: {', '.join(paths)}")
    placement = [each for each in ranks.remarks if verbose or each.startswith(LOUD)]
    remarks = [f"- {remark}" for remark in (*placement, *emission.launch.remarks)]
    say_lines(remarks, most=None if verbose else _REMARKS, more=f"{out}/README.md")
    say_lines([f"{out}/README.md says how to check the hosts and start"])


_REMARKS = 4
"""On the trainer, that are said; the folder's README has all."""


def _json(emission: Emission, written: Written, target: str, out: Path) -> str:
    import json

    ranks = emission.ranks
    return json.dumps(
        {
            "schema": EMISSION_SCHEMA,
            "target": target,
            "folder": str(out),
            "files": list(written.files),
            "edited": list(written.edited),
            "removed": list(written.removed),
            "kept": [f"{name}~" for name in written.edited],
            "world_size": ranks.world_size,
            "hosts": len(ranks.hosts),
            "agents": len(ranks.agents),
            "data_outermost": ranks.data_outermost,
            "master": ranks.master.address,
            "port": ranks.port,
            "placement_remarks": list(ranks.remarks),
            "trainer_remarks": list(emission.launch.remarks),
        },
        indent=2,
    )


def _show_nearest(
    result: SearchResult,
    target: str,
    options: EmissionOptions,
    file: Path,
    predictors: tuple[Path | None, list[Path] | None],
) -> None:
    """Search, write the plan and say how it differs from the refused one."""
    from hetplan.cli.options import read_predictor
    from hetplan.reports.terminal import ProgressLine, shown_on
    from hetplan.search.files import save_result
    from hetplan.trainers import trainer_named
    from hetplan.trainers.nearest import nearest_plan, plan_differences
    from hetplan.units import format_seconds

    predict, digest = read_predictor(*predictors)
    with ProgressLine("closing candidates") as line:
        nearest = nearest_plan(
            result,
            trainer_named(target),
            options,
            predict,
            digest=digest,
            progress=shown_on(line),
        )
    save_result(nearest.result, file)
    step = nearest.result.estimate.step_seconds
    say(
        f"wrote {file}: a step of {format_seconds(step)}, against "
        f"{format_seconds(nearest.refused_seconds)} of the refused plan "
        f"({step / nearest.refused_seconds - 1.0:+.1%})"
    )
    for change in nearest.changes:
        say(f"  job: {change}")
    cluster = result.inputs.cluster
    for difference in plan_differences(result.plan, nearest.result.plan, cluster):
        say(f"  {difference}")


def _changed_options(options: EmissionOptions, extra: list[str]) -> list[str]:
    """The options as somebody would type them again; with `=`, as values may begin with a dash."""
    from dataclasses import fields

    return [
        *(f"--data={each}" for each in options.data),
        *(
            f"--{field.name.replace('_', '-')}={getattr(options, field.name)}"
            for field in fields(options)
            if field.name not in ("data", "extra_arguments")
            and getattr(options, field.name) != field.default
        ),
        *(f"--extra={each}" for each in extra),
    ]
