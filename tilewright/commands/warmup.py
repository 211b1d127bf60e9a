"""`tilewright warmup OP`: compile ahead, for this GPU, what a call and its backward launch."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from .console import Json, dimensions, expect, fail, find, show

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def warmup(
    name: Annotated[str, typer.Argument(metavar="OP")],
    dim: Annotated[
        list[str] | None, typer.Option(help="A dimension, hidden=4096 say; may be given several times.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    format: Annotated[str, typer.Option(help="An out_format, fp8:e4m3:1x128:both:pow2:te say.")] = "",
    full: Annotated[bool, typer.Option("--full", help="With every optional tensor.")] = False,
    as_json: Json = False,
) -> None:
    """Compile the kernels of a call into Triton's cache, so that no later process waits for it. Launches none of them."""
    import torch

    import tilewright as tw

    from ..check.cases import dims_of

    op = find(name)
    if dtype not in DTYPES:
        fail(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    if format and "out_format" not in op.signature.names:
        fail(f"{name} has no out_format")
    dims = dimensions(dim)
    try:
        expect(name, "dimension", dims.keys(), {*dims_of(op)})
    except ValueError as error:
        fail(str(error))
    if not torch.cuda.is_available():
        fail(
            "warmup compiles for the GPU that is here, and there is none; `tilewright compile --arch sm_90` needs none"
        )
    from ..check.variants import COMMON, Call, Plain, launches
    from ..core.format import Format
    from ..core.target import Target

    whole = {**COMMON, "hidden": 2048, "vocab": 32000, **dims}
    try:
        given = op.inputs(Plain(op, whole, dtype=getattr(torch, DTYPES[dtype]), device="cuda", full=full))
        if format:
            given["out_format"] = Format.parse(format)
        start = time.monotonic()
        tw.warmup(op, **given)
        seconds = time.monotonic() - start
        blank = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        wanted = launches(op, Call(blank), Target.of(torch.cuda.current_device()).arch)
    except (ValueError, TypeError, RuntimeError) as error:
        fail(str(error).partition("\n")[0])
    kernels = {one.kernel.name: one.kernel for one in wanted}
    rows = [{"kernel": kernel, "binaries": len(one.variants)} for kernel, one in kernels.items()]
    show(rows, f"{name}: compiled in {seconds:.1f} s for {torch.cuda.get_device_name()}", as_json)
