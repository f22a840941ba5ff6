"""Kinds that are wrong where it is hard to see, and files of answers that could pass for right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_results import result_of
from runtime_cases import CPUS, GPT, LLAMA, cluster, island, job, plan_of
from torch.utils._python_dispatch import TorchDispatchMode

from hetplan.errors import InputError
from hetplan.job.spec import Precision
from hetplan.launchers import numerics as computing
from hetplan.launchers.numerics import KindBackend, compute_numerics, numerics_setup
from hetplan.launchers.numerics_formats import format_faults, format_lines
from hetplan.launchers.numerics_values import (
    KindNumerics,
    Numerics,
    NumericsResult,
    joined,
    load_numerics,
    save_numerics,
)
from hetplan.launchers.numerics_verdict import numerics_faults, units_left
from hetplan.launchers.numerics_work import work_of
from hetplan.profiling.backends import CpuBackend
from hetplan.search.result import SearchResult

Change = Callable[[torch.Tensor], torch.Tensor]


class Wrong(TorchDispatchMode):
    """Calls of this name give something else, in place too; float64 is the reference's."""

    def __init__(self, name: str, change: Change) -> None:
        super().__init__()
        self._name, self._change = name, change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ != self._name:
            return result
        first = result[0] if isinstance(result, tuple) else result
        if first.dtype == torch.float64:
            return result
        changed = self._change(first)
        if self._name.endswith("_"):
            return first.copy_(changed)
        return (changed, *result[1:]) if isinstance(result, tuple) else changed


class Attacked(CpuBackend):
    """This machine's cores with one wrong operator."""

    def __init__(self, name: str, change: Change) -> None:
        super().__init__()
        self.fault = Wrong(name, change)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tiny tensors gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _under_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_on = computing.compute_on

    def with_fault(backend, place, compute):
        with getattr(backend, "fault", None) or nullcontext():
            return compute_on(backend, place, compute)

    monkeypatch.setattr(computing, "compute_on", with_fault)


def result(precision: Precision = Precision.FLOAT32, model=GPT) -> SearchResult:
    task = job(precision=precision)
    return result_of(model, CPUS, task, plan_of(model, task, (2, 2)))


def faults_with(of: SearchResult, name: str, change: Change) -> tuple[str, ...]:
    kinds = [
        KindBackend(kind="cpu", backend=CpuBackend()),
        KindBackend(kind="acme-one", backend=Attacked(name, change)),
    ]
    return numerics_faults(compute_numerics(of, numerics_setup(of), kinds))


@pytest.fixture(scope="module")
def found() -> Numerics:
    of = result()
    cpu = KindBackend(kind="cpu", backend=CpuBackend())
    return compute_numerics(of, numerics_setup(of), [cpu])


BACKWARD = [
    ("native_layer_norm_backward", "norm"),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", "fused_attention"),
    ("_log_softmax_backward_data", "loss"),
]


@pytest.mark.parametrize(("name", "operator"), BACKWARD)
def test_an_operator_that_is_wrong_in_its_backward_pass_only_is_named(
    name: str, operator: str
) -> None:
    faults = faults_with(result(), name, lambda value: value * (1.0 + 1e-4))
    assert any(line.startswith(f"acme-one: {operator} (") for line in faults)
    assert not any("forward" in line for line in faults)
    assert not any(line.startswith("cpu: ") for line in faults)


OPTIMIZER = ["lerp_", "mul_", "addcmul_", "addcdiv_", "sqrt"]


