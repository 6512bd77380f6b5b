"""The paper's analysis gives the known values, and its inputs are told apart."""

import numpy as np
import pytest

from fusion_dask.planner.headline import (
    ACHIEVED,
    ASSUMPTIONS,
    COMPARABLE,
    LINKS_BITS_PER_S,
    MODELS,
    PAPER_SIDE,
    REFERENCES,
    Side,
    full_link_bits_per_s,
    relative_throughput,
    row,
)
from fusion_dask.planner.shapes import shape_cost, shape_named
from fusion_dask.planner.simulator_step import run_step
from fusion_dask.planner.timing import StageTimes

PCIE, SXM = REFERENCES


def test_peaks_of_both_sides() -> None:
    assert PAPER_SIDE.flops_per_s / PCIE.flops_per_s == pytest.approx(0.98, abs=0.005)
    assert PAPER_SIDE.flops_per_s / SXM.flops_per_s == pytest.approx(0.75, abs=0.005)
    assert PAPER_SIDE.price_usd == 34_950
    assert (PCIE.price_usd, SXM.price_usd) == (100_000, 120_000)
    assert (PAPER_SIDE.power_w, PCIE.power_w, SXM.power_w) == (16_000, 1_400, 2_800)


@pytest.mark.parametrize(
    ("model", "gbit_per_s"), list(zip(MODELS, (12.4, 5.8, 2.3, 1.5, 0.27), strict=True))
)
def test_link_for_full_training_throughput(model: str, gbit_per_s: float) -> None:
    needed = full_link_bits_per_s(shape_named(model)) / 1e9
    assert needed == pytest.approx(gbit_per_s, rel=0.02)


@pytest.mark.parametrize("model", ["bert-large", "gpt3-13b"])
def test_the_simulator_sees_the_same_link(model: str) -> None:
    shape = shape_named(model)
    cost = shape_cost(shape)
    flops = sum(b.forward_flops + b.backward_flops for b in cost.blocks[1:-1])
    stage_s = flops / 50 / (ACHIEVED * PAPER_SIDE.gpu.fp16_flops_per_s)
    microbatches = 400

    def step_s(share: float) -> float:
        # One line a worker carries what goes to both neighbours: twice a link's bits.
        rate = 2 * share * full_link_bits_per_s(shape) / 8
        transfer = np.full((50, 1), cost.boundary_bytes[0] / rate)
        none = np.zeros((50, 1))
        send, back = transfer.copy(), transfer.copy()
        send[-1] = back[0] = 0.0
        times = StageTimes(
            forward_s=none + stage_s / 3,
            backward_s=none + stage_s * 2 / 3,
            send_s=send,
            send_delay_s=none,
            return_s=back,
            return_delay_s=none,
        )
        return run_step("gpipe", microbatches, times).end_s

    def expected_s(share: float) -> float:
        # GPipe sends in one direction at a time: each phase is bound by computing or sending.
        send_s = stage_s / (2 * share)
        return sum(
            (microbatches - 1) * max(part, send_s) + 49 * (part + send_s) + part
            for part in (stage_s / 3, stage_s * 2 / 3)
        )

    for share in (10.0, 1.0, 0.5):
        assert step_s(share) == pytest.approx(expected_s(share), rel=0.01)
    assert step_s(0.5) > 1.9 * microbatches * stage_s


def test_throughput_falls_in_proportion_below_that_link() -> None:
    shape = shape_named("gpt3-xl")
    needed = full_link_bits_per_s(shape)
    full = relative_throughput(shape, PCIE, 2 * needed)
    assert full == pytest.approx(PAPER_SIDE.flops_per_s / PCIE.flops_per_s)
    assert relative_throughput(shape, PCIE, needed / 4) == pytest.approx(full / 4)


@pytest.mark.parametrize("reference", REFERENCES, ids=["pcie", "sxm"])
@pytest.mark.parametrize("model", MODELS)
def test_rows_are_consistent(model: str, reference: Side) -> None:
    found = row(model, reference)
    for name, compression in (("none", 1.0), ("8 bits", 2.0), ("4 bits", 4.0)):
        values = found.relative[name]
        assert list(values) == sorted(values)
        assert len(values) == len(LINKS_BITS_PER_S)
        slowest = found.comparable_link_bits_per_s[name]
        shape = shape_named(model)
        if slowest is None:
            assert max(values) < COMPARABLE
        else:
            there = relative_throughput(shape, found.reference, slowest * compression)
            assert there == pytest.approx(COMPARABLE)
            below = relative_throughput(shape, found.reference, slowest * compression * 0.99)
            assert below < COMPARABLE


def test_memory_says_what_fits() -> None:
    fits = {m: (row(m, PCIE).fit, row(m, PCIE).reference_fit) for m in MODELS}
    assert [f.fits for f, _ in fits.values()] == [True, True, True, True, False]
    assert [r.fits for _, r in fits.values()] == [True, True, True, True, False]
    # Activations of 50 microbatches in flight leave no room in 10 GB.
    assert [f.recomputes for f, _ in fits.values()] == [False, False, True, True, True]
    assert not fits["gpt3-13b"][1].recomputes
    assert row("gpt3-175b", PCIE).gpus_needed == pytest.approx(16 * 175e9 / 9e9, rel=0.01)


def test_what_is_assumed_is_said() -> None:
    said = " ".join(ASSUMPTIONS)
    for word in (
        "fp32 accumulation",
        "λ = 0.5",
        "boundaries in fp16",
        "embedding and head left out",
    ):
        assert word in said
