"""Our ops in the place of Megatron-Core's functions, at every place where a module holds one of them."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch

from ... import __version__
from ..huggingface.report import Change, PatchReport, Replaced, Skipped
from .functions import FUNCTIONS, Declined, Function

ROLES = tuple(dict.fromkeys(row.role for row in FUNCTIONS))
APPLIED: list[FunctionReport] = []  # one at most


def apply(
    *,
    only: Iterable[str] | None = None,
    modules: bool = False,
    attention: bool = False,
    strict: bool = True,
    packages: Iterable[str] = ("megatron",),
) -> FunctionReport:
    """Replace functions of Megatron-Core by our ops in every module of `packages` that holds them; `remove` takes it back.

    `only` names roles: swiglu, rope, cross_entropy, router, permute, sort_chunks, gradients. Modules that are imported later get
    the replacements from those that define them. A call that an op cannot answer goes to Megatron's own function, and
    `report.fallbacks()` counts it. `modules` replaces its spec providers too: models that are built from then on have norms and
    grouped experts of ours, and keep them; with `attention` the core of their attention too, which is asked for, since its speed
    in models has not been recorded. `strict` raises `ValueError` if a function is missing, or has other parameters than those
    known, and then replaces none.
    """
    chosen = {*ROLES} if only is None else {only} if isinstance(only, str) else {*only}
    if not chosen <= {*ROLES}:
        raise ValueError(f"apply: only must name roles of {', '.join(ROLES)}, got {sorted(chosen - {*ROLES})}")
    if attention and not modules:
        raise ValueError("apply: attention is a module: modules=True is needed for it")
    if APPLIED:
        raise ValueError("apply: Megatron is patched already: remove() first")
    packages = (packages,) if isinstance(packages, str) else tuple(packages)
    report = FunctionReport(known_versions(), packages=packages)
    try:
        replace([row for row in FUNCTIONS if row.role in chosen], report)
        if modules:
            replace_providers(report, attention)
        if strict and (report.skipped or not report.replaced):
            first = report.skipped[0] if report.skipped else None
            why = f"{first.module}: {first.reason}" if first else f"no module of {', '.join(packages)} holds any"
            raise ValueError(f"apply: {why}\n{report}\nstrict=False leaves such functions as they are")
    except Exception:
        report.undo()
        raise
    APPLIED.append(report)
    return report


def remove() -> None:
    """Give Megatron its functions back."""
    if not APPLIED:
        raise ValueError("remove: Megatron is not patched")
    APPLIED[0].undo()


@dataclass(eq=False)
class FunctionReport(PatchReport):
    """`PatchReport` of functions; `fallbacks()` are the calls that went to Megatron's own."""

    packages: tuple[str, ...] = ()
    declined: Counter[tuple[str, str]] = field(default_factory=Counter, repr=False)
    originals: dict[int, tuple[Callable, Callable]] = field(default_factory=dict, repr=False)  # by id: ours, Megatron's

    def count(self, op: str) -> None:
        tally(self.counter, op)

    def fallbacks(self) -> dict[str, int]:
        """How often each function was left to Megatron, and why."""
        return {f"{name}: {reason}": count for (name, reason), count in self.declined.items()}

    def undo(self) -> None:
        """Take back every binding, also those of modules that were imported since."""
        known = {(id(c.module), c.name) for c in self.changes}
        for module, name, value in bindings(self.packages, self.originals):
            if (id(module), name) not in known:
                self.changes.append(Change(module, name, value, self.originals[id(value)][1]))
        super().undo()
        if self in APPLIED:
            APPLIED.remove(self)

    def __str__(self) -> str:
        lines = [f"  {name} left to Megatron {count} times" for name, count in self.fallbacks().items()]
        return "\n".join([super().__str__(), *lines])


