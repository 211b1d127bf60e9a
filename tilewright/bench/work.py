"""From a case to calls: arguments drawn by the op's own `inputs`, the call to time, what it must move, whether it is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

import tilewright as tw

from ..check.oracle import leaves
from ..check.variants import Blank, Plain
from ..core.cost import tensor_bytes, traffic
from ..core.format import Format, Quantized
from ..core.target import Target, pretend
from ..op import Op, force
from ..runtime.kernel import Wanted, collect
from ..runtime.results import flatten, saved_results
from . import check, replaced
from .cases import CODED, Case
from .programs import PROGRAMS, Program

REPLACED = "aten"  # whose cases are calls of torch's operators


def build(case: Case, seed: int = 0, device: str = "cuda") -> Work | replaced.Replaced | Program:
    """One buffer set of a case."""
    if case.op in PROGRAMS:
        return PROGRAMS[case.op](case, seed, device)
    return (replaced.Replaced if case.op == REPLACED else Work).build(case, seed, device)


def arguments(case: Case, draw: Plain) -> dict[str, Any]:
    """The arguments of a case by name."""
    op: Op = tw.catalogue()[case.op]
    values = op.signature.bind((), op.inputs(draw))
    for name, value in case.arguments.items():
        values[name] = format_of(value, draw) if name == "out_format" else value
    return values


def format_of(text: str, draw: Plain) -> Format:
    """The format of a canonical string, a static one with a scale that leaves normal numbers some way below the largest code."""
    given = draw.tensor(1, dtype=torch.float32, scale=0.0, shift=0.0625) if text.endswith(":static") else None
    return Format.parse(text, given)


@dataclass
class Work:
    """One buffer set of a case and what can be done with it."""

    case: Case
    values: dict[str, Any]
    grads: tuple[Tensor, ...] = ()
    _kept: dict[str, Tensor] = field(default_factory=dict)  # what a call writes over, as it was

    @staticmethod
    def build(case: Case, seed: int = 0, device: str = "cuda") -> Work:
        op: Op = tw.catalogue()[case.op]
        draw = Plain(op, case.dims, case.options, seed=seed, device=device, dtype=getattr(torch, case.dtype))
        work = Work(case, arguments(case, draw))
        written = op.writes if case.way != "over" else tuple(n for n in lain_on(op, work.values) if n is not None)
        work._kept = {n: work.values[n].clone() for n in written if work.values[n] is not None}
        if case.direction == "backward":
            work._prepare_backward(seed, device)
        if work.steps:
            work._leaves = leaves(op, work.values)
            work._prepare_step(seed, device)
        return work

    def by(self, **given: Any) -> Work:
        """The same work with other arguments of these names: another implementation's."""
        other = Work(self.case, {**self.values, **given}, _kept=self._kept)
        device = next(v.device.type for v in self.values.values() if isinstance(v, Tensor))
        if self.case.direction == "backward":
            other._prepare_backward(0, device)
        if self.steps:
            other._leaves = leaves(self.op, other.values)
        other.grads = self.grads
        return other

    @property
    def op(self) -> Op:
        return tw.catalogue()[self.case.op]

    @property
    def flops(self) -> Callable[..., float] | None:
        """The size of a matrix product; None for what is none."""
        return self.op.cost.flops

    @property
    def coarse(self) -> bool:
        return self.case.way in CODED or check.is_coarse(self.op, self.values)

    @property
    def steps(self) -> bool:
        """Whether a call is a forward and its backward."""
        return "step" in (self.case.direction, self.case.way)

    def _prepare_backward(self, seed: int, device: str) -> None:
        op = self.op
        # What the backward writes over is put back from here before every timed call
        self._kept = {n: self.values[n].clone() for n in op.differentiable[:1]} if self.overwrites else {}
        results = flatten(op.run(self.values))
        source = torch.Generator(device).manual_seed(seed + 1)
        self.grads = tuple(
            torch.randn(results[i].shape, generator=source, device=device).to(results[i].dtype)
            for i in op.graded(self.values)
        )
        dropped = set(op.signature.tensors) - set(op.saves)
        self._saved = {n: None if n in dropped else v for n, v in self.values.items()}
        for n in () if op.shape_only is None else op.shape_only(self.values):  # of these a backward reads no element
            if self._saved[n] is not None:
                self._saved[n] = self._saved[n].new_empty(1).expand(self._saved[n].shape)
        self._results = saved_results(op, results)
        self._needs = frozenset(n for n in op.differentiable if self.values[n] is not None)

    def _prepare_step(self, seed: int, device: str) -> None:
        with torch.no_grad():
            result = self.op.function(**self.values)
        if result.dim():  # no loss: its gradient is another
            source = torch.Generator(device).manual_seed(seed + 1)
            self.grads = (torch.randn(result.shape, generator=source, device=device).to(result.dtype),)

    @property
    def overwrites(self) -> bool:
        """Whether a call, or the backward alone, writes over an argument: the next call then has another."""
        return (
            bool(self.op.writes)
            or self.case.way == "over"
            or (self.op.overwrites is not None and bool(self.values.get(self.op.overwrites)))
        )

    @cached_property
    def call(self) -> Callable[[], Any]:
        """What is timed: the public function, or the backward alone with autograd left out."""
        op, values = self.op, self.values
        if self.steps:
            leading, rest = self.as_written(self.given)
            return self.stepped(lambda: op.function(*leading, **rest))
        if self.case.way == "quantised":
            return self._of_quantised()
        if self.case.way in CODED:
            return self._by_codes()
        if self.case.direction != "backward":
            return self.forward(values)
        extra = {"grad_format": Format.parse(self.case.grad_format)} if self.case.grad_format else {}
        saved, results, grads, needs = self._saved, self._results, list(self.grads), self._needs
        return lambda: op.run_backward(saved, results, grads, needs, **extra)

    def as_written(self, values: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
        """Arguments as somebody writes them: leading tensors by position, and by name what is not the default."""
        names, defaults = self.op.signature.names, self.op.signature.defaults
        count = next((i for i, n in enumerate(names) if type(values[n]) is not Tensor), len(names))
        leading = [values[n] for n in names[: min(count, self.op.signature.positional)]]
        return leading, {n: values[n] for n in names[len(leading) :] if values[n] is not defaults[n]}

    def forward(self, values: Mapping[str, Any]) -> Callable[[], Any]:
        """A call of the public function as somebody writes it."""
        op, function = self.op, self.op.function
        leading, rest = self.as_written(values)
        if self.case.way == "out":
            rest["out"] = torch.empty_like(function(*leading, **rest))
        if self.case.way == "over":
            rest["out"] = tuple(None if n is None else values[n] for n in lain_on(op, values))
        if self.case.ours and any(type(t) is Tensor and t.is_cuda for t in leading):
            return partial(forced, function, *leading, **rest)
        return lambda: function(*leading, **rest)

    def _of_quantised(self) -> Callable[[], Tensor]:
        """A product by `tw.scaled_mm`, or of groups by `tw.grouped_mm`, of the drawn codes as values in 1x128 and 128x128."""
        a, b, scale_a, scale_b = (self.values[n] for n in ("a", "b", "scale_a", "scale_b"))
        dtype = getattr(torch, self.values["out_dtype"])
        grouped = "offsets" in self.values
        first = Quantized.from_tensors(tw.fp8("1x128"), dtype, a.shape, [a, scale_a if grouped else scale_a.t()])
        if grouped:
            weights, offsets = b.mT, self.values["offsets"]
            second = Quantized.from_tensors(tw.fp8("128x128"), dtype, weights.shape, [weights, scale_b.flatten(0, 1)])
            return lambda: tw.grouped_mm(first, second, offsets, transposed_b=True, out_dtype=dtype)
        given = {n: self.values[n] for n in ("bias", "act", "c", "beta", "accumulate", "backend")}
        given = {n: value for n, value in given.items() if value is not self.op.signature.defaults[n]}
        second = Quantized.from_tensors(tw.fp8("128x128", ways="col"), dtype, b.shape, [b.t(), scale_b])
        return lambda: tw.scaled_mm(first, second, out_dtype=dtype, **given)

    def _by_codes(self) -> Callable[[], Tensor]:
        """`tw.attention` by codes, which are made in the call."""
        given = {n: value for n, value in self.values.items() if value is not self.op.signature.defaults.get(n)}
        return partial(tw.attention, **given, math=self.case.way)

    def step(self, function: Callable[..., Any]) -> Callable[[], tuple]:
        """`stepped` of a function of the op's arguments."""
        return self.stepped(partial(function, **self.given))

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of a step, of which some want gradients."""
        return {**same_arguments(self.values), **self._leaves}

    def stepped(self, forward: Callable[[], Any]) -> Callable[[], tuple]:
        """A loss, or a result that is no loss, and its gradients."""
        upstream = self.grads or None

        def call() -> tuple:
            loss = forward()
            return (loss.detach(), *torch.autograd.grad(loss, list(self._leaves.values()), upstream))

        return call

    def restore(self) -> None:
        for name, original in self._kept.items():
            self.values[name].copy_(original)

    def traffic(self, result: Any) -> tuple[int, int]:
        """(bytes read, bytes written) that a call with this result cannot do without."""
        if self.steps:
            return sum(map(tensor_bytes, self.values.values())), sum(map(tensor_bytes, result))
        if self.case.direction != "backward":
            return traffic(self.op, self.values)
        given = (*self._saved.values(), *self._results.values(), *self.grads)
        return sum(map(tensor_bytes, given)), sum(map(tensor_bytes, result))

    def verify(self, result: Any) -> float:
        """The error against float64 truth of a call over the arguments as they were built. Raises `check.Wrong`."""
        before = {**self.values, **self._kept}
        if self.steps:
            error = check.forward(self.op, self.values, result[:1])
            grads = self.grads or (torch.ones_like(result[0]),)
            return max(error, check.backward(self.op, self.values, grads, dict(zip(self._leaves, result[1:]))))
        if self.case.direction != "backward":
            made = result if isinstance(result, tuple) else (result,)
            return check.forward(self.op, before, made, self.values, self.case.way in CODED)
        return check.backward(self.op, before, self.grads, dict(zip(self.op.differentiable, result)), self.overwrites)

    def result_bytes(self, result: Any) -> int:
        made = result if isinstance(result, (tuple, list)) else (result,)
        memory = {t.untyped_storage().data_ptr() for t in self.values.values() if type(t) is Tensor}
        pieces = (t for r in made if r is not None for t in (r.tensors() if isinstance(r, Quantized) else (r,)))
        return sum(tensor_bytes(t) for t in pieces if t.untyped_storage().data_ptr() not in memory)


def lain_on(op: Op, values: Mapping[str, Any]) -> list[str | None]:
    """For each result the argument that it may be stored over; None where there is none."""
    names = (op.out.lies_on.get(result, ()) for result in op.result_rows)
    return [next((n for n in own if values[n] is not None), None) for own in names]


def forced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function that calls an op by kernels of ours, never a library's."""
    with force("triton"):
        return function(*args, **kwargs)


def launches(case: Case, target: Target) -> list[Wanted]:
    """The launches of a case on a chip, found without that chip and without memory. Those of a model are its parts'; a case that
    asks for a library's product has none."""
    if case.parts:
        return [one for part in case.parts for one in launches(replace(case, parts=[], **part), target)]
    if case.op == REPLACED:
        return replaced.launches(case, target)
    op: Op = tw.catalogue()[case.op]
    values = arguments(case, Blank(op, case.dims, case.options, dtype=getattr(torch, case.dtype)))
    if op.asks is not None and values[op.asks] in {one.name for one in op.implementations if one.library}:
        return []
    with pretend(target), force("triton"), torch.no_grad(), collect() as found:
        if case.way in CODED:
            Work(case, values).call()
            return found
        needs = frozenset(n for n in op.differentiable if values[n] is not None)
        results = flatten(op.run(values, needs if case.direction == "step" else frozenset()))
        if case.direction in ("backward", "step"):
            if case.direction == "backward":
                found.clear()
            grads = [torch.empty_like(results[i]) for i in op.graded(values)]
            extra = {"grad_format": Format.parse(case.grad_format)} if case.grad_format else {}
            op.run_backward(values, saved_results(op, results), grads, needs, **extra)
    return found


def same_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as a reference takes them: without memory of the caller's to write to."""
    return {n: v for n, v in values.items() if n != "out"}
