"""Kinds that compute right pass a check, kinds with one wrong operator are caught and named."""

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
from hetplan.job.spec import Optimizer, Precision
from hetplan.launchers import numerics
from hetplan.launchers.numerics import KindBackend, compute_numerics, numerics_setup
from hetplan.launchers.numerics_kinds import kinds_here, kinds_of_plan
from hetplan.launchers.numerics_values import (
    Numerics,
    NumericsResult,
    Refused,
    joined,
    load_numerics,
    save_numerics,
)
from hetplan.launchers.numerics_verdict import by_operator, kinds_left, numerics_faults
from hetplan.model.spec import ModelSpec
from hetplan.profiling.backends import CpuBackend
from hetplan.search.result import SearchResult

Change = Callable[[torch.Tensor], torch.Tensor]


class Faulty(TorchDispatchMode):
    """A device whose calls of these names give something else; float64 is the reference's."""

    def __init__(self, names: tuple[str, ...], change: Change, inputs: Change | None) -> None:
        super().__init__()
        self._names, self._change, self._inputs = names, change, inputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meant = func.overloadpacket.__name__ in self._names
        if meant and self._inputs is not None:
            exact = [each.dtype == torch.float64 for each in args]
            args = args if any(exact) else tuple(self._inputs(each) for each in args)
        result = func(*args, **(kwargs or {}))
        if not meant:
            return result
        first = result[0] if isinstance(result, tuple) else result
        if first.dtype == torch.float64:
            return result
        changed = self._change(first)
        return (changed, *result[1:]) if isinstance(result, tuple) else changed


class Injected(CpuBackend):
    """This machine's cores with one operator that is not as it should be."""

    def __init__(
        self, names: tuple[str, ...], change: Change, inputs: Change | None = None
    ) -> None:
        super().__init__()
        self.fault = Faulty(names, change, inputs)

    def kind(self) -> str:
        """As of a vendor's device."""
        return "acme-one"


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tiny tensors gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def found() -> Numerics:
    """This machine's cores, of the plan that `result` gives by default."""
    return answers(result(), cpu())


