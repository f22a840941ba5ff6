"""`hetplan emit`: the folder that starts a plan under a trainer."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetplan.cli.options import AsJson, say
from hetplan.cli.options import emit as print_result

if TYPE_CHECKING:
    from hetplan.trainers.emission import Emission
    from hetplan.trainers.folder import Written

TRAINERS = ("megatron", "mindspeed", "flagscale", "torchtitan")
SCHEDULERS = ("torchrun", "slurm", "kubernetes")
"""As in `hetplan.trainers` and `hetplan.schedulers`, which are imported when needed."""
EMISSION_SCHEMA = "hetplan.emission/1"
_RUN, _HOSTS = "The training run", "The hosts"


def emit(
    plan: Annotated[Path, typer.Argument(help="Plan file that `hetplan plan` wrote.")],
    target: Annotated[
        str, typer.Option("--target", help=f"Trainer to write for: {', '.join(TRAINERS)}.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    scheduler: Annotated[
        str, typer.Option(help=f"What starts the hosts: {', '.join(SCHEDULERS)}.")
    ] = "torchrun",
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
            rich_help_panel=_HOSTS,
        ),
    ] = "",
    python: Annotated[str, typer.Option(help="Interpreter on the hosts.", hidden=True)] = "python3",
    as_json: AsJson = False,
) -> None:
    """Write the folder that starts a plan under a trainer.

    A plan that the target cannot run is refused with every reason, and nothing is written.
    """
    from hetplan.errors import Fault, InputError
    from hetplan.schedulers.launch import EmissionOptions
    from hetplan.trainers import trainer_named
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
    check_place(out, force=force)
    result = read_plan(plan, cluster)
    refused = sorted_refusals(result, target, options, plan)
    if refused:
        other = trainer_named(target).plan_target
        hint = f"plan again with --target {other}, and with the pins that are named above"
        raise InputError(*refused, Fault(message=hint))
    emission = emit_plan(result, target, options)
    written = write_folder(out, emission.files, force=force)
    if as_json:
        print_result(_json(emission, written, target, out))
    else:
        _show(emission, written, out)


def _show(emission: Emission, written: Written, out: Path) -> None:
    ranks = emission.ranks
    say(
        f"wrote {len(written.files)} files to {out}: {ranks.world_size:,} ranks on "
        f"{len(ranks.hosts):,} hosts for {emission.launch.title}"
    )
    for what, paths in (
        ("changed by hand, and kept under the same name with a ~", written.edited),
        ("removed, of an earlier emission", written.removed),
    ):
        if paths:
            say(f"{what}: {', '.join(paths)}")
    for remark in (*ranks.remarks, *emission.launch.remarks):
        say(f"- {remark}")
    say(f"read {out}/README.md: it says how the hosts are checked and started")


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
