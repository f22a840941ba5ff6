"""What a rebuilding of the house must not change: plans, bounds, prices, emitted arguments, tables.

    python tests/freeze/freeze.py record [--reference DIR]    write record.json anew
    python tests/freeze/freeze.py compare [--reference DIR]   exit 1 and a line per difference
    python tests/freeze/freeze.py verify [--only NAME]        plan each question, and `hetplan verify` the file

The questions use only the library's verbs and the file forms, so that rooms can move under them.
Searches end by their gap, never by a clock. The tables of `--reference` are recorded apart, in a
file of their own, and compared where the folder is given.
"""

# ruff: noqa: E501
from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import hetplan

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
RECORD = Path(__file__).with_name("record.json")

MIXED: dict[str, Any] = {"trainer": {"mixed_libraries": True}}
"""A patched Megatron-LM or torchtitan, whose plans are on devices of two vendors."""

QUESTIONS: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    # name, model, cluster, job, changes of the job ("trainers": who the plan is emitted for)
    ("tiny", "gpt-tiny", "this-machine", "gpt-tiny", {}),
    ("tiny-megatron", "gpt-tiny", "this-machine", "gpt-tiny", {"target": "megatron"}),
    ("768-stock", "llama-140b", "mixed-768", "llama-140b", {"gap": 0.005}),
    ("768-megatron", "llama-140b", "mixed-768", "llama-140b", MIXED | {"gap": 0.005}),
    ("768-flagscale", "llama-140b", "mixed-768", "llama-140b", {"target": "flagscale", "gap": 0.005}),
    ("768-torchtitan", "llama-140b", "mixed-768", "llama-140b",
     MIXED | {"target": "torchtitan", "gap": 0.02}),
    ("768-native", "llama-140b", "mixed-768", "llama-140b", {"target": "native", "gap": 0.03}),
    ("768-a100", "llama-140b", "mixed-768", "llama-140b", {"forbid": {"islands": ["mi210"]}}),
    ("768-mi210", "llama-140b", "mixed-768", "llama-140b", {"forbid": {"islands": ["a100"]}}),
    ("768-pinned", "llama-140b", "mixed-768", "llama-140b",
     MIXED | {"pin": {"tp": 8, "pp": 12, "microbatch_size": 1, "recompute": True, "head_on": "a100"}}),
    ("768-float16", "llama-140b", "mixed-768", "llama-140b",
     {"target": "flagscale", "precision": "float16", "gap": 0.02}),
    ("768-quantile", "llama-140b", "mixed-768", "llama-140b", MIXED | {"quantile": 0.9, "gap": 0.05}),
    ("70b-regions-megatron", "llama-2-70b", "two-regions", "llama-2-70b",
     MIXED | {"target": "megatron"}),
    ("70b-regions-flagscale", "llama-2-70b", "two-regions", "llama-2-70b", {"target": "flagscale"}),
    ("70b-regions-native", "llama-2-70b", "two-regions", "llama-2-70b",
     {"target": "native", "gap": 0.15}),
    ("70b-regions-any", "llama-2-70b", "two-regions", "llama-2-70b",
     {"target": "any", "gap": 0.2, "pin": {"pipelines": 1}}),
    ("70b-regions-long", "llama-2-70b", "two-regions", "llama-2-70b",
     {"target": "flagscale", "pin": {"depth": 0}, "sequence_length": 4096}),
    ("13b-regions", "llama-2-13b", "two-regions", "llama-2-70b",
     MIXED | {"target": "torchtitan"}),
    ("7b-a100", "llama-2-7b", "two-regions", "llama-2-7b",
     {"forbid": {"islands": ["mi300x"]}, "target": "megatron"}),
    ("7b-torchtitan", "llama-2-7b", "two-regions", "llama-2-7b",
     {"forbid": {"islands": ["a100"]}, "target": "torchtitan"}),
    ("gpt3-domains", "gpt3-175b", "mixed-768", "llama-2-7b",
     {"sequence_length": 2048, "target": "flagscale", "gap": 0.03}),
    ("7b-domains", "llama-2-7b", "three-domains", "llama-2-7b", {"target": "flagscale", "gap": 0.05}),
    ("405b-768", "llama-3-405b", "mixed-768", "llama-140b", MIXED | {"gap": 0.03}),
    ("moe-megatron", "deepseek-v3", "three-regions", "llama-140b", MIXED | {"gap": 0.3}),
    ("moe-torchtitan", "deepseek-v3", "three-regions", "llama-140b",
     MIXED | {"target": "torchtitan", "gap": 0.3}),
    ("four-vendors", "llama-2-70b", "four-vendors", "llama-2-70b",
     {"target": "flagscale", "gap": 0.1, "forbid": {"islands": ["c500"]}}),
    ("infeasible-memory", "llama-3-405b", "this-machine", "gpt-tiny", {"precision": "float32"}),
    ("infeasible-batch", "llama-140b", "mixed-768", "llama-140b",
     {"global_batch_size": 7, "pin": {"dp": 64}}),
    ("infeasible-pin", "llama-2-70b", "two-regions", "llama-2-70b", {"pin": {"tp": 8, "pp": 1, "dp": 48}}),
)  # fmt: skip
SHARDED = "megatron", "mindspeed", "flagscale", "torchtitan"


