"""Predicted against measured step times, on real pipelines of emulated workers on this machine.

    PYTHONPATH=tests python -m bench.prediction [--seconds 8] [--only equal]

Each configuration starts workers of stated fractions of a core behind shaped links, lets them measure
themselves, and runs a few short segments with equal cuts, so that the workers learn their efficiency on
real stages, as they do in any run. Then the planner cuts the model by the profiles that the broker has, and
predicts the step; the pipeline runs with these cuts, and the median step is what was measured. Nothing is
fitted to the measured segment.

Prints a row for each configuration, and the median and the worst relative error. On a busy machine the
measured times mean little: the fractions below ask for less than half of two cores.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from distributed import Client

from bench.tokens import Tokens
from fusion_dask.broker.contribution import Load
from fusion_dask.devices.emulation import Emulation, parse_shape
from fusion_dask.devices.find import cpu_device
from fusion_dask.devices.share import emulate
from fusion_dask.graph.capture import capture
from fusion_dask.graph.cost import annotate
from fusion_dask.graph.ir import Graph, StageProgram
from fusion_dask.graph.programs import dumps_program
from fusion_dask.pipeline.driver import Driver, Programs
from fusion_dask.pipeline.pool import profiles_of, workers_of
from fusion_dask.pipeline.spec import RunSpec, ownership
from fusion_dask.planner.plan import Plan, make_plan
from fusion_dask.planner.profile import Profile
from fusion_dask.worker.optimizer import OptimizerConfig
from fusion_storage.store import open_store
from fusion_tasks.models import CausalLoss, load_config, meta_model
from support.cluster import process_cluster

VOCABULARY = 256
CORES = (0, 1)
MICROBATCHES = 8
PROBE_S = 2.0
#: Segments in which the workers learn their efficiency, and the steps of each.
LEARNING = (2, 2, 2, 2, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    name: str
    layers: int
    width: int
    context: int
    batch: int

    def graph(self) -> Graph:
        config = load_config(
            "gpt",
            layers=self.layers,
            width=self.width,
            heads=4,
            context=self.context,
            vocab_size=VOCABULARY,
            dropout=0.0,
        )
        ids = torch.zeros(self.batch, self.context, dtype=torch.int64, device="meta")
        model = CausalLoss(meta_model(config))
        return annotate(capture(model, {"input_ids": ids, "labels": ids.clone()}))


MODELS = (
    Model(name="deep", layers=8, width=96, context=64, batch=2),
    Model(name="wide", layers=4, width=192, context=64, batch=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Workers by their fractions of a core, and their link."""

    name: str
    fractions: tuple[float, ...]
    link: str | None = None


SETUPS = (
    Setup(name="one", fractions=(0.3,)),
    Setup(name="two equal", fractions=(0.3, 0.3)),
    Setup(name="two uneven", fractions=(0.12, 0.36)),
    Setup(name="two shaped", fractions=(0.3, 0.3), link="50mbit/10ms"),
    Setup(name="three uneven", fractions=(0.1, 0.2, 0.3)),
    Setup(name="three shaped", fractions=(0.1, 0.2, 0.3), link="50mbit/5ms"),
    Setup(name="four equal", fractions=(0.18,) * 4),
    Setup(name="four shaped", fractions=(0.08, 0.12, 0.2, 0.3), link="100mbit/10ms"),
)


class Runs:
    """Runs pipelines of one model on one cluster."""

    def __init__(self, client: Client, model: Model, folder: str) -> None:
        self._client = client
        self._model = model
        self._store = open_store(folder)
        self._count = 0

    def run(
        self, graph: Graph, programs: tuple[StageProgram, ...], plan: Plan, segments: Sequence[int]
    ) -> list[float]:
        """Seconds of every step but the first of each segment."""
        order = tuple(p.name for p in graph.parameters if p.trainable)
        self._count += 1
        spec = RunSpec(
            run=f"{self._model.name}-{self._count}",
            seed=0,
            store=self._store,
            optimizer=OptimizerConfig(learning_rate=1e-3, total_steps=1_000_000),
            microbatches=MICROBATCHES,
            order=order,
            owned=ownership(programs, order),
            autocast=None,
            data=Tokens(
                vocabulary=VOCABULARY, batch=self._model.batch, context=self._model.context
            ),
        )
        known = workers_of(self._client)
        driver = Driver(
            self._client,
            spec,
            Programs(training=tuple(map(dumps_program, programs))),
            [known[s.worker] for s in plan.stages],
            lambda measure: None,
            Load(tokens_per_step=1, flops=tuple(s.flops for s in plan.stages)),
        )
        seconds: list[float] = []
        start = 0
        with driver:
            for steps in segments:
                result = driver.segment(start, start + steps, lambda *_: {})
                start += steps
                seconds += [m.seconds for m in result.steps[1:]]
        return seconds


def measured_profiles(client: Client, count: int, peers: bool) -> dict[str, Profile]:
    """The profiles of all workers, once all were measured and know each other."""
    deadline = time.monotonic() + 120
    while True:
        known = profiles_of(client)
        if len(known) == count and (not peers or all(len(p.links) > 1 for p in known.values())):
            return known
        if time.monotonic() > deadline:
            return known
        time.sleep(0.5)


def configuration(setup: Setup, seconds: float) -> list[float]:
    """Print a row for each model; return their relative errors."""
    shape = None if setup.link is None else parse_shape(setup.link)
    made = [
        Emulation(name="cpu", fraction=f, memory_bytes=2 << 30, link=shape) for f in setup.fractions
    ]
    errors = []
    with process_cluster(0) as cluster, tempfile.TemporaryDirectory() as folder:
        shares = emulate(made, cpu_device(), cores=CORES)
        for i, share in enumerate(shares):
            variables = {**share.as_environment(), "FUSION_PROBE_S": str(PROBE_S)}
            cluster.add_worker(f"w{i}", variables=variables)
        with cluster.client() as client:
            count = len(setup.fractions)
            names = list(measured_profiles(client, count, peers=False))
            for model in MODELS:
                graph, runs = model.graph(), Runs(client, model, folder)
                equal, programs = make_plan(graph, names, stages=count, microbatches=MICROBATCHES)
                runs.run(graph, programs, equal, LEARNING)
                known = profiles_of(client)
                plan, programs = make_plan(
                    graph, names, stages=count, microbatches=MICROBATCHES, profiles=known
                )
                assert plan.step_s is not None
                steps = max(3, round(seconds / plan.step_s))
                measured = statistics.median(runs.run(graph, programs, plan, (2, steps)))
                errors.append(plan.step_s / measured - 1)
                share_of = sum(s.flops for s in plan.stages)
                shares_of = "/".join(f"{100 * s.flops / share_of:.0f}" for s in plan.stages)
                print(
                    f"{setup.name:13} {model.name:5} {setup.link or '-':>12} {shares_of:>12}"
                    f" {1e3 * plan.step_s:10.0f} {1e3 * measured:9.0f} {100 * errors[-1]:+7.1f}",
                    flush=True,
                )
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="measured a configuration")
    parser.add_argument("--only", help="setups whose name contains this")
    options = parser.parse_args()
    print("workers       model         link  FLOPs (%)   predicted  measured   error")
    print("                                                     (ms)      (ms)     (%)")
    errors = [
        abs(error)
        for setup in SETUPS
        if options.only is None or options.only in setup.name
        for error in configuration(setup, options.seconds)
    ]
    print(
        f"{len(errors)} configurations: median error {100 * statistics.median(errors):.1f} %, "
        f"worst {100 * max(errors):.1f} %"
    )


if __name__ == "__main__":
    main()
