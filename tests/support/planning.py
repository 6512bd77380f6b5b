"""Small random models and pools for the planner, and a time model that is written down once more.

`naive_step_s` follows the formulas of `cost_model` and the rules of `timing` one action at a time, in
plain Python and with none of the planner's code, so that both would have to be wrong alike.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from fusion_dask.planner.profile import LinkProfile, Profile
from fusion_dask.planner.records import BlockCost, ModelCost, PoolWorker, TiedParameter, Workload

DTYPE = "float32"


def random_model(source: random.Random, blocks: int, *, tied: bool = False) -> ModelCost:
    made = []
    for i in range(blocks):
        flops = source.choice([0.2, 0.5, 1.0, 2.0]) * 1e12
        parameters = source.choice([10, 40, 80]) * 1_000_000
        made.append(
            BlockCost(
                name=f"block {i}",
                forward_flops=flops,
                backward_flops=2 * flops,
                forward_bytes=source.choice([1e8, 2e10]),
                backward_bytes=2e8,
                streamed_bytes=4.0 * parameters,
                parameters=parameters,
                parameter_bytes=4 * parameters,
                gradient_bytes=4 * parameters,
                saved_bytes=source.choice([100, 800]) * 1_000_000,
                working_bytes=source.choice([50, 100]) * 1_000_000,
            )
        )
    shared = TiedParameter(
        name="tied",
        parameters=10_000_000,
        parameter_bytes=40_000_000,
        gradient_bytes=40_000_000,
        blocks=(0, blocks - 1),
    )
    return ModelCost(
        name="random",
        dtype=DTYPE,
        tokens=1024,
        blocks=tuple(made),
        positions=tuple(range(1, blocks)),
        boundary_bytes=tuple(source.choice([1, 4, 16]) * 1_000_000 for _ in range(blocks - 1)),
        gradient_boundary_bytes=tuple(
            source.choice([1, 4, 16]) * 1_000_000 for _ in range(blocks - 1)
        ),
        tied=(shared,) if tied and blocks > 1 else (),
    )


def random_pool(source: random.Random, workers: int) -> list[PoolWorker]:
    """Workers in two places: near ones reach each other faster."""
    places = [source.randrange(2) for _ in range(workers)]
    pool = []
    for i in range(workers):
        links = {"broker": link(0.01, source.choice([1e7, 1e8]))}
        for j in range(workers):
            near = places[i] == places[j]
            if j != i and source.random() < 0.8:
                links[f"w{j}"] = link(0.001 if near else 0.03, 1e9 if near else 1e8)
        pool.append(
            worker(
                f"w{i}",
                flops_per_s=source.choice([5e12, 1e13, 4e13]),
                memory_gb=source.choice([3, 6, 12, 24]),
                links=links,
                price=source.choice([0.1, 0.4]),
                power_w=source.choice([150.0, 350.0]),
            )
        )
    return pool


def link(delay_s: float, bytes_per_s: float) -> LinkProfile:
    return LinkProfile(
        delay_s=delay_s, send_bytes_per_s=bytes_per_s, receive_bytes_per_s=2 * bytes_per_s
    )


def worker(
    name: str,
    *,
    flops_per_s: float = 1e13,
    memory_gb: float = 24,
    links: dict[str, LinkProfile] | None = None,
    price: float = 0.0,
    power_w: float = 0.0,
) -> PoolWorker:
    profile = Profile(
        device="test",
        kind="cuda",
        threads=1,
        flops_per_s={DTYPE: flops_per_s},
        memory_bytes_per_s=5e11,
        free_memory_bytes=int(memory_gb * 1e9),
        links={"broker": link(0.001, 1e9)} if links is None else links,
        efficiency=0.5,
        measured_at=1.0,
        probe_s=1.0,
    )
    return PoolWorker(name=name, profile=profile, price_per_hour=price, power_w=power_w)


def with_links(pool: Sequence[PoolWorker], factor: float) -> list[PoolWorker]:
    """The pool with all rates multiplied."""
    return [
        replace(
            w,
            profile=replace(
                w.profile,
                links={
                    name: LinkProfile(
                        delay_s=x.delay_s,
                        send_bytes_per_s=x.send_bytes_per_s * factor,
                        receive_bytes_per_s=x.receive_bytes_per_s * factor,
                    )
                    for name, x in w.profile.links.items()
                },
            ),
        )
        for w in pool
    ]


def with_memory(pool: Sequence[PoolWorker], factor: float) -> list[PoolWorker]:
    """The pool with all memories multiplied."""
    return [
        replace(
            w,
            profile=replace(w.profile, free_memory_bytes=int(w.profile.free_memory_bytes * factor)),
        )
        for w in pool
    ]


def naive_link(sender: PoolWorker, receiver: PoolWorker) -> tuple[float, float]:
    """Delay and rate."""
    if receiver.name in sender.profile.links:
        known = sender.profile.links[receiver.name]
        return known.delay_s, known.send_bytes_per_s
    if sender.name in receiver.profile.links:
        known = receiver.profile.links[sender.name]
        return known.delay_s, known.receive_bytes_per_s
    out, back = sender.profile.links, receiver.profile.links
    delay_s = out["broker"].delay_s + back["broker"].delay_s
    return delay_s, min(
        max(x.send_bytes_per_s for x in out.values()),
        max(x.receive_bytes_per_s for x in back.values()),
    )


def naive_block_s(block: BlockCost, on: PoolWorker) -> tuple[float, float]:
    assert on.profile.efficiency is not None
    rate = on.profile.flops_per_s[DTYPE] * on.profile.efficiency
    wide = on.profile.memory_bytes_per_s
    return (
        max(block.forward_flops / rate, (block.forward_bytes + block.streamed_bytes) / wide),
        max(
            block.backward_flops / rate,
            (block.backward_bytes + block.streamed_bytes + 2 * block.gradient_bytes) / wide,
        ),
    )


def naive_memory(
    model: ModelCost, start: int, stop: int, held: int, workload: Workload, *, recomputes: bool
) -> float:
    blocks = model.blocks[start:stop]
    tied = [t for t in model.tied if any(start <= b < stop for b in t.blocks)]
    numbers = sum(b.parameters for b in blocks) + sum(t.parameters for t in tied)
    fixed = sum(b.parameter_bytes + b.gradient_bytes for b in blocks)
    fixed += sum(t.parameter_bytes + t.gradient_bytes for t in tied)
    received = model.boundary_bytes[start - 1] if start else 0
    sent = model.boundary_bytes[stop - 1] if stop < len(model.blocks) else 0
    saved = sum(b.saved_bytes for b in blocks) + sent
    kept = held * received + saved if recomputes else held * (received + saved)
    working = max(b.working_bytes for b in blocks)
    return fixed + numbers * workload.optimizer_bytes_per_parameter + kept + working


def naive_makespan_s(
    order: Sequence[Sequence[tuple[str, int, int]]],
    forward: Sequence[float],
    backward: Sequence[float],
    sends: Sequence[tuple[float, float]],
    returns: Sequence[tuple[float, float]],
) -> float:
    """Run schedules (direction, microbatch, stage) of workers action by action.

    Args:
        order: Per worker its actions; stage s is on worker s mod their number.
        forward: Seconds by stage.
        backward: Seconds by stage.
        sends: Per stage uplink seconds and delay to the next stage.
        returns: Per stage uplink seconds and delay to the stage before.
    """
    last = len(forward) - 1
    at = [0] * len(order)
    free = [0.0] * len(order)
    uplink = [0.0] * len(order)
    arrived = {("F", m, 0): 0.0 for _, m, _ in order[0]}
    while any(at[w] < len(o) for w, o in enumerate(order)):
        w = next(w for w, o in enumerate(order) if at[w] < len(o) and o[at[w]] in arrived)
        direction, m, s = order[w][at[w]]
        at[w] += 1
        free[w] = max(free[w], arrived[direction, m, s])
        free[w] += forward[s] if direction == "F" else backward[s]
        if direction == "F" and s == last:
            arrived["B", m, s] = free[w]
        elif direction == "F" or s:
            seconds, delay = sends[s] if direction == "F" else returns[s]
            uplink[w] = max(uplink[w], free[w]) + seconds
            arrived[direction, m, s + (1 if direction == "F" else -1)] = uplink[w] + delay
    return max(free)


def naive_step_s(
    model: ModelCost,
    stages: Sequence[tuple[PoolWorker, bool]],
    edges: Sequence[int],
    order: Sequence[Sequence[tuple[str, int, int]]],
    workload: Workload,
) -> float:
    """Seconds of a step; each stage is its worker and whether it recomputes."""
    workers = [w for w, _ in stages]
    forward, backward, sends, returns = [], [], [], []
    for s, ((on, recomputes), (a, z)) in enumerate(zip(stages, pairwise(edges), strict=True)):
        seconds = [naive_block_s(b, on) for b in model.blocks[a:z]]
        forward.append(sum(f for f, _ in seconds))
        backward.append(sum(b for _, b in seconds) + (forward[-1] if recomputes else 0.0))
        sends.append((0.0, 0.0))
        returns.append((0.0, 0.0))
        if s + 1 < len(stages):
            delay, rate = naive_link(on, workers[s + 1])
            sends[-1] = (model.boundary_bytes[z - 1] / rate, delay)
        if s:
            delay, rate = naive_link(on, workers[s - 1])
            returns[-1] = (model.gradient_boundary_bytes[a - 1] / rate, delay)
    total = naive_makespan_s(order, forward, backward, sends, returns)
    if len(workers) > 1:
        first = workers[0]
        total += max(naive_link(w, first)[0] + naive_link(first, w)[0] for w in workers[1:])
    for tied in model.tied:
        holders = [
            w
            for w, (a, z) in zip(workers, pairwise(edges), strict=True)
            if any(a <= b < z for b in tied.blocks)
        ]
        total += max(
            (
                sum(tied.gradient_bytes / naive_link(h, o)[1] for o in holders if o is not h)
                + max((naive_link(h, o)[0] for o in holders if o is not h), default=0.0)
                for h in holders
            ),
            default=0.0,
        )
    updates = []
    for on, (a, z) in zip(workers, pairwise(edges), strict=True):
        numbers = sum(b.parameters for b in model.blocks[a:z])
        numbers += sum(t.parameters for t in model.tied if any(a <= b < z for b in t.blocks))
        updates.append(
            numbers * workload.optimizer_moved_bytes_per_parameter / on.profile.memory_bytes_per_s
        )
    return total + max(updates)
