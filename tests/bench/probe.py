"""How repeatable the probe is, and whether emulated devices are measured as what they emulate.

    PYTHONPATH=tests python -m bench.probe [--rounds 5] [--budget 6]

Each round probes the idle CPU twice, and then the emulated pool `cpu:0.125,cpu:0.25,cpu:0.5,cpu:1`
one after the other, all in this process on one core with one kernel thread. Printed are ratios within a
round, which should be 1 for the two probes and 1 : 2 : 4 : 8 for the pool.
"""

import argparse
import os
import statistics

import torch

from fusion_dask.devices.emulation import emulations
from fusion_dask.worker.pace import Pace
from fusion_dask.worker.probe import measure_rates

CPU = torch.device("cpu")
ROOM_BYTES = 1 << 30
POOL = "cpu:0.125,cpu:0.25,cpu:0.5,cpu:1"


def _rates(fraction: float, budget_s: float) -> dict[str, float]:
    measured = measure_rates(CPU, budget_s=budget_s, pace=Pace(fraction), room_bytes=ROOM_BYTES)
    return {**measured.flops_per_s, "copy": measured.memory_bytes_per_s}


def _ratios(ones: dict[str, float], others: dict[str, float]) -> dict[str, float]:
    return {name: ones[name] / others[name] for name in ones if name in others}


def _line(ratios: dict[str, float]) -> str:
    return "  ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=6.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    fractions = [e.fraction for e in emulations(POOL, cores=2, available_bytes=ROOM_BYTES)]
    repeats: list[dict[str, float]] = []
    pools: list[list[dict[str, float]]] = []
    for number in range(options.rounds):
        first, second = _rates(1.0, options.budget), _rates(1.0, options.budget)
        repeats.append(_ratios(second, first))
        print(f"round {number}: second / first probe: {_line(repeats[-1])}")
        pool = [_rates(fraction, options.budget) for fraction in fractions]
        pools.append([_ratios(rates, pool[0]) for rates in pool])
        for fraction, ratios in zip(fractions, pools[-1], strict=True):
            wanted = fraction / fractions[0]
            print(f"  fraction {fraction:.4f}, wanted {wanted:.0f}: {_line(ratios)}")
    print("medians over the rounds")
    names = repeats[0]
    print("  repeated: " + _line({n: statistics.median(r[n] for r in repeats) for n in names}))
    worst = {n: max(abs(r[n] - 1) for r in repeats) for n in names}
    print("  largest deviation of a repetition: " + _line(worst))
    for index, fraction in enumerate(fractions):
        medians = {n: statistics.median(p[index][n] for p in pools) for n in names}
        print(f"  pool {fraction / fractions[0]:.0f}: {_line(medians)}")


if __name__ == "__main__":
    main()
