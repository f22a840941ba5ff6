"""Simple bash scripts: which words a trainer gets, and what is refused with its line."""

from __future__ import annotations

import contextlib
import shutil
import subprocess

import pytest

from hetplan.errors import InputError
from hetplan.trainers.launch_command import LaunchNotFollowedError, script_launch
from hetplan.trainers.launch_script import Script
from hetplan.trainers.launch_values import LaunchText

RUN = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8"


def words(script: str, **given: str) -> list[str]:
    """Words of the last command."""
    return [word.text for word in Script("a.sh", script, given).commands[-1]]


def launch(script: str) -> LaunchText:
    return script_launch("megatron", "run.sh", script)


SCRIPTS = (
    "A=4\nB=$A\necho $A ${B} \"$A-$B\" '$A' \\$A a\\ b",
    'A=\'x y\'\necho $A "$A" z"$A"',
    'L=(a \'b c\' # comment\n  d)\nL+=(e)\necho ${L[@]} x "${L[@]}" "${L[*]}"',
    'O=" \\\n  --a 1 \\\n  --b 2 \\\n"\necho ${O} end',
    "N=$((2*3+4))\nM=$(( (N - 1) / 3 ))\necho $N $M $((N % 4))",
    'echo ${UNSET:-default} "${UNSET:-a b}"',
    "A=1 B=2\nexport A B\nA=3 true\necho $A$B",
    "S=a; S+=b; true | cat > /dev/null; echo $S 2>&1",
    'echo "tab\\"s \\$ \\\\ q" one\\\n two',
)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_words_are_those_of_bash() -> None:
    for script in SCRIPTS:
        printed = script.replace("echo ", "printf '%s\\n' ")
        done = subprocess.run(["bash", "-c", printed], capture_output=True, text=True, check=True)
        assert words(script)[1:] == done.stdout.splitlines(), script


def test_a_variable_that_only_the_host_knows_is_named() -> None:
    script = Script("a.sh", 'A=$(hostname)\necho $A $B ${1} "$@" x${C}y ${D#pre}\n', {})
    command = script.commands[-1]
    assert [word.text for word in command[1:]] == [
        *("$(hostname)", "$B", "$1", "$@", "x$Cy", "${D#pre}")
    ]
    assert not any(word.known for word in command[1:])
    assert words("A=1\necho $A $B", A="2", B="3") == ["echo", "2", "3"]


def test_blocks_that_do_not_matter_are_passed_over() -> None:
    text = launch(f"if [ -z $X ]; then\n  Y=1\nfi\nfor h in a b; do ping $h; done\n{RUN}\n")
    assert (text.nodes, text.devices_per_node, text.remarks) == (1, 8, ())
    text = launch(f"TP=2\n[ -n $X ] && TP=4\n{RUN} --tensor-model-parallel-size $TP\n")
    assert [setting.name for setting in text.unread] == ["tensor-model-parallel-size"]
    assert text.remarks == ("run.sh:2: a command behind a test sets TP and is not followed",)


def test_what_is_not_followed_is_named_with_its_line() -> None:
    for script, line, construct in (
        (f"run() {{\n  {RUN}\n}}\nrun\n", 2, "inside a function"),
        (f"if true; then\n  {RUN}\nfi\n", 2, "inside an if statement"),
        (f"for h in a b; do\n  ssh $h {RUN}\ndone\n", 2, "inside a for loop"),
        (f"X=$(\n{RUN})\n", 2, "inside a command that is not followed"),
        (f'srun bash -c "{RUN}"\n', 1, "inside a command that is not followed"),
        (
            f"A=(--bf16)\nif true; then\n  A+=(--fp16)\nfi\n{RUN} ${{A[@]}}\n",
            2,
            "puts --fp16 into A",
        ),
    ):
        with pytest.raises(LaunchNotFollowedError) as caught:
            launch(script)
        (fault,) = caught.value.faults
        assert construct in fault.message, script
        assert "argument list that Megatron-LM prints" in fault.message
        assert (fault.file, fault.line) == ("run.sh", line), script


def test_scripts_that_grow_without_end_are_refused_or_read() -> None:
    for script in (
        "A=xxxxxxxxxx\n" + "A=$A$A\n" * 40 + "echo $A\n",
        "A=(x y)\n" + 'A+=("${A[@]}")\n' * 40 + "echo ${A[@]}\n",
        "echo " + "${A:-" * 3000 + "}" * 3000 + "\n",
        "echo " + "$((" * 2000 + "))" * 2000 + "\n",
    ):
        with contextlib.suppress(InputError):
            assert len(Script("a.sh", script, {}).commands) == 1
