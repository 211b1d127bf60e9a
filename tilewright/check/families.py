"""Families of ops, and which ops a property is tried on.

A family is the folder that an op or a kernel stands in, `ops/norm` and `gemm` alike. A property of the op (`of_the_op`) can fail
for one op and hold for its neighbour: it is tried on every op. A property of the machinery (`of_the_machinery`) is decided by
code that all ops share, from what their declarations say: it is tried on the cheapest member of each family, and on a few more
ops, so that everything that a declaration can say is said by one of them. A GPU tries every property on every op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import tilewright as tw

from .. import names
from ..op import Op

Property = Callable[..., None]


def of_module(module: str) -> str:
    """The family of what a module holds: `norm` for `tilewright.ops.norm.rms_norm`, `gemm` for `gemm.hopper.few`."""
    parts = module.removeprefix("tilewright.").split(".")
    return parts[1] if parts[0] == "ops" and len(parts) > 2 else parts[0]


def of(op: str) -> str:
    """The family of a public op."""
    return of_module(names.OPS[op])


def members() -> dict[str, list[str]]:
    """The ops of each family, both sorted."""
    found: dict[str, list[str]] = {}
    for op in sorted(names.OPS):
        found.setdefault(of(op), []).append(op)
    return dict(sorted(found.items()))


# ---------------------------------------------------------------- what a property is about


NETS = ("reference", "kernels")  # what a net without a GPU runs


def of_the_op(why: str, *nets: str) -> Callable[[Property], Property]:
    """Marks a property that each op can break on its own, in these nets or in all."""
    return lambda prop: _mark(prop, "op", why, nets)


def of_the_machinery(why: str, *nets: str) -> Callable[[Property], Property]:
    """Marks a property that code which all ops share decides, in these nets or in all."""
    return lambda prop: _mark(prop, "machinery", why, nets)


def _mark(prop: Property, about: str, why: str, nets: tuple[str, ...]) -> Property:
    prop.about = {**getattr(prop, "about", {}), **dict.fromkeys(nets or NETS, (about, why))}
    return prop


def tried_on(prop: Property, net: str) -> list[str]:
    """The ops that a net without a GPU tries a property on."""
    return sorted(names.OPS) if prop.about[net][0] == "op" else representatives()


# ---------------------------------------------------------------- ops that stand for all


def says(op: Op) -> frozenset[str]:
    """What an op's declaration says to the machinery."""
    args = op.signature
    found = {
        "a list of outs": args.listed,
        "lists of tensors": args.lists,
        "out_format": "out_format" in args.names,
        "differentiable": op.differentiable,
        "several results": len(op.results) > 1,
        "hidden": op.hidden,
        "saved results": op.saved_results,
        "resume": op.resume,
        "shape_only": op.shape_only,
        "lies_on": op.out.lies_on,
        "writes": op.writes,
        "no results": not op.results,
        "contiguous": op.out.contiguous,
        "live": op.out.live,
        "stores where it is told": any(one.out for one in op.implementations),
        "overwrites": op.overwrites,
        "groups": op.groups,
        "asks": op.asks,
        "composite": op.composite,
        "sharded": op.sharded,
        "several implementations": len(op.implementations) > 1,
    }
    return frozenset(name for name, said in found.items() if said)


def chosen(ops: Mapping[str, Op], groups: Mapping[str, list[str]]) -> list[str]:
    """The op with fewest arguments of each group; then, while no chosen one says something that another op says, the op that
    adds most for its number of arguments."""

    def arguments(name: str) -> tuple[int, str]:
        return len(ops[name].signature.parameters), name

    found = {min(own, key=arguments) for own in groups.values()}
    left = frozenset().union(*map(says, ops.values())) - frozenset().union(*(says(ops[name]) for name in found))
    while left:
        adding = {name: len(says(op) & left) for name, op in ops.items() if says(op) & left}
        best = min(adding, key=lambda name: (arguments(name)[0] / adding[name], name))
        found.add(best)
        left -= says(ops[best])
    return sorted(found)


@cache
def representatives() -> list[str]:
    """The ops that stand for all where the machinery is tried."""
    return chosen({name: tw.catalogue()[name] for name in names.OPS}, members())
