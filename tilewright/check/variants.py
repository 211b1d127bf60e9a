"""Which compiled variants an op needs: the launches of representative calls, made on tensors without memory.

The calls come from the declaration: `inputs(draw)` at the sizes that are benchmarked and at awkward ones, every choice of
every option, every optional tensor, dtypes, layouts, formats, gradients together and one by one. Triton itself binds the
arguments of each launch, so that a variant here is the one that the call would compile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

import tilewright as tw

from ..core.draw import Draw
from ..core.nest import labels, leaves
from ..core.signature import Row
from ..core.target import TARGETS, Target, pretend
from ..op import Op
from ..runtime.kernel import Kernel, Wanted, collect
from ..runtime.results import flatten, saved_results
from ..toolchain.aot import Compiled, compile_for, fingerprint, gpu_target
from . import layouts
from .cases import dims_of, formats, holds, row_arguments

COMMON = {"tokens": 8192, "experts": 8, "batch": 2, "length": 4096, "heads": 32, "head_dim": 128, "columns": 4096}
HOT = (
    {**COMMON, "hidden": 2048, "vocab": 157184},
    {**COMMON, "hidden": 4096, "vocab": 151936},
    {**COMMON, "hidden": 7168, "vocab": 32000},
)
MANY = {**HOT[0], "experts": 256}  # of the ops that draw experts
FEW = {**HOT[0], "tokens": 16}
ODD = {**COMMON, "tokens": 101, "hidden": 130, "columns": 77, "vocab": 50257, "batch": 3, "length": 67}
WIDE = {**COMMON, "tokens": 130, "hidden": 20000, "vocab": 2**20}
LONG = {**COMMON, "tokens": 1000, "hidden": 16384, "vocab": 16384, "experts": 256}
LOW = torch.bfloat16


class Plain(Draw):
    """A draw of the plainest call. An option that is not fixed takes the op's default, or else its first choice; optional
    tensors are all there or all absent."""

    def __init__(
        self,
        op: Op,
        dims: Mapping[str, int],
        options: Mapping[str, Any] | None = None,
        *,
        full: bool = False,
        seed: int = 0,
        dtype: torch.dtype = LOW,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(seed, dims, options, dtype=dtype, device=device)
        self.full = full
        self.defaults = {p.name: p.default for p in op.signature.parameters}
        self.choices: dict[str, tuple] = {}
        self.optional: list[str] = []

    def option(self, name: str, *choices: Any) -> Any:
        self.choices[name] = choices
        default = self.defaults.get(name)
        return self.options.setdefault(name, default if default in choices else choices[0])

    def together(self, *rows: Mapping[str, Any]) -> None:
        """Each option is as it would be alone."""

    def maybe(self, name: str, make: Callable[[], Any]) -> Any:
        self.optional.append(name)
        return make() if self.options.setdefault(name, self.full) else None


class Blank(Plain):
    """The same of shapes and dtypes alone."""

    def __init__(self, op: Op, dims: Mapping[str, int], options: Mapping[str, Any] | None = None, **settings: Any):
        super().__init__(op, dims, options, **settings)
        self.device = torch.device("meta")

    def tensor(self, *dims: str | int, dtype: torch.dtype | None = None, **_: float) -> Tensor:
        return torch.empty(self._shape(dims), dtype=dtype or self.dtype, device=self.device)

    def uniform(self, *dims: str | int, dtype: torch.dtype | None = None, **_: float) -> Tensor:
        return self.tensor(*dims, dtype=dtype)

    def integers(self, *dims: str | int, dtype: torch.dtype = torch.int64, **_: int) -> Tensor:
        return self.tensor(*dims, dtype=dtype)


@dataclass(frozen=True)
class Call:
    """Arguments of an op, the names whose gradients are wanted (None: all), and what its backward takes beside them."""

    values: dict[str, Any]
    gradients: frozenset[str] | None = None
    extra: dict[str, Any] = field(default_factory=dict)


FORWARD = frozenset()


def drawn(op: Op, dims: Mapping[str, int], **settings: Any) -> dict[str, Any]:
    """Arguments of an op as its `inputs` draws them."""
    return op.inputs(Blank(op, dims, **settings))


def hot_calls(op: Op) -> Iterator[Call]:
    """What the library is made for: none of these may spill."""
    source = Blank(op, HOT[0])
    op.inputs(source)
    routed = routed_options(op, source.optional)
    settings = [{}, {"full": True}, *([{"options": routed}] if 0 < len(routed) < len(source.optional) else [])]
    for dims in (*HOT, *([MANY] if "experts" in dims_of(op) else [])):
        for setting in settings:
            yield Call(drawn(op, dims, **setting))
            yield from in_hot_formats(op, drawn(op, dims, **setting))


def routed_options(op: Op, optional: Iterable[str]) -> dict[str, bool]:
    """The optional tensors of rows that are grouped by expert, each with a number of its own, its router's probability; none of
    an op whose rows are never grouped, or always."""
    rules = {p.name: p.rule for p in op.signature.parameters}
    if op.groups not in optional:
        return {}
    return {n: True for n in optional if n == op.groups or (rules[n].leading and not rules[n].dims)}


def calls(op: Op) -> Iterator[Call]:
    """Hot calls fully, everything else once."""
    yield from hot_calls(op)
    yield Call(drawn(op, FEW))
    yield from few_of_each_kind(op)
    for dims in (ODD, WIDE):
        yield Call(drawn(op, dims, full=True))
        for fmt in formats(op, "meta")[:1]:
            yield Call({**drawn(op, dims, full=True), "out_format": fmt}, FORWARD)
    for dtype in (torch.float16, torch.float32):
        yield Call(drawn(op, HOT[0], dtype=dtype, full=True))
    yield longest_rows(op)
    yield from options_one_by_one(op)
    yield from in_every_format(op)
    for layout in (layouts.transposed, layouts.one_further):
        values = drawn(op, HOT[0], full=True)
        moved = {n: layout(t) for n, t in row_arguments(op, op.signature.bind((), values)).items()}
        yield Call({**values, **{n: t for n, t in moved.items() if t is not None}})
    for name in op.differentiable:
        yield Call(drawn(op, HOT[0], full=True), frozenset((name,)))


def in_every_format(op: Op) -> Iterator[Call]:
    """A result in each format that it can be had in, by turns of a call without and with optional tensors; without them where
    these are groups of rows, which a format may not have."""
    for i, fmt in enumerate(formats(op, "meta")):
        for full in (bool(i % 2), False):
            values = drawn(op, HOT[0], full=full)
            if holds(op, fmt, values):
                yield Call({**values, "out_format": fmt}, FORWARD)
                break


def few_of_each_kind(op: Op) -> Iterator[Call]:
    """Few rows of each kind of operands that a product draws: these may have kernels of their own."""
    source = Blank(op, FEW)
    op.inputs(source)
    for name, choices in source.choices.items() if op.cost.flops is not None else ():
        if name not in op.signature.names:
            yield from (Call(drawn(op, FEW, options={name: choice})) for choice in dict.fromkeys(choices))


def longest_rows(op: Op) -> Call:
    """The longest rows that one program holds, in the widest type: where shared memory runs out first."""
    return Call(drawn(op, LONG, dtype=torch.float32, full=True))


def hardest(op: Op) -> list[Call]:
    """Calls that ask most of a chip's shared memory."""
    return [longest_rows(op), *([Call(drawn(op, MANY))] if "experts" in dims_of(op) else [])]


