"""Names of torch that are not public, each with what is done where a torch does not have it: slower, or an error, never wrong.

Of the machinery only this module, `triton_versions.py` and the launches of `runtime/` touch private names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch


def modes_of(torch_c: Any) -> Callable[[], int]:
    """How many dispatch modes are active. Where torch does not say, always one: every call then goes through the registered op,
    which modes see."""
    return getattr(torch_c, "_len_torch_dispatch_stack", None) or (lambda: 1)


def transforms_of(torch_c: Any) -> Callable[[], bool]:
    """Whether a transform of torch.func is active. Where torch does not say, always: as above."""
    return getattr(torch_c, "_are_functorch_transforms_active", None) or (lambda: True)


def keeps_graph_of(torch_c: Any) -> Callable[[], bool]:
    """Whether the backward that is running may be run again. Where torch does not say, it may: nothing saved is written over."""
    return getattr(getattr(torch_c, "_autograd", None), "_get_current_graph_task_keep_graph", None) or (lambda: True)


def raw_stream_of(torch_c: Any) -> Callable[[int], int]:
    """The address of the current stream of a device. Without torch's own function it is read off the public object."""
    return getattr(torch_c, "_cuda_getCurrentRawStream", None) or (
        lambda device: torch.cuda.current_stream(device).cuda_stream
    )


def count_write_of(torch_c: Any) -> Callable[[Sequence[Tensor]], None]:
    """Counts a write of tensors for autograd, as an operator in place does. Without torch's own function, by the public one, which
    first asks what it was given."""
    return getattr(torch_c, "_increment_version", None) or torch.autograd.graph.increment_version


def checked_view(base: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
    """A tensor over another's memory, so many elements past its start. Torch asks whether memory goes so far."""
    return base.as_strided(sizes, strides, base.storage_offset() + offset)


def strided_view_of(guards: Any) -> Callable[[Tensor, tuple[int, ...], tuple[int, ...], int], Tensor]:
    """`checked_view` where memory is known to go so far, for code that autograd does not look at. Torch's own, of which Inductor's
    code makes its views, passes the dispatcher by, asks nothing and is unknown to autograd."""
    return getattr(guards, "_reinterpret_tensor", None) or checked_view


def no_modes_of(dispatch: Any) -> Callable[[], Any]:
    """A context in which no dispatch mode is active. Without it modes see what they should not, and a run makes no plan."""
    return getattr(dispatch, "_disable_current_modes", None) or contextlib.nullcontext


def no_torch_function_of(torch_c: Any) -> Any:
    """The `__torch_function__` of a subclass that overrides nothing at that level; torch's own skips the search for it."""

    def plain(cls: type, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch_c.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    return getattr(torch_c, "_disabled_torch_function_impl", None) or classmethod(plain)


DispatchMode = _python_dispatch.TorchDispatchMode  # its documented home has a private name
modes = modes_of(torch._C)
no_torch_function = no_torch_function_of(torch._C)
no_modes = no_modes_of(_python_dispatch)
transforms = transforms_of(torch._C)
keeps_graph = keeps_graph_of(torch._C)
raw_stream = raw_stream_of(torch._C)
count_write = count_write_of(torch._C)
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # C++ that torch.compile's own code calls
# What Inductor's code allocates with: past the dispatcher, at a third of the cost of torch.empty. None where torch has it not
empty_strided_cuda: Callable | None = getattr(_guards, "_empty_strided_cuda", None)
strided_view = strided_view_of(_guards)


def guard(tensors: list[Tensor], guards: Any = _guards) -> Callable[..., bool] | None:
    """A check, in one call, that tensors are of the very kind of these: type, dtype, device, sizes, strides, whether they
    require a gradient, and the dispatch keys in force (so dispatch modes, transforms, autocast and inference mode are seen).

    It is the C++ guard of torch.compile. Reading the same from Python costs four times as much; where torch has no such class,
    or another, there is no guard and calls take the keyed path.
    """
    if not hasattr(guards, "TensorGuards"):
        return None
    sizes = [list(t.shape) for t in tensors]
    strides = [list(t.stride()) for t in tensors]
    try:
        check = guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check if check(*tensors) else None
    except (TypeError, ValueError, RuntimeError):
        return None


def last_backward() -> bool:
    """Whether this is a backward after which nothing reads what was saved for it, so that it may be written over."""
    return not keeps_graph()


# ---------------------------------------------------------------- forward-mode differentiation


class _Level:
    """Stands in for `torch.autograd.forward_ad` where that does not say which level is open: one always is, and every call asks
    for tangents, which is slower."""

    _current_level = 0


levels = forward_ad if hasattr(forward_ad, "_current_level") else _Level


def has_tangent(tensor: Tensor) -> bool:
    """Whether forward-mode differentiation goes through a tensor. Inside torch.func a tensor that a transform has wrapped counts
    while a level is open: what is under its wrappers cannot be asked for."""
    if levels._current_level < 0:
        return False
    wrapped = getattr(torch._C, "_functorch", None)
    if wrapped is None or wrapped.is_gradtrackingtensor(tensor) or wrapped.is_batchedtensor(tensor):
        return True
    return forward_ad.unpack_dual(tensor).tangent is not None


# ---------------------------------------------------------------- autograd inside a dispatch mode


@contextlib.contextmanager
def recording(torch_c: Any = torch._C) -> Iterator[None]:
    """Let autograd record the reference, whose backward it is: a dispatch mode takes autograd away from what it calls, and all
    gradients would be 0."""
    names = "_dispatch_tls_is_dispatch_key_excluded", "_dispatch_tls_set_dispatch_key_excluded"
    if not all(hasattr(torch_c, name) for name in names):
        raise RuntimeError(
            "this torch does not let a registered backward use autograd: call the op outside torch.compile and dispatch modes"
        )
    is_excluded, exclude = (getattr(torch_c, name) for name in names)
    keys = torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView
    taken = [key for key in keys if is_excluded(key)]
    for key in taken:
        exclude(key, False)
    try:
        yield
    finally:
        for key in taken:
            exclude(key, True)


def apply_of(function: type[torch.autograd.Function]) -> Callable:
    """`function.apply` without the search for transforms of functorch, which cost 4 us of each call and never come this far: of
    torch's own base class where that has it, else the public one."""
    base = super(torch.autograd.Function, function)
    return getattr(base, "apply", None) or function.apply
