"""Tokens per second of the pipeline against `torch.distributed.pipelining` over gloo.

Both train the same GPT-style decoder in two stages, cut at the same block, with the same microbatches
and AdamW, each stage in a process pinned to one core of its own. Rounds alternate; both sides stay
alive and the one that is not measured sleeps.

    PYTHONPATH=tests python -m bench.pipeline
    PYTHONPATH=tests python -m bench.pipeline --rounds 3 --only small

Prints per model the medians, the ratio, and where a step's time goes in each stage.
"""

import argparse
import multiprocessing as mp
import os
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
from distributed import Client
from torch import nn
from transformers import GPT2Config

from bench.tokens import Tokens
from fusion_dask.broker.contribution import Load
from fusion_dask.graph.capture import capture
from fusion_dask.graph.cost import annotate
from fusion_dask.graph.cut import cut
from fusion_dask.graph.programs import dumps_program
from fusion_dask.pipeline.driver import Driver, Programs
from fusion_dask.pipeline.pool import workers_of
from fusion_dask.pipeline.spec import RunSpec, StageReport, ownership
from fusion_dask.worker.optimizer import OptimizerConfig
from fusion_storage.store import open_store
from fusion_tasks.models import CausalLoss, initialise_model, meta_model
from support.cluster import process_cluster

VOCABULARY = 512
MICROBATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model: `batch` windows of `context` tokens in a microbatch."""

    name: str
    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int  # in a round

    @property
    def tokens(self) -> int:
        return self.steps * MICROBATCHES * self.batch * self.context

    def config(self) -> GPT2Config:
        return GPT2Config(
            n_layer=self.layers,
            n_embd=self.width,
            n_head=self.heads,
            n_positions=self.context,
            vocab_size=VOCABULARY,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )


CASES = (
    Case(name="large", layers=8, width=256, heads=8, context=128, batch=4, steps=4),
    Case(name="medium", layers=8, width=256, heads=8, context=128, batch=1, steps=12),
    Case(name="small", layers=8, width=128, heads=4, context=128, batch=1, steps=24),
)
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, clip_norm=None, total_steps=1_000_000)


class FirstHalf(nn.Module):
    def __init__(self, model: nn.Module, blocks: int) -> None:
        super().__init__()
        self.wte, self.wpe = model.transformer.wte, model.transformer.wpe  # type: ignore[union-attr]
        self.blocks = nn.ModuleList(list(model.transformer.h)[:blocks])  # type: ignore[union-attr, arg-type]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))  # type: ignore[operator]
        for block in self.blocks:
            hidden = block(hidden)
        return torch.as_tensor(hidden)


class SecondHalf(nn.Module):
    def __init__(self, model: nn.Module, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(list(model.transformer.h)[blocks:])  # type: ignore[union-attr, arg-type]
        self.norm, self.head = model.transformer.ln_f, model.lm_head  # type: ignore[union-attr]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))  # type: ignore[operator]
        return logits


def captured(case: Case) -> tuple[CausalLoss, object]:
    model = CausalLoss(meta_model(case.config()))
    ids = torch.zeros(case.batch, case.context, dtype=torch.int64, device="meta")
    return model, annotate(capture(model, {"input_ids": ids, "labels": ids.clone()}))


def gloo_stage(rank: int, case: Case, port: int, commands: Connection) -> None:
    """One stage of the reference, in its own process: runs rounds on command."""
    os.sched_setaffinity(0, {rank})
    torch.set_num_threads(1)
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model, graph = captured(case)
    whole = initialise_model(model, graph, 0).language_model()  # type: ignore[arg-type, operator]
    half = (FirstHalf if rank == 0 else SecondHalf)(whole, case.layers // 2)
    half.train()
    optimizer = torch.optim.AdamW(half.parameters(), lr=1e-3, fused=True)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))

    def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    data = Tokens(vocabulary=VOCABULARY, batch=case.batch, context=case.context)
    step = 0
    losses: list[torch.Tensor] = []
    while (steps := commands.recv()) is not None:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            name = "input_ids" if rank == 0 else "labels"
            parts = [data.microbatch(step, m, [name])[name] for m in range(MICROBATCHES)]
            batch = torch.cat(parts)
            if rank == 0:
                schedule.step(batch)
            else:
                losses.clear()
                schedule.step(target=batch, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        dist.barrier()
        last = float(torch.stack(losses).detach().mean()) if rank == 1 else None
        commands.send((time.perf_counter() - begin, last))
    dist.destroy_process_group()


class Gloo:
    """The reference pipeline."""

    def __init__(self, case: Case) -> None:
        context = mp.get_context("spawn")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(2):
            here, there = context.Pipe()
            process = context.Process(target=gloo_stage, args=(rank, case, port, there))
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def round(self, steps: int) -> tuple[float, float]:
        """Seconds of a round, and the last loss."""
        for pipe in self._pipes:
            pipe.send(steps)
        answers = [pipe.recv() for pipe in self._pipes]
        return max(seconds for seconds, _ in answers), answers[1][1]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(30)


class Pipeline:
    """Ours: two Dask workers, one core each."""

    def __init__(self, case: Case, client: Client, folder: str) -> None:
        model, graph = captured(case)
        del model
        middle = f"transformer.h.{case.layers // 2}"
        position = next(
            i
            for i, o in enumerate(graph.operators)  # type: ignore[attr-defined]
            if o.module == middle or o.module.startswith(f"{middle}.")
        )
        programs = cut(graph, [position])  # type: ignore[arg-type]
        order = tuple(p.name for p in graph.parameters)  # type: ignore[attr-defined]
        spec = RunSpec(
            run=f"bench-{case.name}",
            seed=0,
            store=open_store(folder),
            optimizer=OPTIMIZER,
            microbatches=MICROBATCHES,
            order=order,
            owned=ownership(programs, order),
            autocast=None,
            data=Tokens(vocabulary=VOCABULARY, batch=case.batch, context=case.context),
        )
        self._driver = Driver(
            client,
            spec,
            Programs(training=tuple(map(dumps_program, programs))),
            list(workers_of(client).values()),
            lambda measure: None,
            Load(tokens_per_step=1, flops=tuple(p.flops for p in programs)),
        )
        self._driver.__enter__()
        self._step = 0
        self.boundary_bytes = sum(p.bytes for p in programs[0].sends)

    def round(self, steps: int) -> tuple[float, float, tuple[StageReport, ...]]:
        """Seconds of the steps of a round, the last loss, and the stages' reports."""
        result = self._driver.segment(self._step, self._step + steps, lambda *_: {})
        self._step += steps
        seconds = max(report.wall_s for report in result.reports)
        return seconds, result.steps[-1].loss, result.reports

    def close(self) -> None:
        self._driver.__exit__()


