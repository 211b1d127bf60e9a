"""`Declaration`: what an op says of itself. It is data, and what follows from data alone; nothing here launches or registers.

* `reference` is a few lines of PyTorch; its signature and docstring are the op's.
* `inputs(draw)` makes arguments for it, by name.
* Each of `implementations` has a `forward` that takes the reference's arguments by name and returns what it returns, and perhaps a
  `backward(saved, *grads)` that returns one gradient per name in `differentiable`. `saved` holds every argument by name (tensors
  not in `saves` are None), the results named in `saves`, and `needs`, the names whose gradient is wanted.
* `where` says what arguments may be (`signature.py`), and `check` what rows of it cannot say.
* The last `hidden` results are for the backward alone: the caller does not get them.
* `resume(saved)` gives the reference's arguments from which the rest of a result that was rounded on the way follows.
* `shape_only(values)` names arguments of which this call's backward reads shape and dtype alone: they are not kept alive.
* `in_place` names arguments that `out` may be: each of their elements is read by what then writes it.
* `overwrites` names the flag, if there is one, that lets the backward write over an argument: eager calls alone take it.
* `groups` names the argument or the result that holds the end rows of groups, if rows come in groups.
* `asks` names the argument, if there is one, by which a call asks for an implementation: "auto", or an implementation's name.
* `sibling` names the op, if there is one, whose kernels these are too: this is a second public form over them.
* `composite` says that host code calls other ops, or torch's own products: it runs every time, unwatched (`runtime/plan.py`),
  unless it is `planned`: then where it can, and is small enough for the host to matter, it becomes one plan. Its `forward` also
  takes `needs`, the names whose gradient is known to be wanted (none in a registered op, which is not told), and may keep more in
  its hidden results for them.
* `any_format` says that results can be had in every format, not only in those that kernels make as they store (`Format.fused`).
* `cost` counts the bytes a call must move, where they are not those of its arguments and results; `flops` counts the
  multiplications and additions of a matrix product, forward.
* `sharded` takes the calls that have DTensors among their tensors.
* `bars` says how near to the truth results must come (`check/oracle.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .flat import as_tuple, flattened, given_tensors, in_words, mapped
from .format import Format, Quantized
from .signature import Range, Signature, clashing, overlapping, same_memory, self_overlapping
from .target import Target

PIECES = 8  # tensors of a quantised result beside its carrier, in what a registered op returns (`runtime/results.py`)


@dataclass(frozen=True)
class Triton:
    """One implementation: host code that launches kernels. `when(target, values)` is pure over chip, dtypes, shapes, strides
    and format; the first implementation whose `when` holds is taken."""

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    when: Callable[[Target, SimpleNamespace], bool] | None = None
    name: str = "triton"
    library: bool = False  # host code that calls torch's own product instead: no kernel of ours


def upcast(x: Tensor) -> Tensor:
    """x in float32, but a float64 x as it is. References are written with this, so that they are exact oracles in float64."""
    return x if x.dtype == torch.float64 else x.float()


def single(target: Target, a: SimpleNamespace) -> bool:
    """Whether no argument is float64: the `when` of kernels that compute in fp32."""
    return all(t.dtype != torch.float64 for t in given_tensors(vars(a)))


class Declaration:
    """What one op says of itself; the module's docstring has every part of it."""

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        inputs: Callable[..., dict[str, Any]],
        *implementations: Triton,
        where: Mapping[str, str | Range],
        results: tuple[str, ...] = ("out",),
        differentiable: tuple[str, ...] = (),
        graded_results: tuple[int, ...] = (0,),
        saves: tuple[str, ...] | None = None,
        resume: Callable[[SimpleNamespace], dict[str, Any]] | None = None,
        hidden: int = 0,
        any_format: bool = False,
        in_place: tuple[str, ...] = (),
        overwrites: str | None = None,
        groups: str | None = None,
        asks: str | None = None,
        sibling: str | None = None,
        check: Callable[..., None] | None = None,
        cost: Callable[..., tuple[int, int]] | None = None,
        flops: Callable[..., int] | None = None,
        shape_only: Callable[[Mapping[str, Any]], tuple[str, ...]] | None = None,
        bars: Mapping[str, Any] | None = None,
        sharded: Callable[..., Any] | None = None,
        composite: bool = False,
        planned: bool | None = None,
    ) -> None:
        self.name, self.reference, self.inputs, self.implementations = name, reference, inputs, implementations
        self.signature = Signature.of(name, reference, where, check, groups)
        known = {*self.signature.names, *results}
        for what, word in (("groups", groups), ("asks", asks), ("overwrites", overwrites)):
            if word is not None and word not in known:
                raise ValueError(f"{name}: {what} names {word}, which is neither an argument nor a result")
        self.results, self.hidden, self.overwrites, self.cost, self.bars = (
            results,
            hidden,
            overwrites,
            cost,
            dict(bars or {}),
        )
        self.differentiable, self.graded_results = differentiable, graded_results
        self.saves = self.signature.tensors if saves is None else saves
        # Results that the backward wants, counted from the end: only the first can be several tensors
        self.saved_results = {n: i - len(results) for i, n in enumerate(results) if n in self.saves}
        self.resume, self.sharded, self.shape_only, self.composite = resume, sharded, shape_only, composite
        self.flops, self.in_place, self.any_format = flops, in_place, any_format
        self.groups, self.asks, self.sibling = groups, asks, sibling
        self.planned = not composite if planned is None else planned
        self.__doc__ = reference.__doc__

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    # ---------------------------------------------------------------- arguments

    def validate(self, values: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError naming the first argument that is not what it should be."""
        self.signature.validate(values)
        wanted = values.get("out_format")
        if wanted is not None and not (self.any_format or wanted.fused):
            raise ValueError(f"{self.name}: out_format {wanted} is not made here: quantize the plain result")
        out = values.get("out")
        if out is None:
            return
        if isinstance(out, (list, tuple)):
            self._check_outs(out, values)
            return
        for piece in flattened(out):
            if piece is not None:
                self._check_out(piece, values)

    def _check_out(self, out: Tensor, values: Mapping[str, Any]) -> None:
        if self_overlapping(out):
            raise ValueError(f"{self.name}: out has elements that share memory")
        for name in self.signature.tensors:
            if values[name] is None or (name in self.in_place and same_memory(out, values[name])):
                continue
            if overlapping(out, values[name]):
                raise ValueError(f"{self.name}: out shares memory with {name}")

    def _check_outs(self, outs: list[Tensor], values: Mapping[str, Any]) -> None:
        """A list of results may be written over the list of arguments that it is like, tensor by tensor, and over nothing
        else."""
        rule = next(p.rule for p in self.signature.parameters if p.name == "out")
        for i, out in enumerate(outs):
            if not out.is_contiguous() and self_overlapping(out):
                raise ValueError(f"{self.name}: out[{i}] has elements that share memory")
        over = [same_memory(a, b) for a, b in zip(outs, values[rule.dtype])]
        rest = [t for t, same in zip(values[rule.dtype], over) if not same]
        rest += [t for n in self.signature.tensors if n != rule.dtype for t in given_tensors({n: values[n]})]
        if clashing(outs, rest):
            raise ValueError(f"{self.name}: out shares memory within itself, or with other arguments than its own")

    def explain(self, values: Mapping[str, Any]) -> str:
        """Which implementations there are and what these arguments look like, in one line."""
        seen = {k: in_words(v) for k, v in values.items() if v is not None}
        return f"tried {[one.name for one in self.implementations]} on {seen}"

    def formats(self) -> list[str]:
        """The names of formats that the result can be had in."""
        if "out_format" not in self.signature.names:
            return []
        return sorted(name for name, one in Format.known.items() if one.fused or self.any_format)

    # ---------------------------------------------------------------- results

    def public(self, results: Any) -> Any:
        """The results that the caller gets: those that are not hidden, as a tuple unless there is one."""
        if not isinstance(results, tuple):
            return results
        given = results[: len(results) - self.hidden]
        return given[0] if len(given) == 1 else given

    def graded(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """The places among the registered op's results at which gradients arrive; that of a quantised result is its carrier."""
        if values.get("out_format") is None:
            return self.graded_results
        return tuple(i if i == 0 else i + PIECES for i in self.graded_results)

    def run_reference(self, values: Mapping[str, Any]) -> Any:
        """Run the reference as an implementation: results are contiguous, and `out` is filled if it is given."""
        values = dict(values)
        out = values.pop("out", None)
        if "out" in self.signature.names:
            values["out"] = None
        results = mapped(lambda t: t.contiguous(), self.reference(**values))
        if out is None:
            return results
        for there, here in zip(flattened(out), flattened(as_tuple(results)[0])):
            if here is not None:
                there.copy_(here)
        return (out, *results[1:]) if isinstance(results, tuple) else out

    def reference_backward(self, saved: SimpleNamespace, grads: list[Tensor | None]) -> tuple:
        """The backward of the reference by autograd, which is the op's backward on a CPU."""
        values = self.resume(saved) if self.resume else vars(saved)
        values = {n: values[n] for n in self.signature.names}
        wanted = [n for n in self.differentiable if n in saved.needs]
        for n in wanted:
            values[n] = values[n].detach().requires_grad_()
        with torch.enable_grad():
            made = as_tuple(self.reference(**values))
        pairs = [(made[i], g) for i, g in zip(self.graded_results, grads) if g is not None and made[i].requires_grad]
        found = torch.autograd.grad(
            [r for r, _ in pairs], [values[n] for n in wanted], [g for _, g in pairs], allow_unused=True
        )
        by_name = dict(zip(wanted, found))
        return tuple(by_name.get(n) for n in self.differentiable)


def is_foreign(tensor: Tensor) -> bool:
    """Whether a tensor is of a subclass that this library does not know: torch's dispatcher takes such calls."""
    return type(tensor) not in PLAIN and not isinstance(tensor, Quantized)


PLAIN = {Tensor, torch.nn.Parameter}
