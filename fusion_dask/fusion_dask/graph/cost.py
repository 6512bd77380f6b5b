"""FLOPs and memory of a graph, known before anything is computed.

Covers: the costs of every operator (`annotate`) and the peak memory of a stage (`stage_memory`).
FLOPs count as `torch.utils.flop_counter` does: matrix products, convolutions and attention, the
latter without halving for causality. Element-wise operators count zero; a time model adds their
bytes.

Invariant: a byte is counted once: a view costs nothing, the first operator that saves a storage
pays for it, and parameters are never counted as activations.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fusion_dask.graph.infer import leaves
from fusion_dask.graph.ir import Cost, Graph, Kind, Operator, StageProgram, Value
from fusion_dask.graph.profile import Layout, OperatorProfile, Profiler

__all__ = ["StageMemory", "annotate", "stage_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak memory of a stage, in bytes.

    Attributes:
        parameters: Parameters, buffers and constants.
        gradients: One gradient for each trainable parameter.
        optimizer: State of the optimizer.
        saved: What the microbatches in flight keep for their backward.
        working: What one forward or backward needs on top while it runs.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    working: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.saved + self.working


def annotate(graph: Graph) -> Graph:
    """The graph with the cost of every operator for one microbatch."""
    trace = _trace(graph, ())
    return replace(
        graph,
        operators=tuple(
            replace(operator, cost=cost)
            for operator, cost in zip(graph.operators, trace.costs, strict=True)
        ),
    )


def stage_memory(
    program: StageProgram, *, microbatches_in_flight: int, optimizer_bytes_per_parameter: float
) -> StageMemory:
    """Peak memory of a stage in training.

    Args:
        program: The stage.
        microbatches_in_flight: Forwards whose backward is still to come; in 1F1B the number of
            stages from this one to the last.
        optimizer_bytes_per_parameter: Per trainable number: 8 for Adam with float32 moments.
    """
    received = [value for port in program.receives for value in port.values]
    trace = _trace(program, received)
    trainable = [p for p in program.parameters if p.trainable]
    gradients = sum(p.spec.bytes for p in trainable)
    kept = trace.kept_bytes({v.name for port in program.sends for v in port.values})
    fixed = sum(b.spec.bytes for b in program.buffers)
    fixed += sum(c.spec.bytes for c in program.constants)
    return StageMemory(
        parameters=program.parameter_bytes + fixed,
        gradients=gradients,
        optimizer=int(optimizer_bytes_per_parameter * sum(p.spec.numel for p in trainable)),
        saved=kept * microbatches_in_flight,
        working=max(0, _peak(program, trace) - kept),
    )


@dataclass(slots=True)
class _Trace:
    """Symbolic memory of one forward: which storage each value lies in, and who saves what."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    storage: dict[str, int] = field(default_factory=dict)
    size: list[int] = field(default_factory=list)
    permanent: set[int] = field(default_factory=set)
    received: set[int] = field(default_factory=set)
    saved_by: list[frozenset[int]] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)

    def new_storage(self, size: int) -> int:
        self.size.append(size)
        return len(self.size) - 1

    def kept_bytes(self, sent: Iterable[str]) -> int:
        """Bytes that one microbatch keeps from forward to backward."""
        kept: set[int] = set(self.received)
        kept.update(*self.saved_by)
        kept.update(self.storage[name] for name in sent if name in self.storage)
        return sum(self.size[s] for s in kept - self.permanent)


def _trace(program: Graph | StageProgram, received: Iterable[Value]) -> _Trace:
    trace = _Trace()
    arriving = list(received)
    inputs = {v.name for v in program.inputs}
    trained = {p.name for p in program.parameters if p.trainable}
    graded = trained | {v.name for v in arriving if v.grad}
    for leaf in leaves(program, arriving):
        trace.layouts[leaf.name] = Layout.contiguous(leaf.spec, grad=leaf.name in graded)
        trace.storage[leaf.name] = storage = trace.new_storage(leaf.spec.bytes)
        if leaf.name in {v.name for v in arriving}:
            trace.received.add(storage)
        elif leaf.name not in inputs:
            trace.permanent.add(storage)
    profiler = Profiler()
    paid: set[int] = set(trace.permanent)
    for operator in program.operators:
        profile = profiler.profile(operator, trace.layouts, track=operator.kind is not Kind.FREE)
        saved = _place(operator, profile, trace)
        trace.saved_by.append(saved)
        trace.costs.append(
            Cost(
                flops_forward=profile.flops_forward,
                flops_backward=profile.flops_backward,
                saved_bytes=sum(trace.size[s] for s in saved - paid),
            )
        )
        paid |= saved
    return trace


