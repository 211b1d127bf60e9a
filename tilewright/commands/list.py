"""`tilewright list`: the ops, what they can do and where they have been measured."""

from __future__ import annotations

import typer

from .console import Json, fail, show


def list(as_json: Json = False) -> None:
    """The ops: what they compute, gradients, implementations, formats, chips, whether their evidence is fresh, and which products
    are emulated. Those that are parts of others stand apart."""
    from .. import catalogue
    from ..bench import evidence
    from ..core.target import TARGETS
    from ..gemm.arithmetic import emulated
    from ..gemm.scaled_mm import PAIRS

    try:
        recorded = evidence.everything()
    except evidence.Damaged as error:
        fail(str(error))
    rows = []
    for name, op in sorted(catalogue().items()):
        ran = {row["arch"] for row in recorded if row["op"] == name}
        rows.append(
            {
                "name": name,
                "family": op.reference.__module__.rpartition(".")[2],
                "summary": (op.__doc__ or "").strip().partition("\n")[0],
                "backward": bool(op.differentiable),
                "implementations": [one.name for one in op.implementations],
                "formats": op.formats(),
                "chips": {arch: "measured" if arch in ran else "compiled" for arch in TARGETS},
                "internal": op.internal,
                "evidence": evidence.state(name, recorded),
                "emulated": {arch: emulated(t, PAIRS) for arch, t in TARGETS.items()} if name == "scaled_mm" else {},
            }
        )
    if as_json:
        show(rows, "ops", as_json)
        return
    columns = ("name", "summary", "backward", "implementations", "formats", "evidence")
    for title, internal in (("ops", False), ("parts of other ops", True)):
        show(
            [{column: row[column] for column in columns} for row in rows if row["internal"] is internal], title, as_json
        )
    words = "; ".join(f"{pair}: {how}" for pair, how in emulated(TARGETS["sm_90"], PAIRS).items())
    typer.echo(f"scaled_mm on sm_90, where codes are not multiplied as they are: {words}")
