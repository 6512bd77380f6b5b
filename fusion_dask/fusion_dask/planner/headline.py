"""The paper's headline, calculated: can 50 RTX 3080 train as fast as 4 H100?

From the abstract of the paper (arXiv 2309.01172): the two sides, 50 RTX 3080 and 4 H100, and the claim
that their throughputs are comparable. Everything else, listed in `ASSUMPTIONS`, is this project's.

The analysis: every GPU is one stage of a uniform pipeline and reaches the share λ of its dense fp16 tensor
peak. A token takes T = 72 L H² + 12 L S H FLOPs in the layers (forward and backward, embedding and
head left out; L layers, width H, context S), so a stage is busy with it for

    t = T / stages / (λ · peak)

and hands on an activation of 2 H bytes; its gradient of 2 H bytes comes back the other way. A link that
carries both directions at once hides behind the computation if it has, each way,

    16 H / t bits per second;

a worker in the middle has two neighbours, so its own line needs twice that. Below it, throughput falls in
proportion. Where the activations do not fit they are computed again (T · 4 / 3, for that side).

Not covered: the bubble, delays, and stages that cannot be equal, all of which `simulate` counts.
"""

from dataclasses import dataclass
from typing import Final

from fusion_dask.planner.catalogue import Gpu, catalogue
from fusion_dask.planner.pool import USABLE
from fusion_dask.planner.shapes import Shape, parameters_of, shape_cost, shape_named

__all__ = [
    "ABSTRACT",
    "ASSUMPTIONS",
    "COMPRESSIONS",
    "LINKS_BITS_PER_S",
    "MODELS",
    "PAPER_SIDE",
    "REFERENCES",
    "Fit",
    "Row",
    "Side",
    "comparable_link_bits_per_s",
    "full_link_bits_per_s",
    "relative_throughput",
    "row",
]

#: Share of the peak that is achieved, on both sides.
ACHIEVED: Final = 0.5
#: Comparable: at least so much of the throughput.
COMPARABLE: Final = 0.75
#: Bytes of a trained number with Adam, its gradient and master copy.
STATE_BYTES: Final = 16
ELEMENT_BYTES: Final = 2
#: FLOPs with recomputation over those without.
RECOMPUTING: Final = 4 / 3
#: How many times smaller boundary tensors become.
COMPRESSIONS: Final = {"none": 1.0, "8 bits": 2.0, "4 bits": 4.0}
LINKS_BITS_PER_S: Final = (8e6, 100e6, 300e6, 1e9, 3e9, 10e9)
MODELS: Final = ("bert-large", "gpt3-xl", "gpt3-6.7b", "gpt3-13b", "gpt3-175b")