@pytest.fixture(autouse=True)
def _injected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends of this test compute under their fault."""
    compute_on = numerics.compute_on

    def with_fault(backend, place, compute):
        with getattr(backend, "fault", None) or nullcontext():
            return compute_on(backend, place, compute)

    monkeypatch.setattr(numerics, "compute_on", with_fault)


def result(model: ModelSpec = GPT, precision: Precision = Precision.FLOAT32, **changes: Any):
    tp = changes.pop("tp", 1)
    task = job(precision=precision, **changes)
    return result_of(model, CPUS, task, plan_of(model, task, (2, 2), tp=tp))


def cpu() -> KindBackend:
    return KindBackend(kind="cpu", backend=CpuBackend())


def same(value: torch.Tensor) -> torch.Tensor:
    return value


def injected(*names: str, change: Change = same, inputs: Change | None = None) -> KindBackend:
    return KindBackend(kind="acme-one", backend=Injected(names, change, inputs))


def answers(of: SearchResult, *kinds: KindBackend) -> Numerics:
    return compute_numerics(of, numerics_setup(of), kinds)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
def test_this_machines_cores_are_as_exact_as_their_format(
    model: ModelSpec, precision: Precision
) -> None:
    found = answers(result(model, precision, tp=2), cpu())
    assert numerics_faults(found) == ()
    operators = {each.operator for each in by_operator(found.kinds[0])}
    assert operators >= {
        "matrix_product",
        "fused_attention",
        "norm",
        "activation",
        "addition",
        "loss",
        "embedding",
        "optimizer",
        "embedding layer",
        "transformer layer",
        "head layer",
    }
    # Nothing is compared with itself: all but whole numbers and look-ups round.
    rounded = [each for each in found.kinds[0].results if each.largest_deviation > 0]
    assert len(rounded) > 0.7 * len(found.kinds[0].results)


def test_results_are_of_the_plans_slice() -> None:
    found = answers(result(tp=2), cpu()).kinds[0]
    projection = next(each for each in found.results if each.what.startswith("query-key-value"))
    assert (projection.tp, projection.shape) == (2, (16, 3 * 32 // 2))
    assert {each.tp for each in found.results} == {2}
    layer = {each.tensor: each.shape for each in found.results if "transformer" in each.operator}
    assert layer["gradient of up_weight"] == (32, 32)


def test_separate_softmax_and_loss_are_compared_where_the_trainer_has_them() -> None:
    of = result()
    options = replace(of.inputs.job.trainer, fused_attention=False, fused_loss=True)
    of = replace(
        of,
        inputs=replace(of.inputs, job=replace(of.inputs.job, target="megatron", trainer=options)),
    )
    found = answers(of, cpu())
    assert numerics_faults(found) == ()
    names = {each.operator for each in found.kinds[0].results}
    assert names >= {"attention_score", "softmax", "attention_context", "loss"}


def test_plain_descent_is_compared_too() -> None:
    found = answers(result(optimizer=Optimizer.SGD), cpu())
    assert numerics_faults(found) == ()
    assert [each.what for each in found.kinds[0].results if each.operator == "optimizer"] == [
        "sgd step",
        "sgd step",
    ]


FAULTS = [
    pytest.param(("mm", "addmm"), "matrix_product", id="products"),
    pytest.param(
        ("_scaled_dot_product_flash_attention_for_cpu",), "fused_attention", id="attention"
    ),
    pytest.param(("native_layer_norm",), "norm", id="norms"),
    pytest.param(("gelu",), "activation", id="activation"),
    pytest.param(("gelu_backward",), "activation", id="gradient of the activation"),
    pytest.param(("embedding_dense_backward",), "embedding", id="gradient of the table"),
    pytest.param(("_log_softmax",), "loss", id="loss"),
    pytest.param(("sqrt",), "optimizer", id="optimizer"),
]


@pytest.mark.parametrize(
    ("precision", "error"), [(Precision.FLOAT32, 1e-4), (Precision.BFLOAT16, 0.03)]
)
@pytest.mark.parametrize(("names", "operator"), FAULTS)
def test_a_kind_with_a_wrong_operator_is_named_and_refused(
    names: tuple[str, ...], operator: str, precision: Precision, error: float
) -> None:
    wrong = injected(*names, change=lambda value: value * (1.0 + error))
    faults = numerics_faults(answers(result(GPT, precision), cpu(), wrong))
    assert any(line.startswith(f"acme-one: {operator} (") for line in faults)
    if precision is Precision.FLOAT32:
        assert any(line.startswith(f"cpu and acme-one: {operator} (") for line in faults)
    assert not any(line.startswith("cpu:") for line in faults)
    # Whole layers may be off with it, other operators alone are not.
    alone = {line.split(" (")[0].rpartition(": ")[2] for line in faults}
    assert {name for name in alone if not name.endswith(" layer")} == {operator}


def test_a_softmax_that_is_slightly_wrong_is_caught() -> None:
    of = result()
    options = replace(of.inputs.job.trainer, fused_attention=False)
    of = replace(
        of,
        inputs=replace(of.inputs, job=replace(of.inputs.job, target="megatron", trainer=options)),
    )
    # Rows that do not quite sum to 1.
    wrong = injected("_softmax", change=lambda value: value + 2e-6)
    faults = numerics_faults(answers(of, wrong))
    assert len(faults) == 1
    assert faults[0].startswith("acme-one: softmax (softmax, tp 1, ")


def test_products_of_rounded_inputs_are_no_float32() -> None:
    """What TensorFloat-32 does: inputs of a float32 product keep 11 significant bits."""

    def cut(value: torch.Tensor) -> torch.Tensor:
        return (value.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    faults = numerics_faults(answers(result(), injected("mm", inputs=cut)))
    assert any(line.startswith("acme-one: matrix_product (") for line in faults)


def test_a_kind_that_lacks_an_operator_or_overflows_is_refused() -> None:
    def refuse(value: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no kernel for this\nand a long trace")

    found = answers(result(), injected("gelu", change=refuse))
    assert Refused(operator="activation", what="activation", message="no kernel for this") in (
        found.kinds[0].refused
    )
    assert "acme-one: activation (activation): no kernel for this" in numerics_faults(found)
    overflow = answers(result(), injected("gelu", change=lambda value: value / 0.0))
    assert any("no finite numbers" in line for line in numerics_faults(overflow))


def changed(found: Numerics, kind: str, **changes: Any) -> Numerics:
    """The same answers under another kind's name, each result changed."""
    (own,) = found.kinds
    results = tuple(replace(each, **changes) for each in own.results)
    return replace(found, kinds=(replace(own, kind=kind, results=results),))


