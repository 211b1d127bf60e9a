"""`tilewright doctor`: what this machine has, what will be used, what is missing and the command that mends it."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable

from .console import Json, show


def doctor(as_json: Json = False) -> None:
    """What this machine has, what will be used, what is missing and the one command that mends it."""
    import torch
    import triton

    from ..core import triton_versions
    from ..core.private import guard
    from ..core.target import Target, chip_words
    from ..runtime import config
    from ..toolchain import faults

    def row(what: str, found: str, fix: str = "") -> dict[str, str]:
        return {"what": what, "found": found, "to mend it": fix}

    lacks = triton_versions.probe().lacks
    slow = slow_launch(triton_versions.launches_directly(), guard([torch.empty(1)]) is not None)
    tried = f"a torch that brings Triton {triton_versions.TRIED[0][:-1]} to {triton_versions.TRIED[-1][:-1]}"
    rows = [
        row("python", platform.python_version()),
        row("torch", torch.__version__),
        row("triton", f"{triton.__version__}, which gets {gets(lacks, slow)}"),
    ]
    if not torch.cuda.is_available():
        fix = (
            "pip install torch, with the CUDA build of your driver"
            if torch.version.cuda is None
            else "install the GPU's driver"
        )
        rows.append(row("GPU", "none: CPU tensors take the references", fix))
    for index in range(torch.cuda.device_count()):
        try:
            state = chip_words(Target.of(index))
        except RuntimeError as error:
            state = str(error)
        rows.append(row(f"GPU {index}", f"{torch.cuda.get_device_name(index)}: {state}"))
    found = "plans, launched directly" if slow is None else f"through Triton's public call: {slow}"
    rows.append(row("launch", found, "" if slow is None else f"{tried}: a call then costs the host a tenth"))
    found = "in Gluon" if lacks is None else f"portable ones: this Triton's Gluon is another ({lacks})"
    rows.append(row("kernels for Hopper", found, "" if lacks is None else f"{tried}, on sm_90"))
    found, fix = looked_at(triton_versions.assembler(90), faults.unread)
    rows.append(row("wrong code", found, fix))
    rows.append(row("your tuned rows", str(config.folder())))
    for name in ("pytest", "ruff"):
        if importlib.util.find_spec(name) is None:
            rows.append(row(name, "not installed", "only for working on tilewright: make env"))
    show(rows, "this machine", as_json)


def looked_at(ptxas: str | None, unread: Callable[[str | None], str | None]) -> tuple[str, str]:
    """What compiled kernels are looked through for before they run on a chip of NVIDIA's, and what would let machine code be read
    where it should be and is not."""
    from ..core.triton_versions import FAULTS, has_fault

    named = ", ".join(fault for fault in FAULTS if has_fault(fault, ptxas))
    why = unread(ptxas)
    if why is None:
        return f"compiled kernels are looked through before they run: {named}", ""
    return (
        f"compiled kernels are looked through before they run: {named}; but not for registers, since {why}",
        "Triton's own wheel",
    )


def slow_launch(known: bool, guarded: bool) -> str | None:
    """Why calls are not launched directly, or None if they are."""
    if not known:
        return "its compiled launcher is not a known one"
    return None if guarded else "torch has no guard over tensors that a plan could be found by"


def gets(lacks: str | None, slow: str | None) -> str:
    """What the installed Triton gets of what the library has, and what it does not get."""
    parts = {"kernels in Gluon": lacks is None, "the direct launch": slow is None}
    has, misses = ([name for name, there in parts.items() if there is flag] for flag in (True, False))
    return " and ".join(has or ["portable kernels"]) + (f", but not {' nor '.join(misses)}" if misses else "")
