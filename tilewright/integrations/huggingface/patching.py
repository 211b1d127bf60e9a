"""`patch(model)`: a transformers model whose norms, gated layers, mixers that are recurrences, rotary embeddings, routers, experts,
loss and, if asked for, attention are ops of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import MethodType
from typing import Any

import torch
from torch import nn

from ... import __version__
from .attention import Attention
from .causal_loss import LOSSES, SHADOW, loss
from .decoder import decoder
from .experts import experts, experts_forward
from .gated import gated
from .linear import linear
from .mixer import mixer
from .norm import norm
from .report import REPORT, PatchReport, Replaced, Skipped, changed, rests
from .roles import Count, Found, Skip
from .rotary import rotary
from .router import router

OLDEST = 5  # the first major version of transformers whose experts and losses are as here
ROLES = ("norm", "decoder", "mlp", "rotary", "router", "experts", "loss", "linear", "mixer", "attention")
REPLICATE = "_replicate_for_data_parallel"  # the method by which `torch.nn.parallel.replicate` copies each module
UNPICKLABLE = "_tilewright_unpicklable"
Role = Callable[[str, nn.Module], Found | Skip | None]


def patch(
    model: nn.Module,
    *,
    strict: bool = True,
    loss: str | None = "linear_cross_entropy",
    experts: bool = True,
    fp8: bool = False,
    attention: bool = False,
    only: Iterable[str] | None = None,
) -> PatchReport:
    """Replace what an op can stand for in one transformers model, in its instances alone; `unpatch` takes it back.

    Modules are found by what they hold and probed against their own code. `loss` is "linear_cross_entropy", which in training
    makes no logits (a call with `return_logits=True` does), "cross_entropy" or None; `experts` is for their router too. `fp8`
    makes products of FP8 codes: of linear layers with both sizes multiples of 128 from 1024 on, but for the head and routers,
    and of experts with a hidden size from 1024 on and an inner one that is a multiple of 128 from 768 on.
    `attention` takes that of decoders too: it is asked for, since its speed in models has not been recorded. `only` names the
    roles to replace: norm, decoder, mlp, rotary, router, experts, loss, linear, mixer, attention. Parameters, buffers and their
    names stay. `strict` raises `ValueError` if nothing was replaced or a module failed: it computes something else than it looks
    like, or finding that out raised; without `strict` such a module is skipped. Whatever is raised, the model is as it was.
    """
    versions = known_versions()
    if any(REPORT in m.__dict__ for m in model.modules()):
        raise ValueError("patch: the model is patched already: unpatch it first")
    if loss is not None and loss not in LOSSES:
        raise ValueError(f"patch: loss must be one of {', '.join(LOSSES)} or None, got {loss!r}")
    chosen = {*ROLES} if only is None else {only} if isinstance(only, str) else {*only}
    if not chosen <= {*ROLES}:
        raise ValueError(f"patch: only must name roles of {', '.join(ROLES)}, got {sorted(chosen - {*ROLES})}")
    left_out = {"loss": loss is None, "router": not experts, "experts": not experts, "linear": not fp8}
    left_out["attention"] = not attention and only is None
    report = PatchReport(versions)
    try:
        wanted = {r for r in chosen if not left_out.get(r)}
        failed = apply(model, roles(model, report, loss, fp8, wanted), report)
        if strict and (failed or not report.replaced):
            why = "{0.role} {0.module}: {0.reason}".format(failed[0]) if failed else "nothing was replaced"
            raise ValueError(
                f"patch: {type(model).__name__}: {why}\n{report}\nstrict=False leaves such modules as they are"
            ) from (failed[1].error if failed else None)
        give(report, model, REPORT, report)
    except BaseException:
        report.undo()
        raise
    return report


def unpatch(model: nn.Module) -> None:
    """Make a patched model what it was. The model may have been copied or wrapped since."""
    found = [m.__dict__[REPORT] for m in model.modules() if REPORT in m.__dict__]
    if not found:
        raise ValueError(f"unpatch: this {type(model).__name__} is not patched")
    for report in found:
        report.undo()


def known_versions() -> dict[str, str]:
    found = {"tilewright": __version__}
    for name in ("transformers", "torch", "triton", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name == "transformers":
                raise ImportError("patch: transformers is not installed: pip install transformers") from None
    if int(found["transformers"].partition(".")[0]) < OLDEST:
        raise ValueError(f"patch: transformers must be {OLDEST}.0 at least, is {found['transformers']}")
    return found


def roles(model: nn.Module, report: PatchReport, kind: str | None, fp8: bool, chosen: set[str]) -> dict[str, Role]:
    """In the order in which they are applied: attention's is asked of layers with a forward of their own, which rotary embeddings
    replace; mixers are probed with norms as they were; linear layers may be part of what came before, and gated layers are made
    of what became of them."""
    first: dict[str, Role] = {}
    if "attention" in chosen:
        first["attention"] = Attention(model, partial(leaving, report, "attention"))
    every: dict[str, Role] = {
        **first,
        "mixer": mixer, "norm": norm, "decoder": decoder, "rotary": rotary, "router": router, "experts": partial(experts, fp8=fp8),
        "linear": linear, "mlp": gated, "loss": partial(loss, kind=kind),
    }  # fmt: skip
    return {role: match for role, match in every.items() if role in chosen}


def apply(model: nn.Module, matches: dict[str, Role], report: PatchReport) -> tuple[Skipped, Skip] | None:
    """Fill the report and change the modules; returns the first that failed."""
    register_experts()
    first = None
    for role, match in matches.items():
        for name, module in model.named_modules():
            found = change(match, name, module, report)
            if isinstance(found, Found):
                report.replaced.append(Replaced(role, name, found.op))
                if found.less is not None:
                    report.skipped.append(Skipped(role, name, found.less))
            elif found is not None:
                report.skipped.append(Skipped(role, name, found.reason))
                if found.failed and first is None:
                    first = report.skipped[-1], found
    return first


def change(match: Role, name: str, module: nn.Module, report: PatchReport) -> Found | Skip | None:
    """What a role says of a module, which is then changed; one at which something raises stays as it is."""
    before = len(report.changes)
    try:
        found = match(name, module)
        if isinstance(found, Found):
            if changed(module) and not rests(module):
                return Skip("its forward was replaced before")
            for given in found.changes(counting(report.counter)):
                give(report, *given)
        return found
    except Exception as error:
        report.undo(before)
        return Skip(" ".join(f"{type(error).__name__}: {error}".split()), failed=True, error=error)


def give(report: PatchReport, module: nn.Module, name: str, value: Any) -> None:
    """Give one instance an attribute, and with its first what each changed instance has."""
    if UNPICKLABLE not in module.__dict__:
        report.set(module, UNPICKLABLE, Unpicklable())
        report.set(module, REPLICATE, MethodType(replicated, module))
    report.set(module, name, value)


def replicated(self: nn.Module) -> nn.Module:
    """A replica whose methods are its own. A shadow has the children of the original, so that the replica's loss is the model's."""
    made = getattr(type(self), REPLICATE)(self)
    own = {k: v for k, v in made.__dict__.items() if isinstance(v, MethodType) and v.__self__ is self}
    made.__dict__ |= {name: MethodType(method.__func__, made) for name, method in own.items()}
    made.__dict__.pop(SHADOW, None)
    return made


class Unpicklable:
    """Refuses to be written to a file, and so does the module that has it. A loaded module would lack its forward."""

    def __deepcopy__(self, memo: dict) -> Unpicklable:
        return self

    def __reduce_ex__(self, protocol: int) -> Any:
        raise TypeError("a patched model cannot be pickled: save its state_dict(), or unpatch it first")


def counting(counter: Counter[str]) -> Count:
    def count(op: str) -> None:
        if not torch.compiler.is_compiling():  # a graph would have to be compiled again for each number
            counter[op] += 1

    return count


def leaving(report: PatchReport, role: str, module: str, reason: str) -> None:
    """Tell the report, once, why calls of a replaced module are left to its own code."""
    row = Skipped(role, module, f"some calls: {reason}")
    if not torch.compiler.is_compiling() and row not in report.skipped:
        report.skipped.append(row)


def register_experts() -> None:
    """For `experts_implementation="tilewright"`, too, which chooses them in a config."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if "tilewright" not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register("tilewright", experts_forward)
