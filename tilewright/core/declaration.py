"""`Declaration`: what an op says of itself. It is data, and what follows from data alone; nothing here launches or registers.

* `reference` is a few lines of PyTorch; its signature and docstring are the op's.
* `inputs(draw)` makes arguments for it, by name.
* Each of `implementations` has a `forward` that takes the reference's arguments by name and returns what it returns, and perhaps a
  `backward(saved, *grads)` that returns one gradient per name in `gradient.of`. `saved` holds every argument by name (tensors
  not in `gradient.saves` are None), the results named there, and `needs`, the names whose gradient is wanted.
* `where` says what arguments may be (`rule.py`), beside their types (`argument.py`), and `check` what rows of it cannot say.
* `results` says what comes out, a row each in the order of the reference: `{"y": "x[... hidden]", "rstd": "wide(x)[...]"}`. Its
  dtype is that of an argument (or the argument, if that is a dtype), `wide(x)` of one (float32, or float64 where x is), or a torch
  dtype's name; its dimensions are those of arguments, numbers among the arguments, what `sizes(arguments)` gives by name, or
  integers. A function of the arguments gives a row that depends on options.
* `hidden` names the results after those, which are for the backward alone: the caller does not get them, and how they look is
  between the implementation's two halves.
* `writes` names the arguments that a call changes. The reference changes nothing: it gives what they become after all results, and
  kernels give the results alone. They have no gradient, nor does the backward see them; in compiled calls nothing else has.
* `out` says where results may be stored and how much of them is there, `gradient` what the backward needs, `cost` what a call must
  do, `bars` how near to the truth it must come.
* `groups` names the argument or the result that holds the end rows of groups, if rows come in groups.
* `asks` names the argument, if there is one, by which a call asks for an implementation: "auto", or an implementation's name.
* `sibling` names the op, if there is one, whose kernels these are too: this is a second public form over them. An `internal` op is
  a part of others, and is listed apart.
* `composite` says that host code calls other ops, or torch's own products: it runs every time, unwatched (`runtime/plan.py`),
  unless it is `planned`: then where it can, and is small enough for the host to matter, it becomes one plan. Its `forward` also
  takes `needs`, the names whose gradient is known to be wanted (none in a registered op, which is not told), and may keep more in
  its hidden results for them.
* `sharding` says which dimensions may be sharded over ranks, and so lets calls take DTensors; a function of the arguments gives it
  where that depends on options. It follows from no row: "..." does not say that what lies there is apart from one another.
* `sharded` takes the calls that have DTensors among their tensors, where no `sharding` says what they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .flat import as_tuple, given_tensors, in_words, mapped
from .format import Format, Quantized
from .outs import check_outs, check_written, groups_of, outs_of, stored
from .signature import Range, Row, Signature
from .target import Target

PIECES = 8  # tensors of a quantised result beside its carrier, in what a registered op returns (`runtime/results.py`)


@dataclass(frozen=True)
class Triton:
    """One implementation: host code that launches kernels.

    `when(target, values)` is pure over chip, dtypes, shapes, strides and format, and sees as `out` what was given for the first
    result; the first implementation whose `when` holds is taken. Memory that a caller gives for results takes the place of what
    `forward` allocates for them, so that it need not know; with `out` it is told, and stores there itself."""

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    when: Callable[[Target, SimpleNamespace], bool] | None = None
    name: str = "triton"
    library: bool = False  # host code that calls torch's own product instead: no kernel of ours
    out: bool = False

    def takes(self, target: Target, values: SimpleNamespace) -> bool:
        return self.when is None or self.when(target, values)


@dataclass(frozen=True)
class Gradient:
    """What the backward gives and needs.

    `of` names the arguments that have a gradient, `through` the results that it comes through (the first, if not said). `saves`
    names the arguments and results that the backward reads (all arguments, if not said); `shape_only(values)` those arguments of
    which this call's reads shape and dtype alone: they are not kept alive. `resume(saved)` gives the reference's arguments from
    which the rest of a result that was rounded on the way follows. `overwrites` names the flag, if there is one, that lets the
    backward write over an argument: eager calls alone take it."""

    of: tuple[str, ...] = ()
    through: tuple[str, ...] | None = None
    saves: tuple[str, ...] | None = None
    shape_only: Callable[[Mapping[str, Any]], tuple[str, ...]] | None = None
    resume: Callable[[SimpleNamespace], dict[str, Any]] | None = None
    overwrites: str | None = None


@dataclass(frozen=True)
class Out:
    """Where results may be stored.

    `lies_on` names, for a result, the arguments whose memory it may be given: each of their elements is read by what then writes
    it. `contiguous` names results whose kernels write rows one after the other: memory that is given for them must be so. `live`
    names, for a dimension of results ("..." is the leading ones), the argument or result that says how much of it is there: end
    rows of groups, of which the last counts, or a count for each index of the dimension before. What results and gradients hold
    beyond is not specified."""

    lies_on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    contiguous: tuple[str, ...] = ()
    live: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """What a call must do. `moved` counts the bytes that it reads and writes, where they are not those of its arguments and
    results; `flops` the multiplications and additions of a matrix product, forward, and `backward` how many times as many its
    backward has. They may read lengths that stand on a device: only measuring asks for them there."""

    moved: Callable[..., tuple[int, int]] | None = None
    flops: Callable[..., int] | None = None
    backward: float = 2.0


@dataclass(frozen=True)
class Part:
    """A smaller call, of which what it gives is a piece of what a larger call gives: its arguments, and by the name of a result or
    of an argument that has a gradient, which piece."""

    arguments: Mapping[str, Any]
    at: Mapping[str, tuple[slice, ...]]


@dataclass(frozen=True)
class Bars:
    """How near to the truth results must come (`check/oracle.py` has the classes).

    `kind` is the class of results, `gradient` that of gradients of row-shaped arguments, `codes` that of results of FP8 arguments;
    `misrounded` is another share of misrounded elements than the class has. `rounds`: the backward goes on from values rounded to
    the dtype of the arguments, or these results do. `whole`: results cannot be cut by rows for a comparison. `steps`: the reference
    rounds to codes on its way, so that it has no finite differences. `twin` is a function of the arguments that gives the value of
    a column-wise operand that is not the row-wise one's; `coarse` says of arguments that they ask for less than that. `felt` names
    the dimensions of results along which a NaN or infinity of an argument may show where a result does not depend on it: its weight
    there is 0, and 0 times NaN is NaN. `drift(arguments, upstream gradients, dtype)` gives by name how far gradients go where the
    backward goes on from a result that was rounded to that dtype. `parts(arguments, gradients)` gives a few parts of a call whose
    truth is too large to be had at once, in which gradients too are pieces if that is asked; none where a call cannot be cut.
    `sensible(arguments)` gives by name the arguments whose numbers mean something only within limits, brought within them: tests
    try data of every kind, and a recurrence that explodes tells nothing."""

    kind: str = "B"
    gradient: str = "H"
    codes: str | None = None
    misrounded: float | None = None
    rounds: bool | tuple[str, ...] = False
    whole: bool = False
    steps: bool = False
    twin: Callable[..., Tensor] | None = None
    coarse: Callable[[Mapping[str, Any]], bool] | None = None
    felt: tuple[str, ...] = ()
    drift: Callable[[Mapping[str, Any], list, torch.dtype], Mapping[str, Tensor]] | None = None
    parts: Callable[[SimpleNamespace, bool], Iterable[Part]] | None = None
    sensible: Callable[[SimpleNamespace], Mapping[str, Tensor]] | None = None


@dataclass(frozen=True)
class Sharding:
    """Which dimensions may be sharded over ranks, where each rank computes its part of the results from its part of the arguments.

    `local` names them; "..." is every leading one. `names` says what a dimension of rows is, of arguments' or results', where its
    name does not: where options order dimensions, or one is cut as another is. Sizes of one dimension may differ: "heads/q" and
    "heads/k" are sharded together. `units` counts what a dimension is made of that is not cut: each rank must have as many.
    Arguments in `once` are added to what is a sum over ranks if it is one, and must then be absent. `mean` names the argument over
    whose rows the first result is a mean. Where it is a mean over something else, `divisor` gives, from a rank's own arguments, its
    part of what the sum is divided by, and `summing` the options with which a rank's call gives its part of the sum. Arguments in
    `summed`, a few numbers, may be `Partial`, and are then summed over ranks. `advice` is for who shards a dimension that is not
    local."""

    local: tuple[str, ...] = ("...",)
    names: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, int] = field(default_factory=dict)
    once: tuple[str, ...] = ()
    mean: str | None = None
    divisor: Callable[[SimpleNamespace], Tensor] | None = None
    summing: Mapping[str, Any] = field(default_factory=dict)
    summed: tuple[str, ...] = ()
    advice: Mapping[str, str] = field(default_factory=dict)


def upcast(x: Tensor) -> Tensor:
    """x in float32, but a float64 x as it is. References are written with this, so that they are exact oracles in float64."""
    return x if x.dtype == torch.float64 else x.float()


class Traced:
    """A `SimpleNamespace` that torch.compile can trace."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def namespace(values: Mapping[str, Any]) -> Any:
    """A call's arguments as attributes, for the functions of them in a declaration."""
    return Traced(values) if torch.compiler.is_compiling() else SimpleNamespace(**values)