@pytest.mark.parametrize("name", OPTIMIZER)
def test_every_operation_of_the_optimizer_counts(name: str) -> None:
    """Even those that would not show in a first step: old moments' decay is one of them."""
    faults = faults_with(result(), name, lambda value: value * (1.0 + 1e-3))
    named = {line.split(" (")[0] for line in faults}
    # A loss may use it too; other operators alone do not.
    assert {each for each in named if not each.endswith(" layer")} <= {
        "acme-one: optimizer",
        "cpu and acme-one: optimizer",
    }
    assert any(line.startswith("acme-one: optimizer (adamw step, ") for line in faults)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_no_number_is_refused(bad: float, place: int) -> None:
    def change(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value.view(-1)[place] = bad
        return value

    faults = faults_with(result(), "gelu_backward", change)
    assert any("values that are no finite numbers" in line for line in faults)
    assert not any(line.startswith("cpu: ") for line in faults)


def test_a_device_that_gives_zeros_is_refused() -> None:
    faults = faults_with(result(model=LLAMA), "silu_backward", torch.zeros_like)
    assert any(line.startswith("acme-one: activation (") for line in faults)


def of_kind(found: Numerics, kind: str, change: Callable[[NumericsResult], Any]) -> Numerics:
    """The same answers under another kind's name; a result that becomes None is left out."""
    (own,) = found.kinds
    results = tuple(new for each in own.results if (new := change(each)) is not None)
    return replace(found, kinds=(replace(own, kind=kind, results=results),))


def test_the_last_bit_of_a_tolerance_is_allowed_and_the_next_is_not(found: Numerics) -> None:
    (own,) = found.kinds
    at_bound = own.results[0]
    for name in ("rms", "largest"):
        most = getattr(at_bound.allowed, name)
        beyond = torch.nextafter(
            torch.tensor(most, dtype=torch.float64), torch.tensor(9.0).double()
        )
        for value, refused in ((most, False), (float(beyond), True)):
            result_ = replace(at_bound, **{f"{name}_deviation": value})
            kind = replace(own, results=(result_,))
            lines = numerics_faults(replace(found, kinds=(kind,)))
            assert bool(lines) is refused, (name, value)
    pair = 2 * at_bound.allowed.largest * at_bound.reference_rms
    for factor, refused in ((1 - 1e-12, False), (1 + 1e-6, True)):
        probes = (at_bound.probes[0] + pair * factor, *at_bound.probes[1:])
        other = KindNumerics(
            kind="acme-one",
            device_name="",
            driver="",
            torch_version="",
            results=(replace(at_bound, probes=probes),),
            refused=(),
        )
        kinds = (replace(own, results=(at_bound,)), other)
        assert bool(numerics_faults(replace(found, kinds=kinds))) is refused


@pytest.mark.parametrize("first", ["cpu", "acme-one"])
def test_a_result_that_either_kind_lacks_is_told(found: Numerics, first: str) -> None:
    other = of_kind(found, "acme-one", lambda each: each if each.operator != "loss" else None)
    kinds = (*found.kinds, *other.kinds)
    both = replace(found, kinds=kinds if first == "cpu" else kinds[::-1])
    (line,) = numerics_faults(both)
    assert "loss (loss, tp 1, forward) was computed by cpu only" in line


def test_answers_that_lack_something_are_no_whole_check(found: Numerics) -> None:
    of = result()
    work = work_of(of, found.setup)
    assert units_left(found, work) == ()
    assert {operator for operator, _, _ in work} >= {"optimizer", "head layer", "norm"}
    short = of_kind(found, "acme-one", lambda each: each if each.operator != "optimizer" else None)
    assert units_left(short, work) == ("acme-one: no answer of optimizer (adamw step, tp 1)",)
    empty = of_kind(found, "acme-one", lambda each: None)
    assert len(units_left(empty, work)) == len(work)


DAMAGE = {
    "probes": lambda each: replace(each, probes=()),
    "fewer probes": lambda each: replace(each, probes=each.probes[:-1]),
    "a negative deviation": lambda each: replace(each, largest_deviation=-1.0),
    "a negative reference": lambda each: replace(each, reference_rms=-each.reference_rms),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_file_whose_results_cannot_be_compared_is_refused(
    found: Numerics, what: str, tmp_path: Path
) -> None:
    path = tmp_path / "acme.json"
    save_numerics(of_kind(found, "acme-one", DAMAGE[what]), path)
    with pytest.raises(InputError, match=r"acme.json:\d+: kinds\[0\].results\[0\]"):
        load_numerics(path, found.setup)


def test_an_infinite_deviation_in_a_file_is_refused(found: Numerics, tmp_path: Path) -> None:
    path = tmp_path / "acme.json"
    save_numerics(of_kind(found, "acme-one", lambda each: each), path)
    text = path.read_text().replace('"rms_deviation": ', '"rms_deviation": 1e999', 1)
    lines = text.splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if "1e999" in line)
    lines[at] = '          "rms_deviation": 1e999,\n'
    path.write_text("".join(lines))
    with pytest.raises(InputError, match="rms_deviation"):
        load_numerics(path, found.setup)


def test_a_tolerance_of_another_version_is_refused(found: Numerics) -> None:
    def wider(each: NumericsResult) -> NumericsResult:
        return replace(each, allowed=replace(each.allowed, largest=each.allowed.largest * 1e3))

    with pytest.raises(InputError, match="is allowed largest"):
        joined(found, ((Path("a.json"), of_kind(found, "acme-one", wider)),))


def test_every_exchange_is_named_with_its_format_and_kinds() -> None:
    machines = cluster(island("a", "cpu", 4), island("b", "acme-one", 4))
    task = job()
    of = result_of(GPT, machines, task, plan_of(GPT, task, (2, 2), machines, "ab", dp=2))
    assert format_lines(of) == (
        "boundary between stages 0 and 1: float32, cpu and acme-one",
        "reduction of layers 0 to 2: float32, cpu",
        "reduction of layers 3 to 5: float32, acme-one",
    )


def test_a_kind_without_the_format_of_its_sums_is_refused(found: Numerics) -> None:
    machines = cluster(island("a", "cpu", 4), island("b", "acme-one", 4))
    task = job()
    of = result_of(GPT, machines, task, plan_of(GPT, task, (2, 2), machines, "ab", dp=2))
    assert format_faults(of, found) == ()
    groups = tuple(replace(each, precision="bfloat16") for each in of.plan.reduction_groups)
    narrow = replace(of, plan=replace(of.plan, reduction_groups=groups))
    # Both have a float32 rate only, and computed the layers in float32.
    assert format_faults(narrow, found) == (
        "cpu: has no bfloat16 (it has float32), in which the plan has the reduction of layers 0 "
        "to 2",
        "acme-one: has no bfloat16 (it has float32), in which the plan has the reduction of "
        "layers 3 to 5",
    )
    # A kind that has just computed the layers in it has it, whatever its rates.
    half = replace(found, setup=replace(found.setup, precision=Precision.BFLOAT16))
    assert [line.split(":")[0] for line in format_faults(narrow, half)] == ["acme-one"]
