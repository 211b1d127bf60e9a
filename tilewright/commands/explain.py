"""`tilewright explain OP`: which implementation a call takes on a chip, and what it launches there; or what real models launch; or,
of one of torch's operators, whether its replacement is known to be no slower."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from .console import Json, dimensions, expect, fail, find, show

LIBRARIES = {"cublaslt": "cuBLASLt", "cudnn": "cuDNN"}  # by backend


def explain(
    name: Annotated[
        str, typer.Argument(metavar="OP", help="May be left out with --models: all ops. `aten` is torch's operators.")
    ] = "",
    overload: Annotated[
        str, typer.Argument(metavar="[OVERLOAD]", help="Of aten: an overload, an operator or an engine; all, if none.")
    ] = "",
    arch: Annotated[str, typer.Option(help="The chip to explain for.")] = "sm_90",
    dim: Annotated[
        list[str] | None, typer.Option(help="A dimension, tokens=8192 say; may be given several times.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(help="What else a call is made with, pair=fp8_block say; may be given several times."),
    ] = None,
    format: Annotated[str, typer.Option(help="An out_format, fp8:e4m3:1x128:both:pow2:te say.")] = "",
    full: Annotated[bool, typer.Option("--full", help="With every optional tensor.")] = False,
    at_models: Annotated[
        bool, typer.Option("--models", help="Instead, the compiled variants that real models reach, kernel by kernel.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="Of aten: of which dtype the first tensor is, bf16 say.")] = "",
    shape: Annotated[str, typer.Option(help="Of aten: whose a call over such tensors would be, 8192x4096 say.")] = "",
    as_json: Json = False,
) -> None:
    """Which implementation a bf16 call takes on a chip, and what it launches there, forward and backward; of a matrix product also
    what is multiplied, and of it and of attention whether a library's is faster. Of aten: the verdicts of mode "auto", and the rows
    they are made of."""
    from ..check.cases import dims_of
    from ..check.variants import COMMON, Blank, Call, passes
    from ..core.format import Format
    from ..core.target import TARGETS, pretend
    from ..op import force

    if arch not in TARGETS:
        fail(f"--arch {arch} is not one of {', '.join(TARGETS)}")
    if name == "aten":
        if dim or option or format or full or at_models:
            fail("aten takes an overload, --arch, --dtype and --shape alone")
        _replaced(overload, arch, dtype, shape, as_json)
        return
    if overload or dtype or shape:
        fail("an overload, --dtype and --shape are for aten")
    if at_models:
        if dim or option or format or full:
            fail("--models takes an op and --arch alone: models say the rest")
        _reached(name, TARGETS[arch], as_json)
        return
    if not name:
        fail("explain needs an op; without one it takes --models")
    op = find(name)
    if format and "out_format" not in op.signature.names:
        fail(f"{name} has no out_format")
    dims = {**COMMON, "tokens": 256, "hidden": 2048, "vocab": 32000, **dimensions(dim)}
    options = _options(option)
    try:
        source = Blank(op, dims, {**dimensions(dim), **options}, full=full)
        given = {**op.inputs(source), **{n: v for n, v in options.items() if n in op.signature.scalars}}
        expect(name, "dimension", dimensions(dim).keys() - source.choices.keys(), {*dims_of(op)})
        expect(name, "option", options.keys(), {*source.choices, *source.optional, *op.signature.scalars})
        if format:
            given["out_format"] = Format.parse(format)
        forward, backward = passes(op, Call(given), TARGETS[arch])
        values = op.signature.bind((), given)
        with pretend(TARGETS[arch]), force("triton"):
            chosen = op.implementation(values)
            at = partial(_implementation, op, dims, {**dimensions(dim), **options}, full)
            about = _products(op, values, TARGETS[arch], chosen.name, at) or _attended(
                op, values, TARGETS[arch], chosen.name
            )
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        fail(str(error).partition("\n")[0])
    rows = [
        {"pass": which, "kernel": w.kernel.name, "constants": _constants(w), "options": w.options}
        for which, launches in (("forward", forward), ("backward", backward))
        for w in launches
    ]
    taken = about.get("taken", chosen.name)
    if as_json:
        made = {"op": name, "arch": arch, "implementation": chosen.name, **about, "launches": rows}
        typer.echo(json.dumps(made, indent=1))
        return
    for line in _lines(about):
        typer.echo(line)
    kernels = "" if taken == chosen.name else f"; of our own: {chosen.name}"
    names = [one.name for one in op.implementations]
    show(rows, f"{name} on {arch}: implementation {taken} of {names}{kernels}", False)


def _replaced(overload: str, arch: str, dtype: str, shape: str, as_json: bool) -> None:
    """Verdicts of torch's operators on a chip; of one of them also its rows, and whose calls of a shape are."""
    import torch

    from ..aten import table, verdicts
    from ..aten.router import resolve
    from ..bench import explained
    from .warmup import DTYPES

    dtype = DTYPES.get(dtype, dtype)
    try:
        names = resolve([overload]) if overload else frozenset(table.FORMS)
    except ValueError as error:
        fail(str(error).removeprefix("aten: "))
    if dtype and not isinstance(getattr(torch, dtype, None), torch.dtype):
        fail(f"--dtype {dtype} is no dtype of torch: bf16, float32 or int64, say")
    sizes = shape.split("x") if shape else []
    if not all(size.isdigit() for size in sizes):
        fail(f"--shape {shape} is not of the form 8192x4096")
    if not overload and (dtype or shape):
        fail("--dtype and --shape need an overload")
    found = {"verdicts": explained.overview(arch, names)}
    if overload:
        found["rows"] = explained.measured(arch, names, dtype)
    if shape:
        found["whose"] = explained.whose(arch, names, dtype, [int(size) for size in sizes])
    if as_json:
        typer.echo(json.dumps({"arch": arch, **found}, indent=1))
        return
    if not found["verdicts"]:
        typer.echo(f"{overload or 'aten'} on {arch}: never, nothing is measured: {verdicts.MEASURE}")
        return
    titles = {
        "verdicts": "verdicts",
        "rows": "microseconds, and how many times as fast at the least",
        "whose": f"whose, of {shape}",
    }
    for what, rows in found.items():
        show(rows, f"{overload or 'aten'} on {arch}: {titles[what]}", False)