def single(target: Target, a: SimpleNamespace) -> bool:
    """Whether no argument is float64: the `when` of kernels that compute in fp32."""
    return all(t.dtype != torch.float64 for t in given_tensors(vars(a)))


PLAIN_GRADIENT, PLAIN_OUT, PLAIN_COST, PLAIN_BARS = Gradient(), Out(), Cost(), Bars()


class Declaration:
    """What one op says of itself; the module's docstring has every part of it."""

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        inputs: Callable[..., dict[str, Any]],
        *implementations: Triton,
        where: Mapping[str, str | Range],
        results: Mapping[str, str | Callable[[SimpleNamespace], str]],
        hidden: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
        sizes: Callable[[SimpleNamespace], Mapping[str, int]] | None = None,
        check: Callable[..., None] | None = None,
        gradient: Gradient = PLAIN_GRADIENT,
        out: Out = PLAIN_OUT,
        cost: Cost = PLAIN_COST,
        bars: Bars = PLAIN_BARS,
        groups: str | None = None,
        asks: str | None = None,
        sibling: str | None = None,
        internal: bool = False,
        sharding: Sharding | Callable[[SimpleNamespace], Sharding] | None = None,
        sharded: Callable[..., Any] | None = None,
        composite: bool = False,
        planned: bool | None = None,
    ) -> None:
        self.name, self.reference, self.inputs, self.implementations = name, reference, inputs, implementations
        self.signature = Signature.of(name, reference, where, check)
        self.result_rows, self.sizes = dict(results), sizes
        for text in results.values():
            if isinstance(text, str) and (Row.parse(text).broadcasts or "|" in text):
                raise ValueError(f"{name}: the result {text!r} must have one dtype and sizes that broadcast to nothing")
        self.results, self.hidden, self.writes = (*results, *hidden), len(hidden), writes
        through = gradient.through if gradient.through is not None else (self.results[:1] if gradient.of else ())
        known = {*self.signature.names, *self.results}
        shards = sharding if isinstance(sharding, Sharding) else Sharding()
        said = [
            ("groups", (groups,)), ("asks", (asks,)), ("gradient.overwrites", (gradient.overwrites,)),
            ("gradient.of", gradient.of), ("gradient.saves", gradient.saves or ()), ("gradient.through", through),
            ("out.lies_on", (*out.lies_on, *(n for names in out.lies_on.values() for n in names))),
            ("out.contiguous", out.contiguous), ("out.live", out.live.values()), ("writes", writes),
            ("sharding", (*shards.once, *shards.summed, *shards.summing, shards.mean)),
        ]  # fmt: skip
        for what, words in said:
            wrong = [word for word in words if word is not None and word not in known]
            if wrong:
                raise ValueError(f"{name}: {what} names {wrong[0]}, which is neither an argument nor a result")
        if {*writes} & {*gradient.of, *(gradient.saves or ())}:
            raise ValueError(f"{name}: an argument that is written has no gradient, and the backward does not see it")
        if sharding is not None and self.signature.lists:
            raise ValueError(f"{name}: an op that takes lists of tensors has no sharding")
        self.gradient, self.out, self.cost, self.bars = gradient, out, cost, bars
        # Flat, since every call reads them
        self.differentiable, self.overwrites = gradient.of, gradient.overwrites
        self.graded_results = tuple(self.results.index(n) for n in through)
        unwritten = tuple(n for n in self.signature.tensors if n not in writes)
        self.saves = unwritten if gradient.saves is None else gradient.saves
        # Results that the backward wants, counted from the end: only the first can be several tensors
        self.saved_results = {n: i - len(self.results) for i, n in enumerate(self.results) if n in self.saves}
        self.resume, self.shape_only = gradient.resume, gradient.shape_only
        self.sharding, self.sharded, self.composite, self.internal = sharding, sharded, composite, internal
        self.groups, self.asks, self.sibling = groups, asks, sibling
        # An op over lists of tensors has no plans: such a list is no part of a key
        self.planned = not (composite or self.signature.lists) if planned is None else planned
        self.__doc__ = reference.__doc__

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    # ---------------------------------------------------------------- arguments

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What the reference takes: all but `out`."""
        return {n: values[n] for n in self.signature.names}

    def validate(self, values: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError naming the first argument that is not what it should be."""
        self.signature.validate(values)
        wanted = values.get("out_format")
        if wanted is not None:
            self.check_format(wanted, values)
        if self.writes:
            check_written(self, values)
        if values.get("out") is not None:
            check_outs(self, values)

    def check_format(self, wanted: Format, values: Mapping[str, Any]) -> None:
        """Raise ValueError if the first result cannot be held in a format."""
        expected = self.expected(values)
        shape, _ = next(iter(expected.values()))
        try:
            wanted.check(shape, groups_of(self, values, expected))
        except ValueError as error:
            why = str(error).removeprefix("y: ")
            raise ValueError(f"{self.name}: out_format cannot hold a result of shape {list(shape)}: {why}") from None

    def expected(self, values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """(shape, dtype) of each result that the caller gets, lists of them where it is a list, for validated arguments."""
        dims, leading = self.signature.dims(values)
        sizes = {} if self.sizes is None else self.sizes(namespace(values))

        def size(name: str) -> int:
            if name.isdigit():
                return int(name)
            for known in (dims, sizes, values):
                if name in known:
                    return known[name]
            raise KeyError(f"{self.name}: {name} is a dimension of no argument, and `sizes` does not give it")

        made = {}
        for name, row in self.rows(values).items():
            wide = row.dtype.startswith("wide(")
            like = values.get(row.dtype[5:-1] if wide else row.dtype)
            if isinstance(like, (list, tuple)):
                made[name] = [t.shape for t in like], [t.dtype for t in like]
                continue
            head = leading if row.leading else ()
            dtype = getattr(torch, row.dtype) if like is None else getattr(like, "dtype", like)
            dtype = torch.float32 if wide and dtype != torch.float64 else dtype
            made[name] = torch.Size((*head, *map(size, row.dims))), dtype
        return made

    def rows(self, values: Mapping[str, Any]) -> dict[str, Row]:
        """The row of each result that the caller gets."""
        space = namespace(values)
        parse = Row.parse.__wrapped__ if torch.compiler.is_compiling() else Row.parse  # which warns of a cache
        return {n: parse(text if isinstance(text, str) else text(space)) for n, text in self.result_rows.items()}

    def explain(self, values: Mapping[str, Any]) -> str:
        """Which implementations there are and what these arguments look like, in one line."""
        seen = {k: in_words(v) for k, v in values.items() if v is not None}
        return f"tried {[one.name for one in self.implementations]} on {seen}"

    def formats(self) -> list[str]:
        """The names of formats that the result can be had in."""
        if "out_format" not in self.signature.names:
            return []
        return sorted(Format.known)

    # ---------------------------------------------------------------- results

    def public(self, results: Any) -> Any:
        """The results that the caller gets: those that are not hidden, as a tuple unless there is one, or None."""
        if not isinstance(results, tuple):
            return results
        given = results[: len(results) - self.hidden]
        return given[0] if len(given) == 1 else given or None

    def graded(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        """The places among the registered op's results at which gradients arrive; that of a quantised result is its carrier."""
        if values.get("out_format") is None:
            return self.graded_results
        return tuple(i if i == 0 else i + PIECES for i in self.graded_results)

    def by_reference(self, values: Mapping[str, Any]) -> Any:
        """What the reference gives. Kernels compute in fp32 under autocast too, and so does it."""
        kind = next((t.device.type for t in given_tensors(values)), "cpu")
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return self.reference(**values)
        with torch.autocast(kind, enabled=False):
            return self.reference(**values)

    def run_reference(self, values: Mapping[str, Any]) -> Any:
        """Run the reference as an implementation: results are contiguous, or in the memory that was given for them, and arguments
        that the op writes are written."""
        results, becomes = self.apart(self.by_reference(self.arguments(values)))
        for name, value in becomes.items():
            if value is not None:
                values[name].copy_(value)
        return stored(mapped(lambda t: t.contiguous(), results), outs_of(self, values))

    def apart(self, made: Any) -> tuple[Any, dict[str, Tensor]]:
        """(all results, what each argument that the op writes becomes) of what the reference gave."""
        if not self.writes:
            return made, {}
        given = as_tuple(made)
        at = len(given) - len(self.writes)
        results = given[:at]
        return results[0] if len(results) == 1 else results, dict(zip(self.writes, given[at:]))

    def reference_backward(self, saved: SimpleNamespace, grads: list[Tensor | None]) -> tuple:
        """The backward of the reference by autograd, which is the op's backward on a CPU."""
        values = self.resume(saved) if self.resume else vars(saved)
        values = {n: values[n] for n in self.signature.names}
        wanted = [n for n in self.differentiable if n in saved.needs]
        for n in wanted:
            values[n] = values[n].detach().requires_grad_()
        with torch.enable_grad():
            made = as_tuple(self.by_reference(values))
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
