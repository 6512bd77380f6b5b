"""A pipeline whose stages are threads of this process, and the plain loop that it must equal."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fusion_dask.graph.cut import cut
from fusion_dask.graph.initialise import initialise
from fusion_dask.graph.ir import Graph
from fusion_dask.pipeline.exchange import LocalExchange
from fusion_dask.pipeline.runner import DataSource, RunnerConfig, StageRunner, StepResult
from fusion_dask.pipeline.spec import ownership
from fusion_dask.planes.torch_plane import TorchPlane
from fusion_dask.planner.schedule import one_f_one_b
from fusion_dask.worker.optimizer import OptimizerConfig, learning_rate
from fusion_dask.worker.outbox import Outbox
from fusion_dask.worker.pace import Pace
from fusion_dask.worker.stage_host import StageHost

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    losses: list[float]
    norms: list[float | None]
    tensors: dict[str, Tensor]


class RandomTokens:
    """Seeded token windows: the same for equal arguments."""

    def __init__(self, batch: int, context: int, vocabulary: int) -> None:
        self._shape = (batch, context + 1)
        self._vocabulary = vocabulary

    def microbatch(
        self, step: int, microbatch: int, names: Sequence[str]
    ) -> Mapping[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(step * 1000 + microbatch)
        # Skewed, so that there is something to learn.
        rows = (torch.rand(self._shape, generator=generator) ** 3 * self._vocabulary).long()
        columns = {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}
        return {name: columns[name].contiguous() for name in names}


def train_pipeline(
    graph: Graph,
    positions: Sequence[int],
    data: DataSource,
    *,
    steps: int,
    microbatches: int,
    optimizer: OptimizerConfig,
    seed: int = 0,
    autocast: torch.dtype | None = None,
    outbox: Outbox | None = None,
    pace: Pace | None = None,
) -> Trained:
    """Train a graph in stages that are threads over one exchange."""
    programs = cut(graph, positions)
    order = tuple(p.name for p in graph.parameters if p.trainable)
    owned = ownership(programs, order)
    exchange = LocalExchange(outbox)
    results: list[StepResult] = []
    hosts = []
    runners = []
    for program in programs:
        values = initialise((*program.parameters, *program.buffers), seed)
        plane = TorchPlane(program, values, values, device=CPU, autocast=autocast)
        host = StageHost(program, plane, optimizer=optimizer, seed=seed, microbatches=microbatches)
        config = RunnerConfig(
            run="test",
            epoch=1,
            order=order,
            owned=owned,
            clip_norm=optimizer.clip_norm,
            timeout_s=60.0,
        )
        schedule = one_f_one_b(program.index, program.count, microbatches)
        hosts.append(host)
        runners.append(StageRunner(host, exchange, data, schedule, config, pace or Pace()))

    def record(result: StepResult) -> None:
        if result.loss is not None:
            results.append(result)

    with ThreadPoolExecutor(len(runners)) as pool:
        futures = [pool.submit(r.train, 0, steps, record) for r in runners]
        for future in futures:
            future.result(timeout=120)
    tensors: dict[str, Tensor] = {}
    for host in hosts:
        tensors |= {n: t.clone() for n, t in host.state().items()}
    return Trained(
        losses=[r.loss for r in results if r.loss is not None],
        norms=[r.gradient_norm for r in results],
        tensors=tensors,
    )


def train_plain(
    model: nn.Module,
    data: DataSource,
    *,
    steps: int,
    microbatches: int,
    optimizer: OptimizerConfig,
    autocast: torch.dtype | None = None,
) -> Trained:
    """The loop that anybody would write: one process, one module, `torch.optim.AdamW`."""
    model.train()
    parameters = dict(model.named_parameters())
    groups = [
        {
            "params": [p for p in parameters.values() if p.dim() >= 2],
            "weight_decay": optimizer.weight_decay,
        },
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.0, betas=optimizer.betas, eps=optimizer.eps, fused=True)
    losses: list[float] = []
    norms: list[float | None] = []
    for step in range(steps):
        for group in adamw.param_groups:
            group["lr"] = learning_rate(optimizer, step)
        total = 0.0
        for microbatch in range(microbatches):
            batch = data.microbatch(step, microbatch, ("input_ids", "labels"))
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = model(**batch)
            (loss / microbatches).backward()
            total += float(loss.detach())
        norm = None
        if optimizer.clip_norm is not None:
            norm = float(
                nn.utils.clip_grad_norm_(parameters.values(), optimizer.clip_norm, foreach=False)
            )
        adamw.step()
        adamw.zero_grad()
        losses.append(total / microbatches)
        norms.append(norm)
    return Trained(
        losses=losses,
        norms=norms,
        tensors={n: p.detach().clone() for n, p in parameters.items()},
    )
