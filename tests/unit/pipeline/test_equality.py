"""A pipeline of any number of stages is the plain PyTorch loop."""

from collections.abc import Iterator

import pytest
import torch

from fusion_dask.graph.cut import boundary_bytes, valid_positions
from fusion_dask.graph.ir import Graph
from fusion_dask.planner.partition import candidates, operator_seconds, partition
from fusion_dask.worker.optimizer import OptimizerConfig
from fusion_tasks.models import initialise_model
from support.models import BATCH, CONTEXT, MICROBATCHES, VOCABULARY, tiny_gpt, tiny_graph
from support.pipelines import RandomTokens, Trained, train_pipeline, train_plain

OPTIMIZER = OptimizerConfig(
    learning_rate=3e-3, warmup_steps=3, total_steps=50, clip_norm=0.5, weight_decay=0.1
)
DATA = RandomTokens(BATCH, CONTEXT, VOCABULARY)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Stages are threads here: the thread count is part of what makes bits repeatable."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _positions(graph: Graph, stages: int) -> tuple[int, ...]:
    bytes_at = boundary_bytes(graph)
    useful = candidates(graph, bytes_at, frozenset(valid_positions(graph)))
    return partition(operator_seconds(graph), useful, bytes_at, [1.0] * stages)


def _train(graph: Graph, stages: int, steps: int, **options: object) -> Trained:
    return train_pipeline(
        graph,
        _positions(graph, stages),
        DATA,
        steps=steps,
        microbatches=MICROBATCHES,
        optimizer=OPTIMIZER,
        **options,  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def graph() -> Graph:
    return tiny_graph()


@pytest.fixture(scope="module")
def plain(graph: Graph) -> Trained:
    torch.set_num_threads(1)
    model = initialise_model(tiny_gpt(), graph, 0)
    return train_plain(model, DATA, steps=50, microbatches=MICROBATCHES, optimizer=OPTIMIZER)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_fifty_steps_equal_the_plain_loop(graph: Graph, plain: Trained, stages: int) -> None:
    piped = _train(graph, stages, 50)

    assert piped.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)
    assert piped.norms[0] == pytest.approx(plain.norms[0], rel=1e-5)
    assert piped.losses == pytest.approx(plain.losses, rel=1e-4)
    for name, tensor in plain.tensors.items():
        torch.testing.assert_close(piped.tensors[name], tensor, rtol=1e-4, atol=1e-5)
    assert plain.losses[-1] < plain.losses[0] - 0.1  # it did learn: equality is not of standstill


def test_one_stage_is_bit_equal_to_the_plain_loop(graph: Graph, plain: Trained) -> None:
    piped = _train(graph, 1, 50)

    assert piped.losses == plain.losses
    assert piped.norms == plain.norms
    assert all(torch.equal(piped.tensors[n], t) for n, t in plain.tensors.items())


def test_the_same_partition_twice_is_bit_equal(graph: Graph) -> None:
    first, second = _train(graph, 3, 10), _train(graph, 3, 10)

    assert first.losses == second.losses
    assert all(torch.equal(second.tensors[n], t) for n, t in first.tensors.items())


def test_as_many_stages_as_operators_with_parameters(graph: Graph, plain: Trained) -> None:
    stages = len(candidates(graph, boundary_bytes(graph), set(valid_positions(graph)))) + 1
    parameters = {p.name for p in graph.parameters}
    assert stages == sum(bool(parameters & set(o.inputs)) for o in graph.operators)

    piped = _train(graph, stages, 3)

    assert piped.losses == pytest.approx(plain.losses[:3], rel=1e-5)


def test_dropout_draws_the_same_numbers_whatever_the_partition() -> None:
    graph = tiny_graph(0.2)
    one, two, four = (_train(graph, stages, 4) for stages in (1, 2, 4))
    without = _train(tiny_graph(), 1, 4)

    assert two.losses[0] == one.losses[0]
    assert two.losses == pytest.approx(one.losses, rel=1e-6)
    assert four.losses == pytest.approx(one.losses, rel=1e-6)
    assert one.losses != pytest.approx(without.losses, rel=1e-4)


def test_bfloat16_autocast_equals_the_plain_loop(graph: Graph) -> None:
    model = initialise_model(tiny_gpt(), graph, 0)
    plain = train_plain(
        model,
        DATA,
        steps=5,
        microbatches=MICROBATCHES,
        optimizer=OPTIMIZER,
        autocast=torch.bfloat16,
    )
    one = _train(graph, 1, 5, autocast=torch.bfloat16)
    three = _train(graph, 3, 5, autocast=torch.bfloat16)

    assert one.losses == plain.losses
    # A tied embedding sums its two gradients in fp32 across stages, and in bf16 order inside one.
    assert three.losses == pytest.approx(plain.losses, rel=2e-3)
    assert plain.losses[0] != pytest.approx(_train(graph, 1, 1).losses[0], rel=1e-7)
