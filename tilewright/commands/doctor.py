"""`tilewright doctor`: what this machine has, what will be used, what is missing and the command that mends it."""

from __future__ import annotations

import importlib.util
import platform

from .console import Json, show


def doctor(as_json: Json = False) -> None:
    """What this machine has, what will be used, what is missing and the one command that mends it."""
    import torch
    import triton

    from ..core import triton_versions
    from ..core.private import guard
    from ..core.target import Target, chip_words
    from ..runtime import config

    def row(what: str, found: str, fix: str = "") -> dict[str, str]:
        return {"what": what, "found": found, "to mend it": fix}

    rows = [
        row("python", platform.python_version()),
        row("torch", torch.__version__),
        row("triton", triton.__version__),
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
    tried = "a torch that brings Triton 3.6 to 3.9"
    direct = triton_versions.launches_directly() and guard([torch.empty(1)]) is not None
    fix = "" if direct else f"{tried}: a call then costs the host a tenth"
    rows.append(row("launch", "plans, launched directly" if direct else "through Triton's public call", fix))
    lacks = triton_versions.probe().lacks
    found = "in Gluon" if lacks is None else f"portable ones: this Triton's Gluon is another ({lacks})"
    rows.append(row("kernels for Hopper", found, "" if lacks is None else f"{tried}, on sm_90"))
    rows.append(row("your tuned rows", str(config.folder())))
    for name in ("pytest", "ruff"):
        if importlib.util.find_spec(name) is None:
            rows.append(row(name, "not installed", "only for working on tilewright: make env"))
    show(rows, "this machine", as_json)
