"""`Op`: one declaration of one operation. From it come the public function, its CPU path, validation, autograd, the
registered `torch.ops.tilewright.*` op with its fake, cost, tests and the catalogue entry.

    rms_norm = Op("rms_norm", reference, inputs, Triton(forward, backward), where={...}, differentiable=("x", "weight"))

* `reference` is a few lines of PyTorch; its signature and docstring are the op's.
* `forward` takes the reference's arguments by name and returns what it returns.
* `backward(saved, *grads)` returns one gradient per name in `differentiable`; `saved` holds every argument by name (tensors not
  in `saves` are None), the results named in `saves`, and `needs`, the names whose gradient is wanted.
* `aux` results, the last ones, are kept for the backward and not handed to the caller.
* `composite` says that host code calls other ops, or torch's own products: it runs every time, unwatched (`plan.py`), unless it is
  `planned`: then where it can, and is small enough for the host to matter (`LIGHT`), it becomes one plan. Its `forward` also
  takes `needs`, the names whose gradient is known to be wanted (none in a registered op, which is not told), and may keep more
  in its aux results for them.
* `spares(values)` names arguments of which this call's backward reads shape and dtype alone: they are not kept alive.
* `flops` counts the multiplications and additions of an op that is a matrix product, forward; its rates are then measured.
* `sharded` takes the calls that have DTensors among their tensors.
* `any_format` says that results can be had in every format, not only in those that kernels make as they store (`Format.fused`).
* `over` names arguments that `out` may be: each of their elements is read by what then writes it.
* `overwrites` names the flag, if there is one, that lets the backward write over an argument: eager calls alone take it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import call, register
from .flat import as_tuple, flattened, given_tensors, in_words, mapped, plain_tensors, taken_apart, wants_grad
from .format import Format, Quantized
from .plan import Plan, Recorder
from .signature import Range, Signature, clashing, overlapping, same_memory, self_overlapping
from .target import Target

OPS: dict[str, Op] = {}
# `flops` up to which a composite becomes a plan. While one is recorded no memory is given back, which is much in large calls; there
# the host, which takes 1 to 3 ms, waits for the device anyway
LIGHT = 2e12
PLANS = 4096  # plans kept per op and direction; dropped all at once when full, so memory stays bounded
_compile_only: ContextVar[bool] = ContextVar("compile_only", default=False)


def upcast(x: Tensor) -> Tensor:
    """float64 stays float64, everything else becomes float32: references are written with this, so that they are exact
    oracles in float64."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class Triton:
    """One implementation: host code that launches kernels. `when(target, values)` is pure over chip, dtypes, shapes, strides
    and format; the first implementation whose `when` holds is taken."""

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    when: Callable[[Target, SimpleNamespace], bool] | None = None
    name: str = "triton"
    library: bool = False  # host code that calls torch's own product instead: no kernel of ours


def single(target: Target, a: SimpleNamespace) -> bool:
    """The `when` of kernels that compute in fp32: no argument is float64."""
    return all(t.dtype != torch.float64 for t in given_tensors(vars(a)))


def last_backward() -> bool:
    """Whether this is a backward after which nothing reads what was saved for it, so that it may be written over."""
    return not torch._C._autograd._get_current_graph_task_keep_graph()


@contextlib.contextmanager
def force(name: str) -> Iterator[None]:
    """`force("reference")` takes the reference on any device; `force("triton")` takes kernels of ours, never a library's, and
    runs them on CPU tensors through the interpreter (a process with TRITON_INTERPRET=1); any other implementation's name
    takes that one where it applies."""
    token = call.forced.set(name)
    try:
        yield
    finally:
        call.forced.reset(token)


def warmup(function: Callable, *args: Any, backward: bool = True, **kwargs: Any) -> None:
    """Compile all kernels that `function(*args, **kwargs)` and its backward need, launching none of them."""
    op = getattr(function, "op", function)
    if not isinstance(op, Op):
        raise TypeError(f"warmup: function must be an operation of tilewright's, got {type(function).__name__}")
    token = _compile_only.set(True)
    try:
        values = op.signature.bind(args, kwargs)
        op.validate(values)
        one = op.implementation(values)
        if one is None:  # the reference has nothing to compile
            return
        needs = frozenset(n for n in op.differentiable if backward and values[n] is not None)
        flat = register.flatten(op.run(values, needs))
        if needs and one.backward is not None:
            grads = [torch.empty(flat[i].shape, dtype=flat[i].dtype, device=flat[i].device) for i in op.graded(values)]
            op.run_backward(values, register.saved_results(op, flat), grads, needs)
    finally:
        _compile_only.reset(token)