def known_versions() -> dict[str, str]:
    try:
        core = importlib.import_module("megatron.core")
    except ModuleNotFoundError:
        raise ImportError("apply: megatron-core is not installed: pip install megatron-core") from None
    found = {"tilewright": __version__, "megatron-core": getattr(core, "__version__", "of unknown version")}
    for name in ("transformer-engine", "torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def replace(rows: list[Function], report: FunctionReport) -> None:
    """Put a replacement over each function that is as the rows have it, and fill the report."""
    found: dict[int, tuple[Function, Callable]] = {}
    for module, name in dict.fromkeys((row.module, row.name) for row in rows):
        same = [row for row in rows if (row.module, row.name) == (module, name)]
        try:
            original = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            report.skipped.append(Skipped(same[0].role, f"{module}.{name}", f"{module} cannot be imported: {error}"))
            continue
        row = next((row for row in same if original is not None and has_parameters(row, original)), None)
        if row is None:
            reason = "there is none" if original is None else f"its parameters are {inspect.signature(original)}"
            report.skipped.append(Skipped(same[0].role, f"{module}.{name}", reason))
            continue
        ours = standing_in(row, original, report)
        found[id(original)] = row, ours
        report.originals[id(ours)] = ours, original
    for module, name, value in [*bindings(report.packages, found)]:
        row, ours = found[id(value)]
        report.set(module, name, ours)
        report.replaced.append(Replaced(row.role, f"{module.__name__}.{name}", row.op))


def replace_providers(report: FunctionReport, attention: bool) -> None:
    """Put ours over the classes that say which modules a model is built of, and over that of its last norm."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer import transformer_block

    from .provider import Base, norm_over, provider_over

    count = report.count
    made = {id(base): provider_over(base, count, attention) for base in {LocalSpecProvider, Base}}
    ops = "rms_norm, grouped_mm, attention" if attention else "rms_norm, grouped_mm"
    for module, name, value in [*bindings(report.packages, made)]:
        report.originals[id(made[id(value)])] = made[id(value)], value
        report.set(module, name, made[id(value)])
        report.replaced.append(Replaced("modules", f"{module.__name__}.{name}", ops))
    report.set(transformer_block, "LayerNormImpl", norm_over(transformer_block.LayerNormImpl, count))
    report.replaced.append(Replaced("modules", f"{transformer_block.__name__}.LayerNormImpl", "rms_norm"))


def has_parameters(row: Function, original: Callable) -> bool:
    """Whether Megatron's function has the parameters, by name and default, that the row knows."""
    theirs, ours = inspect.signature(original).parameters, inspect.signature(row.ours).parameters
    plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in theirs.values())
    named = {*theirs} == {*ours} if row.exact else {*ours} <= {*theirs}
    return plain and named and all(equal(p.default, theirs[name].default) for name, p in ours.items())


def bindings(packages: tuple[str, ...], wanted: dict[int, Any]) -> Iterator[tuple[ModuleType, str, Any]]:
    """(module, name, object) wherever a module of these packages holds one of the objects with these ids."""
    for module_name, module in [*sys.modules.items()]:
        if module_name.partition(".")[0] in packages:
            for name, value in [*getattr(module, "__dict__", {}).items()]:
                if id(value) in wanted:
                    yield module, name, value


def standing_in(row: Function, original: Callable, report: FunctionReport) -> Callable:
    """A function with the signature of the original that calls the op, or the original where the op declines."""
    theirs, ours = inspect.signature(original).parameters, inspect.signature(row.ours).parameters
    names, known = tuple(theirs), {*ours}
    needed = {name for name, p in theirs.items() if p.default is p.empty}

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = {**kwargs, **dict(zip(names, args))}
        if len(args) > len(names) or len(given) < len(args) + len(kwargs) or not needed <= given.keys():
            return original(*args, **kwargs)  # whose error this is
        unknown = {name: given.pop(name) for name in given.keys() - known}
        strange = sorted(n for n, v in unknown.items() if n not in theirs or not equal(v, theirs[n].default))
        made = Declined(f"it was given {', '.join(strange)}") if strange else row.ours(**given)
        if isinstance(made, Declined):
            tally(report.declined, (row.name, str(made)))
            return original(*args, **kwargs)
        report.count(row.op)
        return made

    return call


def tally(counter: Counter, key: Any) -> None:
    if not torch.compiler.is_compiling():  # a graph would have to be compiled again for each number
        counter[key] += 1


def equal(value: Any, default: Any) -> bool:
    """Whether an argument equals its default. A tensor equals it only if it is the very object."""
    return value is default or (isinstance(value, (bool, int, float, str)) and value == default)
