"""Families of ops: the folder that an op or a kernel stands in, `ops/norm` and `gemm` alike."""

from __future__ import annotations

from .. import names


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
