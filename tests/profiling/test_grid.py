import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiling_models import LLAMA, gpt

from hetplan.errors import InputError
from hetplan.job.spec import Job, Optimizer, Precision
from hetplan.model.spec import Architecture, LayerKind
from hetplan.profiling.grid import job_grid, neighbour_models
from hetplan.profiling.weights import Cut, check_slices, parameter_slices

JOB = Job(
    name="tiny",
    global_batch_size=12,
    sequence_length=16,
    precision=Precision.FLOAT32,
    optimizer=Optimizer.ADAMW,
    target="native",
)


def test_a_jobs_grid_has_its_degrees_sizes_and_neighbours() -> None:
    grid = job_grid(LLAMA, JOB)
    assert {point.tp for point in grid} == {1, 2, 4}
    assert {point.microbatch_size for point in grid} == {1, 2, 4}
    hidden = sorted({point.model.hidden_size for point in grid})
    assert len(hidden) >= 3
    assert hidden[0] < 32 < hidden[-1]
    assert len(grid) == 3 * 3 * len(hidden)
    costs = [point.flops(LayerKind.TRANSFORMER) for point in grid]
    assert costs == sorted(costs)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    heads=st.sampled_from([1, 2, 4, 8, 12, 32, 64, 96]),
    group=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([8, 16, 64, 128]),
    tp=st.sampled_from([1, 2, 4, 8]),
    architecture=st.sampled_from(list(Architecture)),
)
def test_neighbours_can_be_built_and_cut(heads, group, head_dim, tp, architecture) -> None:
    if heads % group:
        return
    hidden = heads * head_dim
    model = gpt(
        architecture=architecture,
        num_attention_heads=heads,
        num_kv_heads=heads // group,
        head_dim=head_dim,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
    )
    if model.slicing_faults(tp):
        return
    found = neighbour_models(model, tp)
    assert found
    for neighbour in found:
        check_slices(neighbour, tp, tp - 1)
        assert not neighbour.slicing_faults(tp)
        assert 0.5 * hidden <= neighbour.hidden_size <= 1.5 * hidden
        assert neighbour.hidden_size != hidden
    assert len({neighbour.hidden_size for neighbour in found}) == len(found)


@settings(derandomize=True, deadline=None)
@given(
    tp=st.integers(1, 16),
    heads=st.sampled_from([4, 6, 8]),
    kv=st.sampled_from([1, 2, 4]),
    ffn=st.sampled_from([64, 96, 100]),
)
def test_accepted_slices_hold_every_weight_equally_often(tp, heads, kv, ffn) -> None:
    if heads % kv:
        return
    model = gpt(num_attention_heads=heads, num_kv_heads=kv, ffn_hidden_size=ffn)
    if model.slicing_faults(tp):
        assert heads % tp or ffn % tp or max(kv, tp) % min(kv, tp)
        with pytest.raises(InputError):
            check_slices(model, tp, 0)
        return
    held: dict[str, list[int]] = {}
    for rank in range(tp):
        for parameter in parameter_slices(model, 1, Cut(tp=tp, tp_rank=rank)):
            for part in parameter.parts:
                counts = held.setdefault(part.name, [0] * part.full_shape[part.dim])
                for place in range(part.start, part.start + part.length):
                    counts[place] += 1
    assert all(min(counts) == max(counts) >= 1 for counts in held.values())
