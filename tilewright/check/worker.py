"""The properties of ops and their calls in models, one request each: `python -m tilewright.check.worker [--interpreter] FD`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def properties(interpreter: bool) -> dict[str, Callable]:
    """By name, the properties that mean something where kernels run."""
    from .properties import VALUES
    from .registration import compiled, fakes, refusals, registered

    chosen = (*VALUES, refusals, fakes) if interpreter else (*VALUES, refusals, fakes, registered, compiled)
    return {one.__name__: one for one in chosen}


def main(words: list[str]) -> None:
    interpreter = "--interpreter" in words
    if interpreter:
        os.environ["TRITON_INTERPRET"] = "1"  # read by Triton as it is imported, so before everything else
    import torch

    from .. import catalogue
    from . import model_run
    from .cases import Net
    from .guarded import READY, serve

    net = Net(interpreter=True) if interpreter else Net(device="cuda", cases=21, largest=64 * 1024)
    known = properties(interpreter)

    def answer(line: str) -> dict[str, Any]:
        asked = json.loads(line)
        if "property" not in asked:
            call = model_run.read(line)
            return model_run.answer(catalogue()[call.op], call, net)
        start = time.monotonic()
        known[asked["property"]](catalogue()[asked["op"]], net)
        return {"seconds": round(time.monotonic() - start, 2)}

    status = READY if interpreter or torch.cuda.is_available() else "no CUDA device"
    with os.fdopen(int(words[-1]), "w") as replies:
        serve(answer, (AssertionError,), sys.stdin, replies, status)


if __name__ == "__main__":
    main(sys.argv[1:])