def plain(value: Any) -> Any:
    """A value as JSON has it, field by field; None and defaults stay."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def rounded(value: Any) -> Any:
    """Floats to eight digits: processors differ in the last ones of exponentials and sums."""
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.8g}") if isinstance(value, float) else value


def digest(value: Any) -> str:
    """Hash of a value that is long."""
    text = json.dumps(rounded(plain(value)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def asked(
    question: tuple[str, str, str, str, dict[str, Any]], folder: Path
) -> tuple[Any, Any, Any]:
    """The three inputs of a question, read from files as a user's are."""
    name, model, cluster, job, changes = question
    text = yaml.safe_load((CONFIGS / "jobs" / f"{job}.yaml").read_text()) | changes
    text.pop("time_limit", None)
    text["schema"] = "hetplan.job/7"
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(text))
    return (
        hetplan.load_model(CONFIGS / "models" / f"{model}.yaml"),
        hetplan.load_cluster(CONFIGS / "clusters" / f"{cluster}.yaml"),
        hetplan.load_job(folder / f"{name}.yaml"),
    )


def stages(plan: Any) -> Iterator[str]:
    """A line per pipeline that a person can compare."""
    for pipeline in plan.pipelines:
        cells = []
        for stage in pipeline.stages:
            replica = stage.replicas[0]
            layers = "+".join(
                f"{chunk.first}:{chunk.stop}" if hasattr(chunk, "first") else str(plain(chunk))
                for chunk in stage.chunks
            )
            cells.append(
                f"[{layers} tp{replica.tp} cp{replica.cp} ep{replica.ep} dp{len(stage.replicas)} mbs{replica.microbatch_size}]"
            )
        yield f"{pipeline.num_microbatches} x {' '.join(cells)}"[:600]