def _reached(name: str, target: Any, as_json: bool) -> None:
    """The compiled variants of real models' calls, each with the models that reach it."""
    from .. import catalogue
    from ..check.models import calls
    from ..check.variants import variant

    found: dict[str, dict[str, Any]] = {}
    for op in [find(name)] if name else catalogue().values():
        for call in calls(op, target=target):
            for wanted in call.launches(op, target):
                one = variant(wanted, target.arch)
                row = found.setdefault(
                    one.name, {"op": op.name, "kernel": one.kernel.name, "variant": "", "models": {}}
                )
                row["variant"] = one.name.removeprefix(f"{one.kernel.name} ")
                row["models"] |= dict.fromkeys(call.models)
    rows = [{**row, "models": list(row["models"])} for row in found.values()]
    show(rows, f"{len(rows)} variants for {target.arch} that real models reach", as_json)


def _options(texts: list[str] | None) -> dict[str, Any]:
    """`--option pair=fp8_block --option zero_b=false` as values by name."""
    words = {"true": True, "false": False, "none": None}
    found: dict[str, Any] = {}
    for text in texts or []:
        name, _, value = text.partition("=")
        if not name or not value:
            fail(f"--option {text} is not of the form pair=fp8_block")
        found[name] = words.get(value.lower(), int(value) if value.isdigit() else value)
    return found


def _implementation(op: Any, dims: dict[str, int], options: dict[str, Any], full: bool, sizes: Sequence[int]) -> str:
    """Which of our implementations a product of other sizes takes."""
    from ..check.variants import Blank

    there = dict(zip(("tokens", "columns", "hidden"), sizes))
    given = op.inputs(Blank(op, {**dims, **there}, {**options, **there}, full=full))
    given |= {n: v for n, v in options.items() if n in op.signature.scalars}
    return op.implementation(op.signature.bind((), given)).name