def test_kinds_that_differ_more_than_both_may_deviate_are_refused(found: Numerics) -> None:
    other = changed(found, "acme-one")
    both = joined(found, ((Path("a.json"), other),))
    assert numerics_faults(both) == ()
    # Probes off by a third more than both tolerances; the deviations that it tells are unchanged.
    (kind,) = other.kinds

    def off(each: NumericsResult) -> NumericsResult:
        by = 2.7 * each.allowed.largest * each.reference_rms
        return replace(each, probes=tuple(probe + by for probe in each.probes))

    kind = replace(kind, results=tuple(off(each) for each in kind.results))
    faults = numerics_faults(joined(found, ((Path("a.json"), replace(other, kinds=(kind,))),)))
    operators = {each.operator for each in kind.results}
    assert len(faults) == len(operators)
    assert all(line.startswith("cpu and acme-one: ") and "differs by" in line for line in faults)


def test_a_result_that_one_kind_lacks_is_told(found: Numerics) -> None:
    other = changed(found, "acme-one")
    (kind,) = other.kinds
    kind = replace(kind, results=tuple(each for each in kind.results if each.operator != "loss"))
    faults = numerics_faults(joined(found, ((Path("a.json"), replace(other, kinds=(kind,))),)))
    assert len(faults) == 1
    assert "loss (loss, tp 1, forward) was computed by cpu only" in faults[0]


def test_answers_of_other_machines_must_be_of_the_same_work(
    found: Numerics, tmp_path: Path
) -> None:
    path = tmp_path / "cpu.json"
    save_numerics(found, path)
    assert load_numerics(path, found.setup) == found
    with pytest.raises(InputError, match=r"cpu.json:\d+: setup.seed: 3; this check has 4"):
        load_numerics(path, replace(found.setup, seed=4))
    with pytest.raises(InputError, match="has answers of cpu, as another file or this machine"):
        joined(found, ((path, found),))
    foreign = changed(found, "acme-one", reference_rms=1.5)
    with pytest.raises(InputError, match="the inputs differ; use one version of torch"):
        joined(found, ((path, foreign),))


def test_the_same_seed_gives_the_same_answers_and_another_one_others(found: Numerics) -> None:
    assert answers(result(), cpu()) == found
    other = changed(answers(result(seed=4), cpu()), "other")
    with pytest.raises(InputError, match="the inputs differ"):
        joined(found, ((Path("b"), other),))


def test_kinds_are_matched_with_what_this_machine_has(found: Numerics) -> None:
    machines = cluster(island("a", "cpu", 2), island("b", "nvidia-h200", 2))
    task = job()
    of = result_of(GPT, machines, task, plan_of(GPT, task, (2, 2), machines, "ab"))
    assert kinds_of_plan(of) == ("cpu", "nvidia-h200")
    assert [each.kind for each in kinds_here(("cpu", "no-such-kind"))] == ["cpu"]
    played = kinds_here(("cpu", "slow"), paced=("slow",))
    assert [(each.kind, each.backend.kind()) for each in played] == [
        ("cpu", "cpu"),
        ("slow", "cpu"),
    ]
    assert kinds_left(found, ("cpu", "nvidia-h200")) == ("nvidia-h200",)


def test_tokens_are_as_many_as_asked_and_few_enough_for_a_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = result()
    assert (numerics_setup(of).microbatch_size, numerics_setup(of).sequence_length) == (1, 16)
    asked = numerics_setup(of, tokens=40)
    assert (asked.microbatch_size, asked.sequence_length) == (2, 16)
    assert numerics_setup(of, tokens=5).sequence_length == 5
    monkeypatch.setattr(numerics, "REFERENCE_FLOPS", 2e6)
    assert numerics_setup(of).sequence_length < 16