def answer(question: tuple[str, str, str, str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """What hetplan answers to a question, and what is emitted of the plan."""
    predictor, _ = shipped_predictor()
    try:
        model, cluster, job = asked(question, folder)
        result = hetplan.plan(model, cluster, job, predictor)
    except hetplan.HetplanError as error:
        return {type(error).__name__: str(error).replace(f"{folder}/", "").splitlines()}
    certificate, estimate = result.certificate, result.estimate
    found = {
        "step_seconds": estimate.step_seconds,
        "interval": plain(estimate.interval),
        "peak_memory_bytes": plain(estimate.peak_memory_bytes),
        "estimate": digest(estimate),
        "lower_bound_seconds": certificate.lower_bound_seconds,
        "gap": certificate.gap,
        "status": certificate.status,
        "candidates": certificate.candidates,
        "plan": digest(result.plan),
        "pipelines": list(stages(result.plan)),
    }
    again = hetplan.estimate(result.plan, model, cluster, job, predictor)
    found["again"] = again.step_seconds
    found["emitted"] = {name: emitted(result, name, folder) for name in SHARDED}
    return found


def emitted(result: Any, target: str, folder: Path) -> dict[str, Any] | list[str]:
    """What a trainer is told, or why it is told nothing."""
    try:
        emission = hetplan.emit(result, target, folder / f"{target}-{time.monotonic_ns()}")
    except hetplan.InputError as error:
        return str(error).replace(f"{folder}/", "").splitlines()
    launch = emission.launch
    return {
        "program": plain(launch.program),
        "arguments": [" ".join(words) for words in launch.arguments],
        "agents": digest(launch.agent_arguments),
        "environment": plain(launch.environment),
        "hosts": digest([host for host in emission.ranks.hosts]),
        "files": {file.path: digest(file.text) for file in launch.files},
    }


def shipped_predictor() -> tuple[Any, Any]:
    """Fitted from the shipped profiles alone: no user's store is read."""
    from hetplan.predict.fit import fit_stores

    return fit_stores(ROOT / "profiles")


def tables(reference: Path) -> dict[str, Any]:
    """Tables of the evaluation, without what a clock says."""
    found = {}
    for name, options in (("accuracy", []), ("search", ["--sizes", "none"]), ("cost", [])):
        done = subprocess.run(
            [*EVALUATION, name, "--reference", str(reference), *options, "--json"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            found[name] = {"failed": done.stderr.splitlines()[-3:]}
            continue
        found[name] = without_clocks(json.loads(done.stdout))
    return found


EVALUATION = [sys.executable, "-m", "evaluation"]
CLOCKS = {"seconds", "cpu_seconds", "wall_seconds", "hetplan_version", "microseconds"}


def without_clocks(value: Any) -> Any:
    """The same without fields that say how long something took here."""
    if isinstance(value, dict):
        return {key: without_clocks(item) for key, item in value.items() if key not in CLOCKS}
    if isinstance(value, list):
        return [without_clocks(item) for item in value]
    return value


def differences(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """A line per place where two records differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            if key not in before or key not in now:
                yield f"{place}.{key}: only {'before' if key in before else 'now'}"
            else:
                yield from differences(before[key], now[key], f"{place}.{key}")
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            yield from differences(old, new, f"{place}[{index}]")
    elif isinstance(before, float) and isinstance(now, float):
        if abs(before - now) > 1e-12 * max(abs(before), abs(now)):
            yield f"{place}: {before!r} -> {now!r}"
    elif before != now:
        yield f"{place}: {str(before)[:200]!r} -> {str(now)[:200]!r}"


def verified(question: tuple[str, str, str, str, dict[str, Any]], folder: Path) -> str:
    """What `hetplan verify` can show of the answer, in a line; a refusal is an InputError."""
    from hetplan.proof.verify import verify
    from hetplan.search.files import save_result

    predictor, _ = shipped_predictor()
    try:
        begun = time.process_time()
        result = hetplan.plan(*asked(question, folder), predictor)
    except hetplan.HetplanError as error:
        return f"no plan ({type(error).__name__})"
    searched, path = time.process_time() - begun, folder / f"{question[0]}.json"
    save_result(result, path)
    bound = verify(path, predictor).bound
    used, step = time.process_time() - begun - searched, result.estimate.step_seconds
    if bound is None:
        return f"search {searched:.1f} CPU s, verify {used:.1f}, no bound"
    return (
        f"search {searched:.1f} CPU s, verify {used:.1f}; gap claimed {1 - bound.claimed_seconds / step:.2%}, "
        f"shown {1 - bound.shown_seconds / step:.2%}; {bound.families} families, {len(bound.unshown)} in part"
    )


def main() -> int:
    """Record, compare or verify."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("record", "compare", "verify"))
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    if options.what == "verify":
        with tempfile.TemporaryDirectory() as folder:
            for question in QUESTIONS:
                if options.only in question[0]:
                    print(f"{question[0]}: {verified(question, Path(folder))}", flush=True)
        return 0
    now: dict[str, Any] = {}
    if options.what == "record" and options.only and RECORD.exists():
        now = json.loads(RECORD.read_text())  # only those are recorded anew
    with tempfile.TemporaryDirectory() as folder:
        for question in QUESTIONS:
            if options.only in question[0]:
                begun = time.process_time()
                now[question[0]] = answer(question, Path(folder))
                used = time.process_time() - begun
                if options.what == "record" and not options.reference:
                    RECORD.write_text(json.dumps(plain(now), indent=1, sort_keys=True) + "\n")
                step, gap = now[question[0]].get("step_seconds"), now[question[0]].get("gap")
                print(
                    f"{question[0]}: {used:.1f} CPU s, {step}, gap {gap}",
                    file=sys.stderr,
                    flush=True,
                )
    record = RECORD
    if options.reference:
        now, record = tables(options.reference), RECORD.with_name("tables.json")
    now = json.loads(json.dumps(now))
    if options.what == "record":
        record.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
        return 0
    before = json.loads(record.read_text())
    if options.only:
        before = {name: before[name] for name in now}
    found = list(differences(before, now))
    print("\n".join(found) or f"the same: {len(now)} answers")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