class Op:
    """See the module. Calling an op is calling its `function`."""

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
        aux: int = 0,
        any_format: bool = False,
        over: tuple[str, ...] = (),
        overwrites: str | None = None,
        check: Callable[..., None] | None = None,
        cost: Callable[..., tuple[int, int]] | None = None,
        flops: Callable[..., int] | None = None,
        spares: Callable[[Mapping[str, Any]], tuple[str, ...]] | None = None,
        bars: Mapping[str, Any] | None = None,
        sharded: Callable[..., Any] | None = None,
        composite: bool = False,
        planned: bool | None = None,
    ) -> None:
        self.name, self.reference, self.inputs, self.implementations = name, reference, inputs, implementations
        self.signature = Signature.of(name, reference, where, check)
        self.results, self.aux, self.overwrites, self.cost, self.bars = results, aux, overwrites, cost, dict(bars or {})
        self.differentiable, self.graded_results = differentiable, graded_results
        self.saves = self.signature.tensors if saves is None else saves
        self.held = frozenset((*self.signature.tensors, "out"))  # what autograd keeps, or nobody
        # Results that the backward wants, counted from the end: only the first can be several tensors
        self.kept = {n: i - len(results) for i, n in enumerate(results) if n in self.saves}
        self.resume, self.sharded, self.spares, self.composite = resume, sharded, spares, composite
        self.flops, self.over, self.any_format = flops, over, any_format
        self.planned = not composite if planned is None else planned
        self.hopeless: set[tuple] = set()  # keys of composite calls that made no plan
        self.__doc__ = reference.__doc__
        self.plans: dict[tuple, tuple[Plan, Callable | None, tuple[int, ...], bool]] = {}
        self.backward_plans: dict[tuple, tuple[Plan, Callable]] = {}
        self.function = call.public(self)
        register.register(self)
        OPS[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    # ---------------------------------------------------------------- calling

    def dispatch(self, args: tuple, kwargs: Mapping[str, Any], key: tuple | None = None, slots: Any = None) -> Any:
        """A call that no plan answered. The plan it makes, over `slots`, is kept under `key` unless that is None."""
        values = self.signature.bind(args, kwargs)
        tensors = given_tensors(values)
        foreign = any(type(t) not in call.PLAIN and not isinstance(t, Quantized) for t in tensors)
        if foreign or call.modes() or call.transforms():
            if self.sharded is not None and any(hasattr(t, "device_mesh") for t in tensors):
                return self.sharded(**values)
            return register.call(self, values)
        self.validate(values)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            return self._differentiable(values, key, slots)
        return self.record(values, key, self._slots(values) if slots is None else slots, whole=False)

    def validate(self, values: Mapping[str, Any]) -> None:
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
            if values[name] is None or (name in self.over and same_memory(out, values[name])):
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

    def implementation(self, values: Mapping[str, Any], device: torch.device | None = None) -> Triton | None:
        """The implementation for these arguments; None is the reference. On a GPU nothing matching raises."""
        if self.signature.lists:
            given = given_tensors(values)
            if not given:
                return None  # empty lists are on no device
            device = device or given[0].device
        device = device or next(v.device for v in values.values() if isinstance(v, Tensor))
        asked = values.get("backend", "auto")
        forced = call.forced.get() if asked == "auto" else asked  # what a call asks for comes first
        if forced == "reference" or (device.type != "cuda" and forced is None):
            return None
        target = Target.at(device)
        space = SimpleNamespace(**values)
        others = []
        for one in self.implementations:
            if (one.library and device.type == "cpu") or not (one.when is None or one.when(target, space)):
                continue
            if not one.library if forced == "triton" else forced in (None, one.name):
                return one
            others.append(one.name)
        what = ("implementation" if asked == "auto" else "backend") + (f" {forced}" if others else "")
        tried = self.explain(values) + (f"; {', '.join(others)} would do" if others else "")
        raise RuntimeError(f"{self.name}: no {what} for these arguments on {target.arch}: {tried}")

    def formats(self) -> list[str]:
        """The names of formats that the result can be had in."""
        if "out_format" not in self.signature.names:
            return []
        return sorted(name for name, one in Format.known.items() if one.fused or self.any_format)

    def explain(self, values: Mapping[str, Any]) -> str:
        """Which implementations there are and what these arguments look like, in one line."""
        seen = {k: in_words(v) for k, v in values.items() if v is not None}
        return f"tried {[one.name for one in self.implementations]} on {seen}"

    def run(self, values: dict[str, Any], needs: frozenset = frozenset()) -> Any:
        """All results (aux too) for validated arguments, no autograd: by a plan if there is one, else recording one. `needs`:
        whose gradients are known to be wanted."""
        outer = Recorder.active()
        one = self.implementation(values) if outer is not None and outer.watch else None
        if one is not None:
            return self._forward(one, values, needs)  # a step of that op's plan
        key = call.Key()
        keyed = self.planned and key.add((*values.values(), needs))
        parts = ("all results", *key.parts) if keyed else None
        found = self.plans.get(parts) if keyed else None
        if found is None or _compile_only.get():
            slots = key.slots if keyed else self._slots(values)
            return self.record(values, parts, slots, whole=True, needs=needs)
        plan, restore, written, _ = found
        results = plan(key.slots, key.addresses)
        for at in written:
            torch.autograd.graph.increment_version(key.slots[at])
        return results if restore is None else restore(results)

    def record(
        self,
        values: dict[str, Any],
        key: tuple | None,
        slots: list[Tensor],
        whole: bool,
        needs: frozenset = frozenset(),
    ) -> Any:
        """Run the host code; keep the plan of it under `key`, over `slots`, the call's tensors in the order in which later
        calls will give theirs. `whole`: give all results, not only the caller's."""
        with torch.no_grad():
            one = self.implementation(values)
            if one is None:
                results = self.run_reference(values)
                return results if whole else self.public(results)
            watch = self._watched(key, values)
            with Recorder(slots, _compile_only.get(), watch) as recorder:
                results = self._forward(one, values, needs)
            written = self._written(values, slots)
            flat, restore = taken_apart(results)
            single = isinstance(results, Tensor)

            def finish(flat: Any) -> Any:
                made = restore(flat)[0] if single else restore(flat)
                return made if whole else self.public(made)

            plan = recorder.plan(flat) if key is not None and not recorder.compile_only else None
            if plan is not None:
                if len(self.plans) >= PLANS:
                    self.plans.clear()
                # A plan's one tensor is the result as it is
                self.plans[key] = plan, None if plan.single and single else finish, written, whole
            elif watch and not recorder.compile_only:
                self._give_up(key)
            for at in written:
                torch.autograd.graph.increment_version(slots[at])
            if self.signature.listed and values["out"] is not None:
                torch.autograd.graph.increment_version(values["out"])
            return results if whole else self.public(results)

    def _forward(self, one: Triton, values: Mapping[str, Any], needs: frozenset) -> Any:
        return one.forward(**values, **({"needs": needs} if self.composite else {}))

    def _watched(self, key: tuple | None, values: Mapping[str, Any]) -> bool:
        """Whether a run may become a plan; a composite is not tried twice, for watching costs more than its launches."""
        if not self.composite:
            return True
        return self.planned and key is not None and key not in self.hopeless and self.flops(**values) < LIGHT

    def _give_up(self, key: tuple | None) -> None:
        if self.composite:
            if len(self.hopeless) >= PLANS:
                self.hopeless.clear()
            self.hopeless.add(key)

    def run_reference(self, values: Mapping[str, Any]) -> Any:
        """The reference as an implementation: contiguous results, `out` filled if given."""
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

    def _slots(self, values: Mapping[str, Any]) -> list[Tensor]:
        """What a recorder watches: nothing in an op over lists, which makes no plan and may have thousands of tensors."""
        return [] if self.signature.lists else plain_tensors(values)

    def _written(self, values: Mapping[str, Any], inputs: list[Tensor]) -> tuple[int, ...]:
        """Which of the inputs this call writes."""
        if self.signature.lists:
            return ()
        written = [piece for piece in flattened(values.get("out")) if piece is not None]
        return tuple(i for i, t in enumerate(inputs) if any(t is w for w in written))

    # ---------------------------------------------------------------- results, flat and public

    def public(self, results: Any) -> Any:
        """What the caller gets of all results: without the aux ones, and bare if it is one."""
        if not isinstance(results, tuple):
            return results
        kept = results[: len(results) - self.aux]
        return kept[0] if len(kept) == 1 else kept

    def graded(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """Where in the registered op's results gradients arrive: a quantised one's at its carrier."""
        if values.get("out_format") is None:
            return self.graded_results
        return tuple(i if i == 0 else i + register.PIECES for i in self.graded_results)

    # ---------------------------------------------------------------- autograd

    def _differentiable(self, values: dict[str, Any], key: tuple | None, slots: list[Tensor] | None) -> Any:
        """A validated call that wants gradients. Its plan is kept under `key`, so that the next one like it comes to `taped`
        at once: unless the backward is to write over an argument, for what validation says of that is not in a key."""
        if values.get("out") is not None:
            raise ValueError(f"{self.name}: out cannot be given when a gradient is wanted")
        bad = [n for n in self.signature.tensors if n not in self.differentiable and wants_grad(values[n])]
        if bad:
            detached = f"{bad[0]}.detach()" if isinstance(values[bad[0]], Tensor) else "detached tensors"
            raise ValueError(f"{self.name}: there is no gradient for {bad[0]}: pass {detached}")
        one = self.implementation(values)
        if one is None:
            return self.public(mapped(lambda t: t.contiguous(), self.reference(**values)))
        if one.backward is None:
            raise RuntimeError(f"{self.name}: implementation {one.name} has no backward; use torch.no_grad()")
        needs = frozenset(n for n in self.differentiable if wants_grad(values[n]))
        if key is None or values.get(self.overwrites):
            return self.taped(values, self.run(values, needs))
        return self.taped(values, self.record(values, key, slots, whole=True, needs=needs))

    def taped(self, values: dict[str, Any], results: Any) -> Any:
        """What the caller gets of all results, with the backward of this call behind them."""
        tensors = [values[n] for n in self.signature.tensors]
        made = as_tuple(results)  # a bare tensor would be an argument to autograd, and its result a view of it
        return self.public(register.unflatten(self, values, _tape(self, values, made, *tensors)))

    def run_backward(
        self,
        values: Mapping[str, Any],
        results: Mapping[str, Tensor],
        grads: list[Tensor | None],
        needs: frozenset,
        **extra: Any,
    ) -> tuple:
        """Gradients for `differentiable`, None where not needed. `extra` is passed on (a composite's `grad_format`)."""
        outer, key = Recorder.active(), call.Key()
        nested = outer is not None and outer.watch
        keyed = not nested and self.planned
        keyed = keyed and key.add((*values.values(), *results.values(), *grads, needs, *extra.values()))
        parts = tuple(key.parts) if keyed else None
        plan = self.backward_plans.get(parts) if keyed else None
        if plan is not None and not _compile_only.get():
            replay, restore = plan
            return restore(replay(key.slots, key.addresses))
        with torch.no_grad():
            together = {**values, **results}
            one = self.implementation(together, next(g.device for g in grads if g is not None))
            saved = SimpleNamespace(**together, needs=needs)
            if one is None:
                return self._reference_backward(saved, grads)
            if nested:
                return one.backward(saved, *grads, **extra)  # a step of that op's plan
            slots = key.slots if keyed else plain_tensors({**together, **dict(enumerate(grads))})
            watch = self._watched(parts, values)
            with Recorder(slots, _compile_only.get(), watch) as recorder:
                out = one.backward(saved, *grads, **extra)
            flat, restore = taken_apart(tuple(out))
            made = recorder.plan(flat) if keyed and not recorder.compile_only else None
            if made is not None and not values.get(self.overwrites):
                if len(self.backward_plans) >= PLANS:
                    self.backward_plans.clear()
                self.backward_plans[parts] = made, restore
            elif made is None and watch and not recorder.compile_only:
                self._give_up(parts)
            return tuple(out)

    def _reference_backward(self, saved: SimpleNamespace, grads: list[Tensor | None]) -> tuple:
        """The reference under autograd: the fallback backward on a CPU."""
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


class _Apply(torch.autograd.Function):
    """The one autograd function: the tape behind results that are there already. They become flat; a quantised one is led by a
    carrier for the gradient."""

    @staticmethod
    def forward(ctx: Any, op: Op, values: dict[str, Any], results: tuple, *tensors: Tensor | None) -> tuple:
        flat = register.flatten(results)
        register.setup(ctx, op, values, flat)
        ctx.forced = call.forced.get()
        return flat

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        # What `once_differentiable` does is needed in a backward that is itself recorded; in others it costs 5 us for nothing
        return _backward_once(ctx, *grads) if torch.is_grad_enabled() else _Apply.gradients(ctx, *grads)

    @staticmethod
    def gradients(ctx: Any, *grads: Tensor | None) -> tuple:
        needs = frozenset(itertools.compress(ctx.op.signature.tensors, ctx.needs_input_grad[3:]))
        token = call.forced.set(ctx.forced)  # autograd may run this in a thread of its own
        try:
            return (None, None, None, *register.backward(ctx, grads, needs, register.eager))
        finally:
            call.forced.reset(token)


_backward_once = once_differentiable(_Apply.gradients)
# `_Apply.apply` without the search for transforms of functorch, which never come this far: 4 us of each call
_tape = super(torch.autograd.Function, _Apply).apply
