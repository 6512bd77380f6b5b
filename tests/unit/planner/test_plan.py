"""Plans of real graphs: what a graph costs as blocks, and plans over measured workers."""

from dataclasses import replace

import pytest

from fusion_dask.errors import PlanError
from fusion_dask.graph.cost import stage_memory
from fusion_dask.graph.cut import boundary_bytes, cut
from fusion_dask.graph.ir import Graph
from fusion_dask.planner.model_cost import model_cost
from fusion_dask.planner.plan import Plan, make_plan
from fusion_dask.planner.profile import Profile
from fusion_dask.planner.records import Workload
from fusion_dask.planner.tables import Tables
from support.models import tiny_graph
from support.planning import link, worker


@pytest.fixture(scope="module")
def graph() -> Graph:
    return tiny_graph()


def _profiles(*speeds: float, memory_gb: float = 1.0) -> dict[str, Profile]:
    """Workers w0, w1, ... with fast links."""
    links = {"broker": link(1e-6, 1e11)}
    return {
        f"w{i}": worker(f"w{i}", flops_per_s=s, memory_gb=memory_gb, links=links).profile
        for i, s in enumerate(speeds)
    }


def test_blocks_carry_all_of_the_graph(graph: Graph) -> None:
    model = model_cost(graph)
    assert model.tokens == graph.inputs[0].spec.numel
    assert model.flops == sum(o.cost.flops_forward + o.cost.flops_backward for o in graph.operators)
    parameters = sum(b.parameters for b in model.blocks) + sum(t.parameters for t in model.tied)
    assert parameters == sum(p.spec.numel for p in graph.parameters if p.trainable)
    sizes = boundary_bytes(graph)
    assert model.boundary_bytes == tuple(sizes[p - 1] for p in model.positions)
    assert all(
        g <= a for g, a in zip(model.gradient_boundary_bytes, model.boundary_bytes, strict=True)
    )


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_the_tables_bound_the_exact_memory_closely(graph: Graph, stages: int) -> None:
    model = model_cost(graph)
    tables = Tables.of(model, Workload(microbatches=8))
    edges = [round(i * len(model.blocks) / stages) for i in range(stages + 1)]
    for program in cut(graph, [model.positions[e - 1] for e in edges[1:-1]]):
        held = stages - program.index
        exact = stage_memory(
            program, microbatches_in_flight=held, optimizer_bytes_per_parameter=8
        ).total
        estimate = tables.memory(held)[edges[program.index], edges[program.index + 1]]
        assert exact <= estimate <= 1.35 * exact


def test_unequal_workers_get_unequal_stages(graph: Graph) -> None:
    plan, programs = make_plan(
        graph, ["w0", "w1"], stages=2, microbatches=8, profiles=_profiles(1e9, 3e9)
    )
    by_worker = {s.worker: s.flops for s in plan.stages}
    assert by_worker["w1"] > 2 * by_worker["w0"]
    assert [p.flops for p in programs] == [s.flops for s in plan.stages]
    assert plan.step_s is not None
    assert plan.microbatches == 8
    assert Plan.from_json(plan.to_json()) == plan


def test_a_worker_that_would_slow_the_rest_is_left_out(graph: Graph) -> None:
    profiles = _profiles(1e9, 1e9, 1e5)
    plan, _ = make_plan(graph, list(profiles), stages=None, microbatches=8, profiles=profiles)
    assert sorted(s.worker for s in plan.stages) == ["w0", "w1"]
    with pytest.raises(PlanError, match="4 stages need 4 workers"):
        make_plan(graph, list(profiles), stages=4, microbatches=8, profiles=profiles)


def test_no_stage_needs_more_than_its_worker_has(graph: Graph) -> None:
    whole = model_cost(graph)
    need = Tables.of(whole, Workload(microbatches=2)).memory(1)[0, -1] / 1e9
    profiles = _profiles(1e9, 1e9, 1e9, memory_gb=0.75 * need)
    plan, _ = make_plan(graph, list(profiles), stages=None, microbatches=2, profiles=profiles)
    assert len(plan.stages) > 1
    for stage in plan.stages:
        assert stage.memory_bytes is not None
        assert stage.memory_bytes <= profiles[stage.worker].free_memory_bytes
    poor = _profiles(1e9, 1e9, memory_gb=0.05 * need)
    with pytest.raises(PlanError, match="GB"):
        make_plan(graph, list(poor), stages=None, microbatches=2, profiles=poor)


def test_a_resumed_run_keeps_its_cuts_and_gets_the_best_order(graph: Graph) -> None:
    first, _ = make_plan(
        graph, ["w0", "w1"], stages=2, microbatches=8, profiles=_profiles(1e9, 3e9)
    )
    swapped = _profiles(3e9, 1e9)
    again, _ = make_plan(
        graph,
        ["w0", "w1"],
        stages=None,
        microbatches=8,
        positions=first.positions,
        profiles=swapped,
    )
    assert again.positions == first.positions
    names = {"w0": "w1", "w1": "w0"}
    assert [s.worker for s in again.stages] == [names[s.worker] for s in first.stages]
    with pytest.raises(PlanError, match="cannot be cut"):
        make_plan(
            graph,
            ["w0", "w1"],
            stages=None,
            microbatches=8,
            positions=[first.positions[0] + 1],
            profiles=swapped,
        )


def test_workers_that_were_not_all_measured_are_equal(graph: Graph) -> None:
    profiles = _profiles(1e9, 9e9)
    equal, _ = make_plan(graph, ["w0", "w1"], stages=None, microbatches=4)
    del profiles["w1"]
    part, _ = make_plan(graph, ["w0", "w1"], stages=None, microbatches=4, profiles=profiles)
    assert part == equal
    assert equal.step_s is None


def test_autocast_plans_with_the_rate_of_its_dtype(graph: Graph) -> None:
    slow = {
        name: replace(p, flops_per_s={"float32": 1e9, "bfloat16": rate})
        for (name, p), rate in zip(_profiles(1.0, 1.0).items(), (1e9, 4e9), strict=True)
    }
    plain, _ = make_plan(graph, list(slow), stages=2, microbatches=8, profiles=slow)
    fast, _ = make_plan(
        graph, list(slow), stages=2, microbatches=8, profiles=slow, dtype="bfloat16"
    )
    shares = [{s.worker: s.flops for s in p.stages} for p in (plain, fast)]
    assert shares[1]["w1"] > shares[0]["w1"]


def test_a_plan_of_another_version_is_refused() -> None:
    with pytest.raises(PlanError, match="another version"):
        Plan.from_json({"positions": [], "microbatches": 1, "schedule": "1f1b", "stages": []})