def _place(operator: Operator, profile: OperatorProfile, trace: _Trace) -> frozenset[int]:
    """Give the outputs their storages; return those that the operator saves."""
    sources = [trace.storage[name] for name in operator.inputs]
    constant = operator.kind is Kind.FREE and set(sources) <= trace.permanent
    made = []
    for value, layout, view, size in zip(
        operator.outputs, profile.outputs, profile.views, profile.output_bytes, strict=True
    ):
        storage = trace.new_storage(size) if view is None else sources[view]
        if constant:
            trace.permanent.add(storage)  # made once, for all microbatches
        made.append(storage)
        if value is not None:
            trace.layouts[value.name] = layout
            trace.storage[value.name] = storage
    saved = {sources[i] for i in profile.saved_inputs} | {made[i] for i in profile.saved_outputs}
    if profile.saved_inside:
        saved.add(trace.new_storage(profile.saved_inside))
    return frozenset(saved - trace.permanent)


def _peak(program: StageProgram, trace: _Trace) -> int:
    """Most bytes of one microbatch alive at once, its kept ones included."""
    return max(_forward_peak(program, trace), _backward_peak(program, trace))


def _last_reads(program: StageProgram, trace: _Trace) -> Mapping[int, int]:
    """For each storage the last operator that reads it, by position."""
    found: dict[int, int] = {}
    for position, operator in enumerate(program.operators):
        for name in operator.inputs:
            found[trace.storage[name]] = position
    return found


def _forward_peak(program: StageProgram, trace: _Trace) -> int:
    last = _last_reads(program, trace)
    forever = set(trace.received).union(*trace.saved_by)
    forever.update(trace.storage[v.name] for port in program.sends for v in port.values)
    live: set[int] = set(trace.received)
    peak = 0
    for position, operator in enumerate(program.operators):
        live.update(trace.storage[v.name] for v in operator.outputs if v is not None)
        live |= trace.saved_by[position]
        live -= trace.permanent
        peak = max(peak, sum(trace.size[s] for s in live))
        gone = {s for s in live if last.get(s, position) <= position and s not in forever}
        live -= gone
    return peak


def _backward_peak(program: StageProgram, trace: _Trace) -> int:
    """Walk the operators backwards: saved storages go, gradients of values come and go."""
    holders: dict[int, int] = {}
    for saved in trace.saved_by:
        for storage in saved:
            holders[storage] = holders.get(storage, 0) + 1
    sent = {trace.storage[v.name] for port in program.sends for v in port.values}
    kept = (set(holders) | trace.received | sent) - trace.permanent
    held = sum(trace.size[s] for s in kept)
    pinned = trace.received | sent
    parameters = {p.name: p.spec.bytes for p in program.parameters if p.trainable}
    gradients = {v.name: v.spec.bytes for port in program.sends for v in port.values if v.grad}
    peak = held + sum(gradients.values())
    for position in reversed(range(len(program.operators))):
        operator = program.operators[position]
        outputs = [v for v in operator.outputs if v is not None and v.grad]
        if not outputs:
            continue
        for value in outputs:
            gradients.setdefault(value.name, value.spec.bytes)
        gradients.update(
            (name, trace.layouts[name].spec.bytes)
            for name in operator.inputs
            if trace.layouts[name].grad and name not in parameters
        )
        fresh = sum(parameters[n] for n in operator.inputs if n in parameters)
        peak = max(peak, held + fresh + sum(gradients.values()))
        for value in outputs:
            gradients.pop(value.name, None)
        for storage in trace.saved_by[position]:
            holders[storage] -= 1
            if not holders[storage] and storage not in pinned:
                held -= trace.size[storage]
    return peak
