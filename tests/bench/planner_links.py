"""What the planner gains over simpler placements on city links, with mixed consumer GPUs.

    PYTHONPATH=tests python -m bench.planner_links [--workers 16] [--pools 7] [--model gpt3-xl]

Each pool draws its GPUs from the catalogue and puts each into one of the ten cities of
`data/city_links.csv`; within a city workers have 1 Gbit/s and 1 ms. All sides use one pipeline and 1F1B,
as the engine does, the same batch, and are priced by the same cost model:

- equal: all workers in the order of the pool, stages of equal FLOPs;
- compute: the same order, stages in proportion to the workers' speed;
- random: a random order of all workers, stages in proportion to their speed; the median of nine.

Prints tokens/s of the plan and by how much it is faster. A `!` marks a side that asks a worker for more
memory than it has, which the planner never does: that side could not run.
"""

import argparse
import csv
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fusion_dask.planner.catalogue import catalogue
from fusion_dask.planner.cost_model import block_seconds
from fusion_dask.planner.partition import partition
from fusion_dask.planner.placement import find_plan
from fusion_dask.planner.pool import data_sheet
from fusion_dask.planner.predict import predict
from fusion_dask.planner.profile import LinkProfile
from fusion_dask.planner.records import (
    ENGINE,
    ModelCost,
    PlacedReplica,
    PlacedStage,
    PoolWorker,
    Prediction,
    Workload,
)
from fusion_dask.planner.shapes import shape_cost, shape_named

GPUS = ("rtx3060", "rtx3070", "rtx3080", "rtx3090", "rtx4070", "rtx4080", "rtx4090")
LINKS = Path(__file__).parent / "data" / "city_links.csv"
GBIT = 1e9 / 8


def city_links() -> dict[tuple[str, str], LinkProfile]:
    """One direction of every pair of cities, also of a city with itself."""
    links = {}
    with LINKS.open() as file:
        for row in csv.DictReader(file):
            rate = float(row["bandwidth_gbit_s"]) * GBIT
            link = LinkProfile(
                delay_s=float(row["delay_ms"]) / 2000,
                send_bytes_per_s=rate,
                receive_bytes_per_s=rate,
            )
            links[row["a"], row["b"]] = links[row["b"], row["a"]] = link
    inside = LinkProfile(delay_s=0.0005, send_bytes_per_s=GBIT, receive_bytes_per_s=GBIT)
    return links | {(city, city): inside for city in {a for a, _ in links}}


def city_pool(workers: int, seed: int) -> list[PoolWorker]:
    """Consumer GPUs in the cities, all links probed."""
    source = random.Random(seed)
    links = city_links()
    cities = sorted({a for a, _ in links})
    homes = {f"w{i}": source.choice(cities) for i in range(workers)}
    pool = []
    for name, home in homes.items():
        gpu = catalogue()[source.choice(GPUS)]
        peers = {n: links[home, h] for n, h in homes.items() if n != name}
        profile = replace(data_sheet(gpu), links=peers)
        pool.append(PoolWorker(name=name, profile=profile, power_w=gpu.power_w))
    return pool


def along(
    model: ModelCost, pool: Sequence[PoolWorker], workload: Workload, *, by_speed: bool
) -> Prediction:
    """All workers in this order, stages of equal FLOPs or in proportion to speed."""
    seconds = [b.forward_flops + b.backward_flops for b in model.blocks]
    speeds = [1.0] * len(pool)
    if by_speed:
        speeds = [1 / sum(float(s.sum()) for s in block_seconds(model, w.profile)) for w in pool]
    cuts = partition(seconds, model.positions, model.boundary_bytes, speeds)
    edges = [0, *cuts, len(model.blocks)]
    stages = tuple(
        PlacedStage(worker=w.name, start=edges[i], stop=edges[i + 1]) for i, w in enumerate(pool)
    )
    replica = PlacedReplica(stages=stages, schedule="1f1b", microbatches=workload.microbatches)
    return predict(model, pool, [replica], workload)


def fits(prediction: Prediction, pool: Sequence[PoolWorker]) -> bool:
    free = {w.name: w.profile.free_memory_bytes for w in pool}
    return all(s.memory_bytes <= free[s.worker] for r in prediction.replicas for s in r.stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--pools", type=int, default=7)
    parser.add_argument("--model", default="gpt3-xl")
    parser.add_argument("--microbatches", type=int, default=64)
    options = parser.parse_args()
    model = shape_cost(shape_named(options.model))
    workload = Workload(microbatches=options.microbatches)
    print(f"{options.model}, {options.workers} workers, {options.microbatches} microbatches")
    print(
        f"{'pool':>4} {'taking part':>11} {'tokens/s':>9} {'equal':>8} {'compute':>8} {'random':>8}"
    )
    gains: dict[str, list[float]] = {"equal": [], "compute": [], "random": []}
    for seed in range(options.pools):
        pool = city_pool(options.workers, seed)
        plan = find_plan(model, pool, workload, capabilities=ENGINE)
        source = random.Random(seed)
        shuffled = [
            along(model, source.sample(pool, len(pool)), workload, by_speed=True) for _ in range(9)
        ]
        sides = {
            "equal": along(model, pool, workload, by_speed=False),
            "compute": along(model, pool, workload, by_speed=True),
            "random": sorted(shuffled, key=lambda p: p.step_s)[4],
        }
        cells = []
        for name, side in sides.items():
            gains[name].append(side.step_s / plan.prediction.step_s)
            cells.append(f"{gains[name][-1]:7.2f}{' ' if fits(side, pool) else '!'}")
        (replica,) = plan.replicas
        print(
            f"{seed:4} {len(replica.stages):11} {plan.prediction.tokens_per_s:9,.0f} "
            + " ".join(cells)
        )
    medians = " ".join(f"{statistics.median(g):7.2f} " for g in gains.values())
    print(f"{'median':>26} {medians}")


if __name__ == "__main__":
    main()