def in_hot_formats(op: Op, values: dict[str, Any]) -> Iterator[Call]:
    """Blockwise FP8 both ways and row-wise: of a result, and of a gradient to a backward that can quantise it."""
    backwards = [one.backward for one in op.implementations if one.backward is not None]
    quantises = any("grad_format" in inspect.signature(b).parameters for b in backwards)
    rules = {p.name: p.rule for p in op.signature.parameters}
    matrices = [name for name in op.differentiable if rules[name].leading and rules[name].dims]
    for ways in ("both", "row"):
        fmt = tw.fp8("1x128", ways=ways)
        if "out_format" in op.signature.names and op.cost.flops is None:  # products have variants enough
            yield Call({**values, "out_format": fmt}, FORWARD)
        if quantises and sum(values.get(name) is not None for name in matrices) == 1:  # two have no one gradient
            yield Call(values, extra={"grad_format": fmt})


def kept_back(op: Op, arch: str) -> Iterator[Call]:
    """Hot calls by the names of implementations that stand before the one that is taken, and would do: they wait to be measured."""
    for full in (False, True) if op.asks is not None else ():
        values = drawn(op, HOT[0], full=full)
        with pretend(TARGETS[arch]), tw.force("triton"):
            bound = op.signature.bind((), values)
            before = op.implementations[: op.implementations.index(op.implementation(bound))]
            for one in before:
                named = SimpleNamespace(**{**bound, op.asks: one.name, "out": None})
                if not one.library and one.takes(TARGETS[arch], named):
                    yield Call({**values, op.asks: one.name})


def options_one_by_one(op: Op) -> Iterator[Call]:
    """Each choice of an option among all optional tensors, each optional tensor alone, each argument that is not drawn."""
    source = Blank(op, HOT[0], full=True)
    values = op.inputs(source)
    for name, choices in source.choices.items():
        for choice in choices:
            if choice != source.options[name]:
                yield Call(drawn(op, HOT[0], options={name: choice}, full=True))
    for name in source.optional:
        yield Call(drawn(op, HOT[0], options={name: True}))
    first = next((t for t in values.values() if isinstance(t, Tensor)), None)
    for p in op.signature.parameters:
        if p.name in values or p.name == "out_format":
            continue
        if isinstance(p.rule, Row) and p.rule.leading and not p.rule.dims:
            dtype = getattr(torch, p.rule.dtype, torch.float32)
            yield Call({**values, p.name: torch.empty(first.shape[:-1], dtype=dtype, device="meta")})
        elif p.kind is bool:
            yield Call({**values, p.name: not p.default})


