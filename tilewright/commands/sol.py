"""`tilewright sol`: the realistic speed of light of this machine."""

from __future__ import annotations

import json

import typer

from .console import Json, bar, fail, show


def sol(as_json: Json = False) -> None:
    """Measured copy, read and write bandwidth and the best matrix rate of each dtype, burst and sustained, with the clock."""
    import torch
    import triton

    if not torch.cuda.is_available():
        fail("sol measures a GPU, and there is none here; `tilewright doctor` says what is missing")
    from ..bench import sol as light

    rows = []
    with bar(len(light.NAMES)) as shown:
        for name in light.NAMES:
            shown.step(name, 0)
            rows.append(light.measure(name).row())
            shown.step(name)
            torch.cuda.empty_cache()
    if as_json:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
        typer.echo(json.dumps({**about, "rows": rows}, indent=1))
        return
    for row in rows:
        for rate in ("burst", "sustained"):
            row[rate] = None if row[rate] is None else f"{row[rate]:.3g}" if row[rate] < 100 else f"{row[rate]:.0f}"
        row["shape"] = None if row["shape"] is None else "x".join(map(str, row["shape"]))
    show(rows, f"speed of light of {torch.cuda.get_device_name()}", False)
