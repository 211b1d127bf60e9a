"""What a patch replaced and what not, how often the replacements were called, and the way back."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

REPORT = "_tilewright_report"  # where the patched module keeps its report
RESTS = "_tilewright_rests"  # of a forward that does what the original does once the rest of its patch is taken back
HOOKED = "_old_forward"  # where a hook of accelerate's keeps the forward that it calls
ABSENT = object()


class Replaced(NamedTuple):
    role: str
    module: str
    op: str


class Skipped(NamedTuple):
    role: str
    module: str
    reason: str


def own_forward(module: nn.Module) -> Any:
    """The forward that an instance has of its own, or None. Under a hook of accelerate's it is the one that the hook calls."""
    return module.__dict__.get(kept_as(module, "forward"))


def kept_as(module: nn.Module, name: str) -> str:
    """The key under which an instance has an attribute."""
    return HOOKED if name == "forward" and HOOKED in module.__dict__ else name


def assign(module: Any, name: str, value: Any) -> None:
    """Give one instance, a layer or a Python module, an attribute, past `nn.Module.__setattr__`: no state dict shall see it.
    `ABSENT` takes it away."""
    key = kept_as(module, name)
    if name == "__class__":
        plain = MethodType(type(module).forward, module)
        module.__class__ = value
        if own_forward(module) == plain:  # accelerate's hooks bind that of the class, and leave it there
            module.__dict__[kept_as(module, "forward")] = MethodType(value.forward, module)
    elif value is not ABSENT:
        module.__dict__[key] = value
    elif key == HOOKED:  # a hook calls it whatever it is
        module.__dict__[key] = MethodType(type(module).forward, module)
    else:
        del module.__dict__[key]


class Change(NamedTuple):
    """An attribute of one instance: its value, and what `__dict__` held there before."""

    module: nn.Module
    name: str
    value: Any
    before: Any

    def stands(self) -> bool:
        kept = self.module.__dict__.get(kept_as(self.module, self.name))
        now = type(self.module) if self.name == "__class__" else kept
        return now == self.value  # of methods, each `MethodType` of the same function and module is another

    def covered(self) -> bool:
        """Whether others wrapped it who may keep it."""
        return self.name == "forward" and not self.stands() and rests(self.module)


def changed(module: nn.Module) -> bool:
    """Whether an instance has another forward than its class. Old versions of transformers leave that of the class on instances
    whose outputs they once collected."""
    forward = own_forward(module)
    return forward is not None and forward != MethodType(type(module).forward, module)


def rests(module: nn.Module) -> bool:
    """Whether an instance's own forward is, or wraps, one that may stay after its patch. Accelerate's wrapper for mixed precision
    stays on a model as long as it lives, and comes between patches."""
    forward = own_forward(module)
    while forward is not None and not hasattr(forward, RESTS):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


@dataclass(eq=False)
class PatchReport:
    """`replaced` and `skipped` modules, `versions`, and `calls()`. As a context manager it undoes the patch at the end."""

    versions: dict[str, str]
    replaced: list[Replaced] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    counter: Counter[str] = field(default_factory=Counter, repr=False)
    changes: list[Change] = field(default_factory=list, repr=False)

    def calls(self) -> dict[str, int]:
        """How often each op was called in place of the model's own code since the patch, not counting compiled code: there the
        calls are nodes of the graph."""
        return dict(self.counter)

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Give one instance an attribute that `undo` takes back."""
        before = type(module) if name == "__class__" else module.__dict__.get(kept_as(module, name), ABSENT)
        assign(module, name, value)
        self.changes.append(Change(module, name, value, before))

    def undo(self, left: int = 0) -> None:
        """Take back every change but the first `left`, the last one first; none of them if something was put over one since, but
        for wrappers of the model's forward."""
        over = next((c for c in self.changes[left:] if not c.stands() and not c.covered()), None)
        if over is not None:
            kind = type(over.module).__name__
            raise ValueError(f"unpatch: {over.name} of a {kind} was replaced after the patch: take that back first")
        while len(self.changes) > left:
            change = self.changes.pop()
            if not change.covered():
                assign(change.module, change.name, change.before)

    def __enter__(self) -> PatchReport:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __deepcopy__(self, memo: dict) -> PatchReport:
        """For a copy of the model: `ABSENT` must stay itself, and the counter is that of the copied forwards."""
        made = PatchReport(dict(self.versions), [*self.replaced], [*self.skipped], self.counter)
        memo[id(self)] = made  # it is a value of one of its own changes
        for module, name, value, before in self.changes:
            before = before if before is ABSENT else deepcopy(before, memo)
            made.changes.append(Change(deepcopy(module, memo), name, deepcopy(value, memo), before))
        return made

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"{len(self.replaced)} replaced, {len(self.skipped)} skipped ({versions})"]
        for (role, op), count in Counter((r.role, r.op) for r in self.replaced).items():
            first = next(r.module for r in self.replaced if (r.role, r.op) == (role, op))
            lines.append(f"  {role}: {count} by {op} ({first}{', ...' if count > 1 else ''})")
        for (role, reason), count in Counter((s.role, s.reason) for s in self.skipped).items():
            first = next(s.module for s in self.skipped if (s.role, s.reason) == (role, reason))
            lines.append(f"  {role}: {count} skipped: {reason} ({first}{', ...' if count > 1 else ''})")
        return "\n".join(lines)