def passes(op: Op, call: Call, target: Target) -> tuple[list[Wanted], list[Wanted]]:
    """What a call and its backward would launch on a chip."""
    forward, backward, _ = passes_and_results(op, call, target)
    return forward, backward


def passes_and_results(op: Op, call: Call, target: Target) -> tuple[list[Wanted], list[Wanted], tuple[Tensor, ...]]:
    """The same, and the tensors that the call gives, without memory."""
    values = op.signature.bind((), call.values)
    there = {n for n in op.differentiable if isinstance(values[n], Tensor) and values[n].is_floating_point()}
    needs = frozenset(there if call.gradients is None else there & call.gradients)
    with pretend(target), tw.force("triton"), torch.no_grad():
        with collect() as forward:
            op.validate(values)
            flat = flatten(op.run(values, needs))
        results = saved_results(op, flat)
        one = op.implementation({**values, **results})
        with collect() as backward:
            if needs and one.backward is not None:
                grads = [torch.empty(flat[i].shape, dtype=flat[i].dtype, device="meta") for i in op.graded(values)]
                one.backward(SimpleNamespace(**{**values, **results}, needs=needs), *grads, **call.extra)
    return forward, backward, tuple(flat)


def launches(op: Op, call: Call, arch: str = "sm_90") -> list[Wanted]:
    """Both passes of a call on a chip."""
    forward, backward = passes(op, call, TARGETS[arch])
    return forward + backward


# ---------------------------------------------------------------- variants


@dataclass(frozen=True)
class Variant:
    """One kernel as Triton compiles it for one chip."""

    kernel: Kernel
    arch: str
    types: dict[str, str | tuple]  # of the arguments that are left at run time; a tuple's are those of what lies in it
    divisible: frozenset[str]  # those among them that are multiples of 16
    constants: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """All that it depends on but the chip."""
        words = [f"{n}:{t}{'/16' * (n in self.divisible)}" for n, t in named(self.types).items() if t != "constexpr"]
        words += [f"{n}={_show(v)}" for n, v in self.constants.items() if v is not None]
        words += [f"{n}={v}" for n, v in sorted(self.options.items())]
        return " ".join([self.kernel.name, *words])

    def compile(self) -> Compiled:
        return compile_for(
            self.kernel.jit, self.types, self.constants, self.arch, divisible=self.divisible, **self.options
        )

    def fingerprint(self) -> str:
        """What the machine code follows from, at a tenth of the price of making it."""
        return fingerprint(
            self.kernel.jit, self.types, self.constants, self.arch, divisible=self.divisible, **self.options
        )


def _show(value: Any) -> str:
    if hasattr(value, "__name__"):
        return f"{value.__module__.rpartition('.')[2]}.{value.__name__}"
    return str(value).replace(" ", "")


@cache
def _binder(kernel: Kernel, arch: str) -> Callable[..., tuple]:
    jit = kernel.jit
    return create_function_from_signature(jit.signature, jit.params, make_backend(gpu_target(arch)))


def variant(wanted: Wanted, arch: str = "sm_90") -> Variant:
    """The variant that a launch needs."""
    kernel = wanted.kernel
    bound, read, _ = _binder(kernel, arch)(*wanted.ordered)
    kinds = {name: kind for name, (kind, _) in zip(bound, read)}
    facts = named({name: fact for name, (_, fact) in zip(bound, read)})
    # A compile-time argument may be a tuple, and a tuple of the launch may hold what is constant: 1, None
    whole = {name: bound[name] for name, kind in kinds.items() if kind == "constexpr"}
    types = {name: kind for name, kind in kinds.items() if name not in whole}
    values, flat = named({name: bound[name] for name in types}), named(types)
    divisible = frozenset(name for name, kind in flat.items() if kind != "constexpr" and "D" in str(facts[name] or ""))
    inside = {name: values[name] for name, kind in flat.items() if kind == "constexpr"}
    return Variant(kernel, arch, types, divisible, {**whole, **inside}, wanted.options)


def named(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments, and in the place of tuples what lies in them, as `WAY.codes` or `SOURCE.0`."""
    return {
        label: leaf
        for name, value in arguments.items()
        for (_, leaf), label in zip(leaves((value,)), labels(name, value).values())
    }


def needed(op: Op, which: Iterable[Call], arch: str = "sm_90") -> tuple[Variant, ...]:
    """All variants that calls of an op need on a chip, by name."""
    found = [variant(wanted, arch) for call in which for wanted in launches(op, call, arch)]
    by_name = {one.name: one for one in found}
    return tuple(by_name[name] for name in sorted(by_name))


def is_gluon(kernel: Kernel) -> bool:
    """Gluon kernels are written for one chip; they have a Triton sibling for all others."""
    return kernel.jit.is_gluon()
