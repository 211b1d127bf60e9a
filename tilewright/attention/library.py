"""The forward of `attention` by cuDNN, through torch: what it takes, and how its results become ours.

torch's function takes [batch, heads, length, head_dim] in any strides, so ours are handed over as views, and fewer heads of keys
than of queries as they are. It allocates o in the order in which q lies, and lse as [batch, heads, length, 1], natural logarithms
in fp32. Its causal mask begins at the upper left, which is ours where there are as many keys as queries. The backward of such a
call is our own: cuDNN's is not repeatable. Where both it and our kernels can be used, `preference.py` says which is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..core.target import Target
from ..runtime.choose import forced
from ..runtime.plan import Call, Made
from .preference import LIBRARY, library_wanted

SIXTEEN = (torch.bfloat16, torch.float16)
WIDEST = 256  # columns of a head, on the chips where torch lets cuDNN have more than 128
MOST = 65535  # of a batch and of heads: a launch has no more programs in these directions
LARGEST = 2**31  # elements of a tensor
SCALED_DOT_PRODUCT = (
    "query", "key", "value", "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask", "scale",
)  # fmt: skip
NONE_OF = ("left", "right", "sink", "slopes", "mask", "kv_len", "cu_seqlens_q", "cu_seqlens_k")


def refusal(a: SimpleNamespace) -> str | None:
    """Why cuDNN does not compute a call as ours is defined, even through a torch that has all of it; None if it does. Each reason
    begins with the name of an argument. It is asked of tensors without memory too: where they lie, `fits` looks."""
    q, k, v = a.q, a.k, a.v
    if q.dtype not in SIXTEEN or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v must be bfloat16 or float16, got {', '.join(str(t.dtype).removeprefix('torch.') for t in (q, k, v))}"
    given = next((name for name in NONE_OF if getattr(a, name) is not None), None)
    if given is not None:
        return f"{given} is not taken"
    if a.softcap:
        return f"softcap must be 0, got {a.softcap:g}"
    if a.scale is not None and not a.scale > 0:
        return f"scale must be more than 0, got {a.scale:g}"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not t.numel() or t.numel() >= LARGEST:
            return f"{name} must have 1 to 2**31 - 1 elements, got {t.numel()}"
        if t.shape[-1] % 8 or t.shape[-1] > WIDEST:
            return f"{name} must have a multiple of 8 columns, {WIDEST} at most, got {t.shape[-1]}"
    if max(q.shape[0], q.shape[2]) > MOST:
        return f"q must have a batch and heads of {MOST} at most, got {q.shape[0]} and {q.shape[2]}"
    if k.shape[1] < 2:
        return "k must have 2 keys or more, got 1"
    if a.causal and q.shape[1] != k.shape[1]:
        return f"causal needs as many keys as queries, got {k.shape[1]} and {q.shape[1]}"
    for name, t in (("q", q), ("k", k), ("v", v)):
        strides = [stride for stride, size in zip(t.stride()[:-1], t.shape) if size > 1]
        if t.stride(-1) != 1 or any(stride == 0 or stride % 8 for stride in strides):
            return f"{name} must have columns side by side, in rows of their own that are multiples of 16 bytes apart"
    return None


@functools.cache
def entry_point() -> Callable[..., Any] | None:
    """torch's function; None where it has none, or one with other arguments: it is private. Only a CUDA build has it."""
    packet = getattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", None)
    if packet is None or torch.version.cuda is None:
        return None
    known = tuple(argument.name for argument in packet.default._schema.arguments) == SCALED_DOT_PRODUCT
    return packet.default if known else None


def absence() -> str | None:
    """Why this torch gives no access to cuDNN's attention; None if it does."""
    return None if entry_point() is not None else f"torch {torch.__version__} has no attention of cuDNN, or another one"


def offered(a: SimpleNamespace) -> bool:
    """Whether torch would let cuDNN have such a call: it knows which versions and chips take what, and whether somebody has
    switched cuDNN's attention off or asked for deterministic algorithms alone. It is asked when a kind of call is first made."""
    if entry_point() is None or not a.q.is_cuda:
        return False
    views = (t.detach().transpose(1, 2) for t in (a.q, a.k, a.v))
    params = torch.backends.cuda.SDPAParams(*views, None, 0.0, a.causal, a.q.shape[2] != a.k.shape[2])
    return torch.backends.cuda.can_use_cudnn_attention(params)


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether cuDNN takes a call, torch gives access to it, and it is the faster or was asked for. It was measured where its
    results are the caller's as they are: where they would have to be copied, it is taken by name alone."""
    if not target.nvidia or refusal(a) is not None or any(t.data_ptr() % 16 for t in (a.q, a.k, a.v)):
        return False
    asked = LIBRARY in (a.backend, forced.get())
    if not asked and (a.out is not None or not token_by_token(a.q) or not library_wanted(target, a)):
        return False
    return offered(a)


def token_by_token(q: Tensor) -> bool:
    """Whether q lies in the order of its dimensions, with or without room between them: then so does what cuDNN makes of it."""
    strides = [stride for stride, size in zip(q.stride(), q.shape) if size > 1]
    return all(outer >= inner for outer, inner in zip(strides, strides[1:]))


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, out: Any, **_: Any
) -> tuple[Tensor, Tensor]:
    """(o, lse), in memory that cuDNN's function allocates or, copied, in the caller's."""
    attend = functools.partial(attended, causal, scale)
    o, lse = out if isinstance(out, tuple) else (out, None)

    def like() -> tuple[Tensor, Tensor]:
        batch, length, heads, _ = q.shape
        return (
            torch.empty(batch, length, heads, v.shape[-1], dtype=q.dtype, device=q.device) if o is None else o,
            torch.empty(batch, heads, length, dtype=torch.float32, device=q.device) if lse is None else lse,
        )

    if o is None and lse is None:
        return Made.of(attend, (q, k, v), like)
    results = like()
    Call.now(functools.partial(copied, attend), q, k, v, *results)
    return results


def attended(causal: bool, scale: float | None, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(o, lse) by cuDNN, as ours lie."""
    batch, length, heads, _ = q.shape
    views = (t.transpose(1, 2) for t in (q, k, v))
    o, lse, *_ = entry_point()(*views, None, True, 0.0, causal, False, scale=scale)
    return o.transpose(1, 2).contiguous(), lse.reshape(batch, heads, length).contiguous()


def copied(
    attend: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor
) -> None:
    for there, made in zip((o, lse), attend(q, k, v)):
        there.copy_(made)
