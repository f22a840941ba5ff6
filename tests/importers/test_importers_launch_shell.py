"""A part of bash, read without running it; bash itself says what the words must be."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from counted_steps import steps_of

from hetplan.errors import InputError
from hetplan.importers.launches.shell import walk_script
from hetplan.importers.launches.shell_values import line_of_field, text_of_field, unknown_of

# Scripts that set variables or take arguments; bash itself says what the words must be.
SETTING = {
    "let": "A=2\nlet A=A*2\np $A\nlet A+=3\np $A",
    "brackets": "A=2\n((A = A * 2))\np $A\n(( A -= 1 ))\np $A",
    "function": 'f() { p $1 "$@" $# "${2:-x}"; }\nf a "b c"\nf\nf d',
    "inner": 'g() { p "$1"; }\nf() { g "$2"; p "$1"; }\nf a b',
    "set": 'set -- a "b c" d\np $1 "$2" $#\nshift\np $1 "$@"\nshift 2\np "$@" x',
    "shift": 'f() { A=$1; shift; p $A "$@"; }\nf a b c',
    "list": 'A=()\nadd() { A+=("$@"); }\nadd 1 "2 3"\nadd 4\np "${A[@]}"',
}
BASH = shutil.which("bash")


def words(text: str, **given: str) -> list[list[str]]:
    """Words of every command."""
    walk = walk_script("s.sh", text, given)
    return [[text_of_field(word) for word in command.words] for command in walk.commands]


def sure_words(text: str, **given: str) -> list[list[str]]:
    walk = walk_script("s.sh", text, given)
    return [[text_of_field(word) for word in c.words] for c in walk.commands if c.sure]


CASES = {
    "quotes": ("""p a'b c'd "e f" g\\ h '' "" """, [["p", "ab cd", "e f", "g h", "", ""]]),
    "comment": ("p a # b\n# c\np d#e", [["p", "a"], ["p", "d#e"]]),
    "continued": ("p a \\\n  b", [["p", "a", "b"]]),
    "variables": ('A=1\nB=${A}2\np $A ${B}x "$A $B"', [["p", "1", "12x", "1 12"]]),
    "split": ("A='1  2\t3'\np $A \"$A\"", [["p", "1", "2", "3", "1  2\t3"]]),
    "default": ('A=\np ${A:-x} ${A-y} ${B:-"a b"} ${B:-a b}', [["p", "x", "a b", "a", "b"]]),
    "alternative": ('A=1\np ${A:+x} ${B:+y} "${B:+y}"', [["p", "x", ""]]),
    "array": (
        'A=(1 "2 3" # c\n 4)\np "${A[@]}" ${A[1]} ${#A[@]}',
        [["p", "1", "2 3", "4", "2", "3", "3"]],
    ),
    "array split": ('A=(1 "2 3")\np ${A[@]}', [["p", "1", "2", "3"]]),
    "array added": ('A=(1)\nA+=(2 3)\np "${A[@]}"', [["p", "1", "2", "3"]]),
    "array joined": ('A=(1 2)\np "${A[*]}"', [["p", "1 2"]]),
    "text added": ("A=1\nA+=2\np $A", [["p", "12"]]),
    "arithmetic": (
        "N=4\np $((8*$N)) $((8*N+2)) $(( (N - 1) / 2 )) $((-7/2)) $((7%4))",
        [["p", "32", "34", "1", "-3", "3"]],
    ),
    "redirected": ("p a > f 2>&1 < g &> h", [["p", "a"]]),
    "pipe": ("p a | q b && r c", [["p", "a"], ["q", "b"], ["r", "c"]]),
    "environment": ("A=1 B=2 p c", [["p", "c"]]),
    "if": ("A=x\nif [[ $A == x ]]; then p 1; else p 2; fi", [["p", "1"]]),
    "elif": ("A=3\nif [ $A = 1 ]; then p 1\nelif [ $A -gt 2 ]; then p 2; fi", [["p", "2"]]),
    "empty": ('A=""\nif [ -z "$A" ]; then p 1; fi; [ -n "$A" ] && p 2', [["p", "1"]]),
    "or": ("false || p 1", [["false"], ["p", "1"]]),
    "test or": ("A=1\n[ $A = 2 ] || p 1", [["p", "1"]]),
    "case": ('A=8B\ncase "$A" in 7B|9B) p 1;; 8*) p 2;; *) p 3;; esac', [["p", "2"]]),
    "function": ("f() { p $A; }\nA=1\nf", [["p", "1"]]),
    "function word": ("function f {\n p 1\n}\nf x", [["p", "1"]]),
    "nested": ('A=1\nbash -lc "p $A 2"', [["bash", "-lc", "p 1 2"], ["p", "1", "2"]]),
    "eval": ("C='p 1 2'\neval $C", [["eval", "p", "1", "2"], ["p", "1", "2"]]),
    "document": ("sbatch <<EOF\np 1\nEOF\nq 2", [["sbatch"], ["p", "1"], ["q", "2"]]),
    "unset": ("A=1\nunset A\np ${A:-2}", [["unset", "A"], ["p", "2"]]),
    "group": ("{ p 1; (q 2); }", [["p", "1"], ["q", "2"]]),
    "ansi": ("p $'a\\tb'", [["p", "a\tb"]]),
    "not": ('A=1\nif ! [ "$A" = 2 ]; then p 1; fi', [["p", "1"]]),
    "crlf": ("A=1\r\np $A\r\n", [["p", "1"]]),
}


@pytest.mark.parametrize("name", CASES)
def test_words_are_those_of_bash(name: str) -> None:
    script, wanted = CASES[name]
    found = words(script)
    if name == "unset":
        wanted = wanted[1:]
    assert found == wanted


@pytest.mark.skipif(BASH is None, reason="needs bash")
@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize("name", SETTING)
def test_what_commands_set_is_what_bash_sets(name: str) -> None:
    script = 'p() { for each in "$@"; do printf \'<%s>\' "$each"; done; echo; }\n' + SETTING[name]
    ran = subprocess.run([str(BASH), "-c", script], capture_output=True, text=True, check=True)
    found = [each for each in words(SETTING[name]) if each[0] == "p"]
    assert ["".join(f"<{word}>" for word in each[1:]) for each in found] == ran.stdout.splitlines()


@pytest.mark.parametrize(
    "command",
    [
        "read -r -p who A B <<< '4 5'",
        "read -a A < f",
        "printf -v A '%d' 4",
        "mapfile -t A < f",
        "readarray A < f",
        "while getopts 'a:' A; do :; done",
        "let 'A = B ? 1 : 2'",
        "let A++ B=3",
        "((A <<= 1))",
        "((B > 3)) && A=5",
        "((B)) || A=5",
        "if read A; then :; fi",
        "if [ $B ]; then :; elif read A; then :; fi",
        "while read A; do :; done < f",
    ],
)
def test_what_only_the_host_sets_is_unknown(command: str) -> None:
    walk = walk_script("s.sh", f"A=2\n{command}\np $A", {})
    (last,) = [each for each in walk.commands if text_of_field(each.words[0]) == "p"]
    assert unknown_of(last.words[1]) == "A"
    assert words(f"A=2\n{command}\np $A", A="7")[-1] == ["p", "7"]


def test_files_beside_the_script_are_read(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "env.sh").write_text("# sizes\nexport A=4\nL=(\n --b 5)\n")
    (tmp_path / "conf" / "more.sh").write_text("A=$((A * 2))\n. ./env2.sh\n")
    (tmp_path / "far").symlink_to("/etc")
    script = tmp_path / "run.sh"
    text = 'A=1\nsource ./env.sh\np $A "${L[@]}"\n'
    text += 'D=$(cd "$(dirname "$0")" && pwd)\n. $D/conf/more.sh\np $A'
    walk = walk_script(str(script), text, {})
    found = [[text_of_field(word) for word in each.words] for each in walk.commands]
    assert found == [["p", "4", "--b", "5"], ["p", "8"]]
    # What stands in the file has the line of the command that reads it.
    assert [line_of_field(word) for word in walk.commands[0].words] == [3, 2, 2, 2]
    assert [each.text for each in walk.remarks] == [". ./env2.sh is not read"]
    for name in ("../x.sh", "/etc/passwd", "far/passwd", "conf", "$HOME/env.sh", "conf/../env.sh"):
        walk = walk_script(str(script), f"A=1\nsource {name}\np $A", {})
        assert [text_of_field(each) for each in walk.commands[-1].words] == ["p", "1"]
        assert len(walk.remarks) == 1
    (tmp_path / "env.sh").write_text("A=1\nsource ./env.sh\n")
    with pytest.raises(InputError, match="files read each other"):
        walk_script(str(script), "source ./env.sh", {})
    (tmp_path / "env.sh").write_text("A=1\nB='\n")
    with pytest.raises(InputError) as caught:
        walk_script(str(script), "source ./env.sh", {})
    assert [(each.file, each.line) for each in caught.value.faults] == [
        (str(tmp_path / "env.sh"), 2)
    ]


def test_texts_for_other_hosts_and_files_may_be_scripts() -> None:
    remote = 'A=2\nfor h in a b; do ssh -p 22 $h "cd /x && p $A" & done'
    assert ["p", "2"] in words(remote)
    assert words('ssh h "it\'s here"\np 1')[-1] == ["p", "1"]
    written = "cat > run.sh << 'E'\nA=4\np $A\nE\nbash run.sh\np $A"
    assert sure_words(written)[-1] == ["p", "$A"]
    assert ["p", "4"] in words(written)
    assert words('cat > x.json << E\n{"a": (1\nE\np 1')[-1] == ["p", "1"]


def test_random_scripts_have_the_words_that_bash_gives() -> None:
    rng = random.Random(5)
    scripts = [_random_script(rng) for _ in range(300)]
    # One bash for all of them: each in a function of its own that prints its words.
    whole = "p() { printf '<%s>' \"$@\"; echo; }\n" + "\n".join(
        f"( {script}\n)\necho =" for script in scripts
    )
    out = subprocess.run([str(BASH), "-c", whole], capture_output=True, text=True, timeout=60)
    assert (out.returncode, out.stderr) == (0, "")
    printed = out.stdout.split("=\n")[:-1]
    assert len(printed) == len(scripts)
    for script, lines in zip(scripts, printed, strict=True):
        mine = "".join(
            "".join(f"<{word}>" for word in each[1:]) + "\n" if each[1:] else "<>\n"
            for each in words(script)
        )
        assert mine == lines, script


def _random_script(rng: random.Random) -> str:
    """Assignments, lists, choices and calls of p with variables that have values."""
    names, lines = ["A", "B", "C"], ["A=1", "B='2 3'", "C=", "L=(x 'y z' \"$A\")"]
    for _ in range(rng.randint(2, 8)):
        name = rng.choice(names)
        lines.append(
            rng.choice(
                (
                    f"{name}={_random_word(rng)}",
                    f"{name}=$((A0*{rng.randint(1, 9)}+{rng.randint(0, 9)}))",
                    f"{name}+={_random_word(rng)}",
                    f"L+=({_random_word(rng)} {_random_word(rng)})",
                    f"p {_random_word(rng)} {_random_word(rng)}",
                    f'if [ "${name}" = {rng.randint(1, 3)} ]; then p {_random_word(rng)}; '
                    f"else L=({_random_word(rng)}); fi",
                    f'[[ -n "${name}" ]] && {name}={_random_word(rng)}',
                    f'[ -z "${name}" ] || p "${name}" # {name}',
                )
            )
        )
    return "A0=7\n" + "\n".join([*lines, 'p "${L[@]}" ${L[@]} "$A" $B ${C:-none}'])


def _random_word(rng: random.Random) -> str:
    parts = (
        "a",
        "7",
        "'b c'",
        '"d  e"',
        "${A}",
        '"$B"',
        "${C:-f g}",
        '"${L[0]}"',
        "\\ ",
        "${A}x",
        "''",
        "${#L[@]}",
        '"${C:+q}"',
        "$((A0-2))",
        "--x=1",
    )
    return "".join(rng.choice(parts) for _ in range(rng.randint(1, 3)))


def test_what_only_the_host_knows_names_its_variable() -> None:
    walk = walk_script("s", 'p $TP ${N:-4} $(nproc) x$1 "$@"', {})
    fields = walk.commands[0].words
    assert [unknown_of(word) for word in fields] == ["", "TP", "", "$(nproc)", "1", "@"]
    assert [text_of_field(word) for word in fields][1] == "$TP"
    assert words("p $TP x$1 $((TP*2))", **{"TP": "8", "1": "y"}) == [["p", "8", "xy", "16"]]


def test_a_given_value_goes_before_the_scripts_own() -> None:
    assert words("TP=2\nTP=${TP:-4}\np $TP", TP="8") == [["p", "8"]]


def test_a_choice_that_the_text_does_not_decide_is_left_alone() -> None:
    script = 'A=1\nL=(a)\nif [ -n "$KEY" ]; then A=2; L+=(b); p in; fi\np $A "${L[@]}"'
    assert sure_words(script) == [["p", "$A", "a", "${L[@]}"]]
    assert words(script)[0] == ["p", "in"]
    assert sure_words(script, KEY="") == [["p", "1", "a"]]
    assert sure_words(script, KEY="k") == [["p", "in"], ["p", "2", "a", "b"]]
    walk = walk_script("s", script, {})
    assert [each.line for each in walk.remarks] == [3]
    assert set(walk.remarks[0].names) == {"A", "L"}


def test_commands_of_a_condition_run() -> None:
    assert sure_words("if ! p a; then p b; fi\nif [ 1 = 1 ]; then p c; fi") == [
        ["p", "a"],
        ["p", "c"],
    ]
    assert words("until p a; do p b; done") == [["p", "a"], ["p", "b"]]


def test_loops_are_left_alone() -> None:
    script = "for h in a b; do\n  p $h $A\n  A=2\ndone < f\nA=1\np $A"
    assert sure_words(script) == [["p", "1"]]
    assert words(script)[0] == ["p", "$h", "$A"]


def test_every_word_has_the_line_on_which_it_stands() -> None:
    script = 'O="--a 1 \\\n  --b 2\n --c"\nL=(\n x\n\n y)\np $O \\\n  "${L[@]}" z'
    walk = walk_script("s", script, {})
    assert [line_of_field(word) for word in walk.commands[0].words] == [8, 1, 1, 2, 2, 3, 5, 7, 9]


def test_a_script_in_a_script_keeps_its_lines() -> None:
    walk = walk_script("s", 'A=(\n1\n2)\nbash -c "\n p ${A[*]}\n"', {})
    assert [line_of_field(word) for word in walk.commands[-1].words] == [5, 2, 3]


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("p 'a", 1),
        ('p\n"a', 2),
        ("A=(1\n2", 1),
        ("if [ 1 ]; then\np", 2),
        ("fi", 1),
        ("p\n}", 2),
        ("p $(a", 1),
        ("p ${a", 1),
        ("cat <<E\nx", 1),
        ("case a in\nb", 2),
        ("[[ a", 1),
        ("for x in a; p", 1),
    ],
)
def test_what_does_not_close_has_its_line(script: str, line: int) -> None:
    with pytest.raises(InputError) as caught:
        walk_script("s.sh", script, {})
    assert [(each.file, each.line) for each in caught.value.faults] == [("s.sh", line)]


def many(what: str, count: int) -> str:
    """A script of so many pieces of one kind."""
    return {
        "commands": "".join(f"p {at} {'abcdefgh ' * 20}\n" for at in range(count)),
        "list": "A=(\n" + "".join(f"  --size-{at} {at}\n" for at in range(count)) + ")\np ${A[1]}",
        "text": 'A="' + "some words of text\n" * count + '"\np',
        "space": "p\n" + "      # a comment that says much\n" * count,
        "documents": "".join(f"cat << E\nx {at}\nE\n" for at in range(count)),
    }[what]


@pytest.mark.parametrize("what", ["commands", "list", "text", "space", "documents"])
def test_steps_of_reading_grow_no_faster_than_the_script(what: str) -> None:
    def steps(count: int) -> int:
        text = many(what, count)
        return steps_of(lambda: walk_script("s.sh", text, {}))

    assert steps(800) < 2.1 * steps(400)
    if what in ("text", "space"):
        # Characters are not stepped over one by one.
        assert steps(400) < 5 * len(many(what, 400))


@pytest.mark.parametrize(
    "script",
    [
        "{ " * 5000,
        "! " * 5000,
        '"$(' * 3000,
        "${a:-" * 3000 + "x" + "}" * 3000,
        "p " + "a && p " * 5000 + "b",
        "f() { f; f; }\nf",
        "A=aa\n" + "A=$A$A\n" * 60,
        "A=(a a)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60 + 'p "${A[@]}"',
        "p $((" + "(" * 3000 + "1" + ")" * 3000 + "))",
        "p $((" + "-" * 3000 + "1))",
        "[[ " + "a || " * 3000 + "b ]] && p",
        "bash -c " + "'bash -c " * 50,
        "p $((" + "9*" * 400 + "9))",
        "A=" + "x" * 100_000 + "\n" + "A=" + "$A" * 10 + "\n" + "A=" + "$A" * 10 + "\np $A",
        "A='"
        + "y " * 20_000
        + "'\na() { b; b; b; b; b; b; b; b; }\nb() { c; c; c; c; c; c; c; c; }\n"
        "c() { p $A; p $A; p $A; p $A; }\na",
    ],
)
def test_scripts_that_grow_without_end_are_refused_or_read(script: str) -> None:
    with contextlib.suppress(InputError):
        walk_script("s.sh", script, {})
