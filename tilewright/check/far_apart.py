"""Tensors whose elements lie more than 2^31 apart: `python -m tilewright.check.far_apart OP DEVICE [FILE]`.

The memory is reserved and never touched but for the few elements in use, so this costs address space alone. Strides stay below
2^31: a larger one would be passed to kernels as 64 bits and hide a 32-bit product.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import torch
from torch import Tensor

from .memory import reserve

if TYPE_CHECKING:
    from ..op import Op

LIMIT = 300  # seconds in a fork
STRIDE = 1_200_000_007  # two steps of it pass 2^31, and it is odd


def spread(t: Tensor, axis: int, device: str) -> Tensor:
    """`t` with neighbours along `axis` STRIDE elements apart, the other dimensions dense."""
    stride = [0] * t.dim()
    step = 1
    for d in reversed([d for d in range(t.dim()) if d != axis]):
        stride[d], step = step, step * t.shape[d]
    stride[axis] = STRIDE
    wide = reserve((t.shape[axis] - 1) * STRIDE + step + 16, t.dtype, device)
    return wide.as_strided(t.shape, stride).copy_(t)


def room(device: str) -> float:
    """Bytes that may be spread at a time: a third of a device's memory; a CPU need not have it."""
    return float("inf") if device == "cpu" else 0.3 * torch.cuda.get_device_properties(0).total_memory


def there_is_room(t: Tensor, axis: int, device: str) -> bool:
    """Whether `t` can be spread along an axis."""
    return t.shape[axis] * STRIDE * t.element_size() < room(device)


def spread_together(op: Op, places: Mapping[str, Tensor], device: str) -> Iterator[list[tuple[str, int]]]:
    """Which tensors are spread in one call, and along which axis, until each was along each that has three elements. Along one axis
    as many as there is room for: a wrong offset shows among right ones. But each alone where there are several implementations,
    for strides choose between them."""
    alone = op.composite or len(op.implementations) > 1
    for axis in range(max((t.dim() for t in places.values()), default=0)):
        some: list[tuple[str, int]] = []
        left = room(device)
        for place, t in places.items():
            copies = 2 if place in op.writes else 1  # what is written is copied before
            if t.dim() <= axis or t.shape[axis] < 3 or not t.numel():
                continue
            taken = copies * t.shape[axis] * STRIDE * t.element_size()
            if some and (alone or taken >= left):
                yield some
                some, left = [], room(device)
            if taken < left:
                some.append((place, axis))
                left -= taken
        if some:
            yield some


def load(path: str, name: str) -> Any:
    """A file of ops that is not part of the library, as if it stood beside the library's own."""
    spec = importlib.util.spec_from_file_location(f"tilewright.ops.{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main(name: str, device: str, source: str = "") -> None:
    import tilewright as tw

    from ..op import OPS

    tw.catalogue()
    if source:
        load(source, "loaded_" + name)
    end_after(lambda: check(OPS[name], device), sys.stderr)


def end_after(work: Callable[[], None], said: TextIO) -> NoReturn:
    """End the process after `work`, with status 0 if it did not raise; else `said` has the traceback.

    Nothing is tidied up. In a fork that is the parent's to do. Elsewhere autograd's threads have outlived the last backward: one
    that asks for the interpreter's lock while Python shuts down is ended inside of C++, and the process aborts: "terminate called
    without an active exception".
    """
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc(file=said)
        said.flush()
    finally:
        os._exit(status)


def in_a_fork(op: Op) -> tuple[int, str]:
    """`check` on the CPU in a copy of this process: its status, negative for a signal, and what it printed."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:

        def work() -> None:
            signal.setitimer(signal.ITIMER_PROF, LIMIT)  # of CPU time: a busy machine is no fault
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            check(op, "cpu")

        child = os.fork()
        if child == 0:
            end_after(work, said)
        _, waited = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(waited), said.read()


def check(op: Op, device: str) -> None:
    """Every tensor argument, upstream gradient and `out` spread along each axis: the bits of a dense one."""
    from .cases import Net, choices, draw, put, tensors
    from .oracle import fresh, outcome, same_outcome

    net = Net(device=device, interpreter=device == "cpu")
    sizes = {"tokens": 3, "batch": 1, "length": 3, "hidden": 3, "vocab": 3, "heads": 3, "head_dim": 16, "experts": 2}
    sizes |= {"columns": 3, "rows": 3}
    case = draw(op, net, 70, torch.bfloat16, sizes, full=True)
    with net.kernels():
        expected = outcome(op, case.values)
        grads = {f"upstream gradient {i}": g for i, g in enumerate(expected.grads)}
        places = {**tensors(op, case.values), **grads}
        for some in spread_together(op, places, device):
            wide = {place: spread(places[place], axis, device) for place, axis in some}
            values = put(case.values, {n: t for n, t in wide.items() if n not in grads})
            actual = outcome(op, values, grads=[wide.get(n, g) for n, g in grads.items()] or None)
            label = ", ".join(f"{place} wide along {axis}" for place, axis in some)
            same_outcome(f"{case.label}: {label}", actual, expected, op, values, True)
            del wide, values, actual
        alone = len(op.result_rows) == 1 and not op.signature.listed and not op.out.contiguous
        if alone and None in choices(op, device):  # a plain result, in whatever strides
            with torch.no_grad():
                plain = op.function(**fresh(op, case.values))
                for axis in (d for d in range(plain.dim()) if there_is_room(plain, d, device)):
                    out = spread(torch.zeros_like(plain), axis, device)
                    made = op.function(**{**fresh(op, case.values), "out": out})
                    same_outcome(
                        f"{case.label}: out wide along {axis}", {"out": made}, {"out": plain}, another_binary=True
                    )
                    del out, made


if __name__ == "__main__":
    main(*sys.argv[1:])
