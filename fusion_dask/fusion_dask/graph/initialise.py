"""Initial values by name: recorded from the model's own rules, replayed on any worker.

`record` runs each module's own reset rules without letting them write: the in-place operations on
parameters become `InitStep`s, and the tensors stay as they are (they may be on meta). `initialise`
replays the steps with a generator seeded by (seed, name).

Invariant: a value depends on the seed, the name, the shape and the steps; not on the partition,
the order, or the device. It differs from what the eager constructor would draw from a global
generator, in bits and not in distribution.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_dask.errors import CaptureError
from fusion_dask.graph.ir import Buffer, InitStep, Parameter

__all__ = ["INIT_OPS", "Steps", "initialisable", "initialise", "record", "storage_key"]

Steps = tuple[InitStep, ...]

INIT_OPS: Mapping[str, int] = {
    "normal_": 2,
    "uniform_": 2,
    "exponential_": 1,
    "trunc_normal_": 4,
    "orthogonal_": 1,
    "eye_": 0,
    "dirac_": 1,
    "fill_": 1,
    "mul_": 1,
    "add_": 1,
    "clamp_": 2,
    "erfinv_": 0,
}
"""The in-place operations that can be replayed, with their number of arguments."""

_DEFAULTS: Mapping[str, tuple[float, ...]] = {
    "normal_": (0.0, 1.0),
    "uniform_": (0.0, 1.0),
    "exponential_": (1.0,),
    "clamp_": (float("-inf"), float("inf")),
}
_OVERWRITES = frozenset(INIT_OPS) - {"mul_", "add_", "clamp_", "erfinv_"}
_WHOLE = frozenset({"trunc_normal_", "orthogonal_", "eye_", "dirac_"})
"""Functions of torch.nn.init that read what they write; recorded as calls, not as operations."""


def storage_key(tensor: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are the same memory in the same layout, on meta too."""
    storage = tensor.untyped_storage()._cdata
    return (storage, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))


def record(module: nn.Module) -> dict[str, Steps]:
    """The initialisation of every parameter and buffer for which the model has a rule.

    Rules are `reset_parameters` of each submodule and, over that, `_init_weights` as
    `transformers` models have it. A parameter that has no rule but holds one repeated number gets
    that number. What is missing from the result, or empty, cannot be initialised by name.
    """
    recorder = _Recorder(module)
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        _forget_loaded(module),
        recorder,
        recorder.whole_functions(),
    ):
        _apply_resets(module)
        _apply_init_weights(module, None)
    return recorder.result()


def initialisable(part: Parameter | Buffer) -> bool:
    """Whether its initial value can be made from its name and the seed."""
    steps = part.init
    if isinstance(part, Buffer) and part.data:
        return True
    return bool(steps) and steps[0].rows is None and steps[0].op in _OVERWRITES