def _products(op: Any, values: dict[str, Any], target: Any, own: str, at: Callable[[Any], str]) -> dict[str, Any]:
    """How a dense product is computed, and which of our kernels and the library is preferred, with what that rests on. `own` is the
    implementation of ours that takes the call, `at` gives that of other sizes."""
    import torch

    from ..gemm import library, preference

    if op.name not in ("scaled_mm", "matmul"):
        return {}
    a, given = values["a"], SimpleNamespace(**values)
    sizes = a.numel() // a.shape[-1] if a.dim() > 1 and a.shape[-1] else 0, values["b"].shape[1], a.shape[-1]
    about: dict[str, Any] = {}
    if op.name == "scaled_mm":
        from ..gemm.arithmetic import computed
        from ..gemm.operands import inner_of

        sizes = a.shape[0], values["b"].shape[1], inner_of(a)
        about["label"] = computed(values, target).words
        pair, reason = library.pair_of(given), library.refusal(target, given)
        if reason is None and torch.version.cuda is not None:  # elsewhere it is said of a torch that has all of it
            reason = library.absence(given)
    else:
        pair, reason = library.pair_of_matmul(given), library.refusal_of_matmul(target, given)
    if values["backend"] != "auto":
        return {**about, "library": values["backend"] == preference.LIBRARY, "why": f"asked for: {values['backend']}"}
    if reason is not None:
        return {**about, "library": None, "why": reason}
    found = preference.decide(target, pair, *sizes)
    why, row = found.why, None
    if found.row is not None:
        why, row = _figures(found.row, own, at(found.row["bucket"]), preference.LIBRARY)
    about |= {"library": found.best == preference.LIBRARY, "why": why, "evidence": row}
    return {**about, "taken": preference.LIBRARY} if found.best == preference.LIBRARY else about


def _attended(op: Any, values: dict[str, Any], target: Any, own: str) -> dict[str, Any]:
    """Which of our kernels and cuDNN is preferred for a forward of attention, with what that rests on."""
    import torch

    from ..attention import library, preference

    if op.name not in ("attention", "attention_lse"):
        return {}
    if values["backend"] != "auto":
        asked = values["backend"]
        return {"library": asked == preference.LIBRARY, "why": f"asked for: {asked}", "taken": own}
    given = SimpleNamespace(**values)
    reason = library.refusal(given)
    if reason is None and torch.version.cuda is not None:
        reason = library.absence()
    if reason is not None:
        return {"library": None, "why": f"not cuDNN: {reason}"}
    found = preference.decide(target, "forward", given)
    why, row = found.why, None
    if found.row is not None:
        measured = own if own in found.row["times"] else preference.best_of(found.row["times"], library=False)
        why, row = _figures(found.row, own, measured, preference.LIBRARY)
    about = {"library": found.best == preference.LIBRARY, "why": why, "evidence": row}
    return {**about, "taken": preference.LIBRARY} if about["library"] else about


def _figures(row: dict[str, Any], own: str, measured: str, library: str) -> tuple[str, dict[str, Any] | None]:
    """What a measured call says of one like it, with no figure but of what the call would take: our `own` implementation with this
    release of Triton, or the library, which is none of Triton's. `measured` is the implementation of ours that the row is of."""
    import triton

    from ..core.triton_versions import release

    size, here = "x".join(map(str, row["bucket"])), release(triton.__version__)
    other = None if release(row["triton"]) == here else f"with Triton {release(row['triton'])}, and this is {here}"
    if measured != own:
        other = f"by {measured}, and this call takes {own}"
    times = {name: us for name, us in sorted(row["times"].items()) if name == library or other is None}
    said = ", ".join(f"{name} {us:g} us" for name, us in times.items())
    if other is None:
        return f"measured on {row['date']} with Triton {row['triton']} at {size}: {said}", row
    if row["best"] != library:
        return f"ours was the faster at {size}, measured {other}: there are no figures of this path", None
    return f"measured on {row['date']} at {size}: {said}; ours was slower, measured {other}", {**row, "times": times}


def _lines(about: dict[str, Any]) -> list[str]:
    """What there is to say of a product or of attention beside its kernels."""
    found = [f"math: {about['label']}"] if "label" in about else []
    if "why" in about:
        who = (
            f"{LIBRARIES.get(about.get('taken'), 'cuBLASLt')} through torch, where torch has it"
            if about["library"]
            else "our kernels"
        )
        found.append(f"preference: {who} ({about['why']})")
    return found


def _constants(wanted: Any) -> dict[str, Any]:
    """The compile-time arguments that are numbers or words."""
    pairs = zip(wanted.kernel.jit.params, wanted.ordered)
    return {p.name: v for p, v in pairs if p.is_constexpr and isinstance(v, (int, str, bool))}
