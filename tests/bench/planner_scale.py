"""How long the planner takes for a 13B model on large pools.

    PYTHONPATH=tests python -m bench.planner_scale [--model gpt3-13b] [--microbatches 512]

Pools of 50, 200 and 1,000 equal and mixed consumer GPUs behind home links; for what the engine runs today
and for everything that the planner knows. The aim is below 10 s for 1,000 devices.
"""

import argparse
import random
import time
from dataclasses import replace

from fusion_dask.errors import PlanError
from fusion_dask.planner.catalogue import catalogue
from fusion_dask.planner.placement import find_plan
from fusion_dask.planner.pool import data_sheet
from fusion_dask.planner.profile import LinkProfile
from fusion_dask.planner.records import ANY, ENGINE, PoolWorker, Workload
from fusion_dask.planner.shapes import shape_cost, shape_named

GPUS = ("rtx3060", "rtx3080", "rtx3090", "rtx4080", "rtx4090")


def home_pool(workers: int, *, mixed: bool) -> list[PoolWorker]:
    """GPUs at home: up to 1 Gbit/s up, 2 to 40 ms to the broker; equal ones have 1 Gbit/s, 10 ms."""
    source = random.Random(0)
    pool = []
    for i in range(workers):
        gpu = catalogue()[source.choice(GPUS) if mixed else "rtx3080"]
        up = source.choice([40e6, 100e6, 200e6, 1e9]) / 8 if mixed else 125e6
        link = LinkProfile(
            delay_s=source.uniform(0.002, 0.04) if mixed else 0.01,
            send_bytes_per_s=up,
            receive_bytes_per_s=min(4 * up, 125e6),
        )
        profile = replace(data_sheet(gpu), links={"broker": link})
        pool.append(PoolWorker(name=f"w{i}", profile=profile, power_w=gpu.power_w))
    return pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt3-13b")
    parser.add_argument("--microbatches", type=int, default=512)
    options = parser.parse_args()
    model = shape_cost(shape_named(options.model))
    workload = Workload(microbatches=options.microbatches)
    print(f"{options.model}: {len(model.blocks)} blocks, {options.microbatches} microbatches")
    print("workers  devices  may use    wall s    CPU s  replicas  stages  tokens/s")
    for count in (50, 200, 1000):
        for mixed in (False, True):
            pool = home_pool(count, mixed=mixed)
            for name, capabilities in (("engine", ENGINE), ("any", ANY)):
                wall, cpu = time.perf_counter(), time.process_time()
                row = f"{count:7}  {'mixed' if mixed else 'equal':7}  {name:7}"
                try:
                    plan = find_plan(model, pool, workload, capabilities=capabilities)
                except PlanError as error:
                    print(f"{row}  {time.perf_counter() - wall:8.1f}  refused: {error}")
                    continue
                stages = len(plan.replicas[0].stages)
                print(
                    f"{row}  {time.perf_counter() - wall:8.1f} {time.process_time() - cpu:8.1f}  "
                    f"{len(plan.replicas):8}  "
                    f"{stages:6}  {plan.prediction.tokens_per_s:8,.0f}"
                )


if __name__ == "__main__":
    main()