def initialise(
    parameters: Iterable[Parameter | Buffer], seed: int, *, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Make initial values, by name.

    Args:
        parameters: Parameters or buffers of a graph or of a stage program.
        seed: Seed of the run.
        device: Where the values go. They are drawn on the CPU, so that they are the same anywhere.

    Raises:
        CaptureError: A parameter has no rule that could be recorded; nothing is made.
    """
    wanted = list(parameters)
    missing = [p.name for p in wanted if not initialisable(p)]
    if missing:
        raise CaptureError(
            f"no initialisation is known for {', '.join(missing[:5])}"
            f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}: give the module a "
            "reset_parameters method that fills it with torch.nn.init functions, or start from a "
            "checkpoint"
        )
    return {p.name: _value(p, seed).to(device) for p in wanted}


def _value(part: Parameter | Buffer, seed: int) -> Tensor:
    dtype: torch.dtype = getattr(torch, part.spec.dtype)
    if isinstance(part, Buffer) and part.data:
        return torch.frombuffer(bytearray(part.data), dtype=dtype).reshape(part.spec.shape)
    digest = hashlib.sha256(f"{seed}/{part.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    value = torch.empty(part.spec.shape, dtype=dtype)
    for step in part.init:
        target = value if step.rows is None else value[step.rows[0] : step.rows[1]]
        _apply_step(target, step, generator)
    return value


def _apply_step(target: Tensor, step: InitStep, generator: torch.Generator) -> None:
    if step.op not in INIT_OPS or len(step.args) != INIT_OPS[step.op]:
        raise CaptureError(f"{step.op[:40]!r} is not an initialisation that can be replayed")
    if step.op in _WHOLE:
        _apply_whole(target, step, generator)
        return
    operation = getattr(target, step.op)
    if step.op in ("normal_", "uniform_", "exponential_"):
        operation(*step.args, generator=generator)
    else:
        operation(*step.args)


def _apply_whole(target: Tensor, step: InitStep, generator: torch.Generator) -> None:
    if step.op == "dirac_":
        nn.init.dirac_(target, groups=int(step.args[0]))
    elif step.op == "eye_":
        nn.init.eye_(target)
    elif step.op == "orthogonal_":
        nn.init.orthogonal_(target, gain=step.args[0], generator=generator)
    else:
        mean, std, low, high = step.args
        nn.init.trunc_normal_(target, mean, std, low, high, generator=generator)


@contextmanager
def _forget_loaded(module: nn.Module) -> Iterator[None]:
    """Take away the flags with which `transformers` protects loaded weights from their rules."""
    holders: list[Any] = [*module.modules(), *module.parameters(), *module.buffers()]
    flagged = [h for h in holders if getattr(h, "_is_hf_initialized", False)]
    for holder in flagged:
        holder._is_hf_initialized = False
    try:
        yield
    finally:
        for holder in flagged:
            holder._is_hf_initialized = True


def _apply_resets(module: nn.Module) -> None:
    for child in module.children():
        _apply_resets(child)
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset) and _needs_no_arguments(reset):
            reset()


def _needs_no_arguments(function: Callable[..., object]) -> bool:
    return all(
        p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        for p in inspect.signature(function).parameters.values()
    )


def _apply_init_weights(module: nn.Module, rule: Callable[[nn.Module], object] | None) -> None:
    own = getattr(module, "_init_weights", None)
    rule = own if callable(own) else rule
    for child in module.children():
        _apply_init_weights(child, rule)
    if rule is not None:
        rule(module)


class _Recorder(TorchDispatchMode):
    """Turns in-place operations on the module's tensors into steps instead of running them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = [*module.named_parameters(), *module.named_buffers()]
        self._tensors: dict[str, Tensor] = dict(named)
        self._by_storage = {t.untyped_storage()._cdata: name for name, t in reversed(named)}
        self._steps: dict[str, list[InitStep] | None] = {}

    @contextmanager
    def whole_functions(self) -> Iterator[None]:
        """Record calls of the functions whose operations depend on what they have written."""

        def trunc_normal(
            tensor: Tensor, mean: float, std: float, a: float, b: float, generator: object = None
        ) -> Tensor:
            return self._whole(tensor, "trunc_normal_", mean, std, a, b)

        def orthogonal(tensor: Tensor, gain: float = 1, generator: object = None) -> Tensor:
            return self._whole(tensor, "orthogonal_", gain)

        replacements: dict[str, Callable[..., Tensor]] = {
            "_no_grad_trunc_normal_": trunc_normal,
            "orthogonal_": orthogonal,
            "eye_": lambda tensor: self._whole(tensor, "eye_"),
            "dirac_": lambda tensor, groups=1: self._whole(tensor, "dirac_", groups),
        }
        originals = {name: getattr(nn.init, name) for name in replacements}
        for name, function in replacements.items():
            setattr(nn.init, name, function)
        try:
            yield
        finally:
            for name, function in originals.items():
                setattr(nn.init, name, function)

    def _whole(self, tensor: Tensor, op: str, *args: float) -> Tensor:
        name = self._by_storage.get(tensor.untyped_storage()._cdata)
        if name is not None:
            rows = _rows(self._tensors[name], tensor)
            step = InitStep(op=op, args=tuple(map(float, args)))
            self._steps[name] = [step] if rows is None else None
        return tensor

    def result(self) -> dict[str, Steps]:
        found = {name: tuple(steps or ()) for name, steps in self._steps.items()}
        for name, tensor in self._tensors.items():
            if name not in found and (uniform := _uniform_value(tensor)) is not None:
                found[name] = (InitStep(op="fill_", args=(uniform,)),)
        return found

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own signature
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        written = [
            value
            for argument, value in _arguments(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        owners = [
            self._by_storage.get(w.untyped_storage()._cdata)
            for w in written
            if isinstance(w, Tensor)
        ]
        if not any(owners):
            return func(*args, **kwargs)
        if len(written) == 1 and owners[0] is not None:
            self._note(owners[0], written[0], func, args, kwargs)
        else:
            for owner in filter(None, owners):
                self._steps[owner] = None
        return written[0]

    def _note(
        self,
        name: str,
        target: Tensor,
        func: Any,  # noqa: ANN401
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        step = _step(self._tensors[name], target, func, args, kwargs)
        if step is None:
            self._steps[name] = None
        elif step.op in _OVERWRITES and step.rows is None:
            self._steps[name] = [step]
        else:
            steps = self._steps.setdefault(name, [])
            if steps is not None:
                steps.append(step)


def _arguments(
    func: Any,  # noqa: ANN401
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Iterator[tuple[Any, Any]]:
    for i, argument in enumerate(func._schema.arguments):
        if i < len(args):
            yield argument, args[i]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _step(
    whole: Tensor,
    target: Tensor,
    func: Any,  # noqa: ANN401
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> InitStep | None:
    """The step that an in-place call amounts to, or None if it cannot be replayed."""
    name = func._schema.name.removeprefix("aten::")
    values = [v for a, v in _arguments(func, args, kwargs) if a.name != "generator"][1:]
    if name == "zero_":
        name, values = "fill_", [0.0]
    if name == "copy_":
        source = values[0]
        uniform = _uniform_value(source) if isinstance(source, Tensor) else None
        name, values = "fill_", [uniform]
    if name not in INIT_OPS:
        return None
    if name in ("add_",) and kwargs.get("alpha", 1) != 1:
        return None
    defaults = _DEFAULTS.get(name, ())
    values = values[: INIT_OPS[name]]
    values += [None] * (INIT_OPS[name] - len(values))
    values = [defaults[i] if v is None and i < len(defaults) else v for i, v in enumerate(values)]
    values = [_uniform_value(v) if isinstance(v, Tensor) and v.numel() == 1 else v for v in values]
    rows = _rows(whole, target)
    if rows is False or not all(isinstance(v, int | float) for v in values):
        return None
    return InitStep(op=name, args=tuple(float(v) for v in values), rows=rows)


def _rows(whole: Tensor, target: Tensor) -> tuple[int, int] | Literal[False] | None:
    """Row range of a view of a tensor: None for all of it, False if it is not a row range."""
    if target.numel() == whole.numel():
        return None
    row = whole.numel() // whole.shape[0] if whole.dim() and whole.shape[0] else 0
    offset = target.storage_offset() - whole.storage_offset()
    if not row or offset % row or target.numel() % row or not target.is_contiguous():
        return False
    return (offset // row, (offset + target.numel()) // row)


def _uniform_value(tensor: Tensor) -> float | None:
    """The number that all elements equal, if there is one and it is known."""
    if tensor.is_meta or tensor.numel() == 0 or tensor.is_complex():
        return None
    tensor = tensor.detach()
    first = tensor.reshape(-1)[0]
    return float(first) if bool((tensor == first).all()) else None