def measure(case: Case, client: Client, rounds: int, folder: str) -> None:
    """Alternate rounds of both sides and print what came out."""
    gloo, pipeline = Gloo(case), Pipeline(case, client, folder)
    ratios, reference, ours = [], [], []
    reports: list[tuple[StageReport, ...]] = []
    for number in range(rounds + 1):
        gloo_s, gloo_loss = gloo.round(case.steps)
        our_s, our_loss, stages = pipeline.round(case.steps)
        if abs(our_loss - gloo_loss) > 1e-3 * gloo_loss:
            raise SystemExit(f"the two do not train alike: losses {our_loss} and {gloo_loss}")
        if number:  # the first round warms up
            reference.append(case.tokens / gloo_s)
            ours.append(case.tokens / our_s)
            ratios.append(gloo_s / our_s)
            reports.append(stages)
    gloo.close()
    pipeline.close()
    print(
        f"{case.name:8} boundary {pipeline.boundary_bytes / 1024:.0f} KiB   tokens/s: "
        f"gloo 1F1B {statistics.median(reference):,.0f}, pipeline {statistics.median(ours):,.0f}   "
        f"ratio of medians {statistics.median(ours) / statistics.median(reference):.2f}, "
        f"median of pairs {statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
    )
    for stage in range(2):
        mine = [r[stage] for r in reports]
        steps = case.steps
        wall = statistics.median(r.wall_s for r in mine) / steps * 1e3
        busy = statistics.median(r.computed_s for r in mine) / steps * 1e3
        wait = statistics.median(r.waited_s for r in mine) / steps * 1e3
        saved = statistics.median(r.saved_s for r in mine) * 1e3
        print(
            f"         stage {stage}: step {wall:.1f} ms = compute {busy:.1f} + wait {wait:.1f} "
            f"+ other {wall - busy - wait:.1f}; checkpoint {saved:.0f} ms a round"
        )


def main() -> None:
    """Measure every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=[c.name for c in CASES])
    arguments = parser.parse_args()
    for case in CASES:
        if arguments.only in (None, case.name):
            with (
                process_cluster(2, pin=True) as cluster,
                cluster.client() as client,
                tempfile.TemporaryDirectory() as folder,
            ):
                measure(case, client, arguments.rounds, folder)


if __name__ == "__main__":
    main()