ABSTRACT: Final = (
    "50 RTX 3080 against 4 H100",
    "the claim: comparable throughputs, and the H100s are significantly more expensive",
)
ASSUMPTIONS: Final = (
    "peaks: dense fp16 tensor cores with fp32 accumulation, of the makers' data sheets (59.5, 756 and "
    "989 TFLOP/s); the abstract does not say which H100",
    f"both sides reach λ = {ACHIEVED:g} of their peak, and the H100s wait for no link",
    "a uniform pipeline of one stage a GPU; shapes of BERT-Large and GPT-3; embedding and head left out; "
    "attention not halved for causality",
    "boundaries in fp16: 2 bytes times the width, a token and direction; compression to 8 or 4 bits "
    "costs no time and no accuracy",
    "a link carries both directions at once; delays and the bubble are hidden by enough microbatches",
    f"comparable: at least {COMPARABLE:.0%} of the throughput",
    f"memory: {STATE_BYTES} bytes a parameter, 1F1B with one sequence a microbatch, {USABLE:.0%} of a GPU "
    "is usable; where activations do not fit they are computed again, at 4/3 of the FLOPs",
    "prices at launch, power of the boards; hosts, cooling and lines are not counted",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """So many of one GPU."""

    gpu: Gpu
    count: int

    @property
    def flops_per_s(self) -> float:
        """Peak of all."""
        return self.count * self.gpu.fp16_flops_per_s

    @property
    def memory_bytes(self) -> int:
        """Of all."""
        return self.count * self.gpu.memory_bytes

    @property
    def power_w(self) -> float:
        """Of all boards."""
        return self.count * self.gpu.power_w

    @property
    def price_usd(self) -> float:
        """Of all."""
        assert self.gpu.price_usd is not None
        return self.count * self.gpu.price_usd


PAPER_SIDE: Final = Side(gpu=catalogue()["rtx3080"], count=50)
REFERENCES: Final = (
    Side(gpu=catalogue()["h100-pcie"], count=4),
    Side(gpu=catalogue()["h100-sxm"], count=4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model in the memory of one side.

    Attributes:
        need_bytes: Of the fullest GPU; with recomputation where that is needed.
        usable_bytes: Of a GPU.
        recomputes: Activations are computed again.
    """

    need_bytes: float
    usable_bytes: float
    recomputes: bool

    @property
    def fits(self) -> bool:
        """At all."""
        return self.need_bytes <= self.usable_bytes

    @property
    def slowdown(self) -> float:
        """FLOPs over those of the model."""
        return RECOMPUTING if self.recomputes else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A model and a reference.

    Attributes:
        model: Name of the shape.
        reference: The H100s.
        flops_per_token: Forward and backward.
        full_link_bits_per_s: Link that hides behind the computation, each way, without recomputation.
        fit: In the memory of the 50.
        reference_fit: In that of the reference.
        gpus_needed: GPUs of the first kind that would hold its parameters, gradients and optimizer.
        relative: By compression, for each of `LINKS_BITS_PER_S`: throughput over the reference's.
        comparable_link_bits_per_s: By compression, the slowest link of comparable throughput; None
            where no link is fast enough.
    """

    model: str
    reference: Side
    flops_per_token: float
    full_link_bits_per_s: float
    fit: Fit
    reference_fit: Fit
    gpus_needed: int
    relative: dict[str, tuple[float, ...]]
    comparable_link_bits_per_s: dict[str, float | None]


def row(model: str, reference: Side, side: Side = PAPER_SIDE) -> Row:
    """One model against one reference.

    Raises:
        PlanError: There is no shape of that name.
    """
    shape = shape_named(model)
    return Row(
        model=model,
        reference=reference,
        flops_per_token=_flops_per_token(shape),
        full_link_bits_per_s=full_link_bits_per_s(shape, side),
        fit=_fit(shape, side),
        reference_fit=_fit(shape, reference),
        gpus_needed=-(-STATE_BYTES * parameters_of(shape) // int(USABLE * side.gpu.memory_bytes)),
        relative={
            name: tuple(
                relative_throughput(shape, reference, link * factor, side)
                for link in LINKS_BITS_PER_S
            )
            for name, factor in COMPRESSIONS.items()
        },
        comparable_link_bits_per_s={
            name: comparable_link_bits_per_s(shape, reference, factor, side)
            for name, factor in COMPRESSIONS.items()
        },
    )


def full_link_bits_per_s(shape: Shape, side: Side = PAPER_SIDE) -> float:
    """What each direction of a link needs, not to slow a uniform pipeline down.

    >>> round(full_link_bits_per_s(shape_named("gpt3-13b")) / 1e9, 1)
    1.5
    """
    return _bits_per_token(shape) / _stage_s(shape, side)


def relative_throughput(
    shape: Shape, reference: Side, link_bits_per_s: float, side: Side = PAPER_SIDE
) -> float:
    """Tokens per second over the reference's, each side recomputing where it has to."""
    token_s = max(_unlinked_token_s(shape, side), _bits_per_token(shape) / link_bits_per_s)
    return _unlinked_token_s(shape, reference) / token_s


def comparable_link_bits_per_s(
    shape: Shape, reference: Side, compression: float = 1.0, side: Side = PAPER_SIDE
) -> float | None:
    """The slowest link of comparable throughput, or None where the GPUs are too slow for any."""
    if relative_throughput(shape, reference, float("inf"), side) < COMPARABLE:
        return None
    token_s = _unlinked_token_s(shape, reference) / COMPARABLE
    return _bits_per_token(shape) / compression / token_s


def _unlinked_token_s(shape: Shape, side: Side) -> float:
    """Seconds a token where no link is waited for."""
    return _stage_s(shape, side) * _fit(shape, side).slowdown


def _flops_per_token(shape: Shape) -> float:
    cost = shape_cost(shape)
    layers = cost.blocks[1:-1]
    return sum(b.forward_flops + b.backward_flops for b in layers) / cost.tokens


def _stage_s(shape: Shape, side: Side) -> float:
    """Seconds that a stage needs for a token."""
    return _flops_per_token(shape) / side.count / (ACHIEVED * side.gpu.fp16_flops_per_s)


def _bits_per_token(shape: Shape) -> float:
    """Each way."""
    return 8.0 * ELEMENT_BYTES * shape.width


def _fit(shape: Shape, side: Side) -> Fit:
    """Of the first stage, which holds the most microbatches: as many as there are stages."""
    cost = shape_cost(shape)
    state = STATE_BYTES * parameters_of(shape) / side.count
    saved = sum(b.saved_bytes for b in cost.blocks[1:-1]) / side.count
    boundary = float(cost.tokens * ELEMENT_BYTES * shape.width)
    usable = USABLE * side.gpu.memory_bytes
    plain = state + side.count * (saved + 2 * boundary)
    if plain <= usable:
        return Fit(need_bytes=plain, usable_bytes=usable, recomputes=False)
    recomputing = state + side.count * boundary + saved + boundary
    return Fit(need_bytes=recomputing, usable_bytes=usable, recomputes=True)
