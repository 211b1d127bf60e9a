"""What ours is timed beside: the same operation by somebody else, in the same run, checked too.

`eager` is the op's own reference as PyTorch runs it, `compile` the reference through torch.compile; those of packages are in
`packaged.py`, the others here. A rival's backward is timed alone, through autograd, as ours is without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

import tilewright as tw

from ..core.flat import as_tuple
from ..core.format import Quantized
from ..core.target import Target
from . import check, packaged
from .directed import Absent, Call, directed
from .programs import PROGRAMS, Program
from .replaced import ADDED, CALLS, Replaced
from .work import Work

LOOSE = 2e-2  # relative RMS: rivals may round where we do not


def known() -> list[str]:
    return ["eager", "compile", *packaged.RIVALS, *NAMED, *OF_PROGRAMS]


def missing(name: str) -> str | None:
    """Why a rival cannot be had on this machine at all, or None."""
    if name in packaged.RIVALS:
        return packaged.missing(name)
    return None if name in known() else f"{name}: no such rival; there are {', '.join(known())}"


def call_of(name: str, work: Work) -> Call:
    """The rival's call over a buffer set. Raises `Absent`."""
    why = missing(name)
    if why is not None:
        raise Absent(why)
    if name in packaged.RIVALS:
        return packaged.call_of(name, work)
    if isinstance(work, Program):
        return work.rival(name)
    if name in NAMED:
        return NAMED[name](work)
    if name in OF_PROGRAMS:
        raise Absent(f"{name} has nothing for {work.case.op}")
    if isinstance(work, Replaced):
        return work.plain if name == "eager" else _compiled_operators(work)
    if name == "eager":
        return directed(_reference(work), work)
    torch._dynamo.reset()
    return directed(torch.compile(_reference(work), dynamic=False), work)


def _reference(work: Work) -> Callable[..., Any]:
    """The op's reference, less what it gives for the backward alone, and what the arguments become that it would write."""
    op = work.op
    if not op.hidden and not op.writes:
        return op.reference

    def public(**given: Any) -> Any:
        results = as_tuple(op.apart(op.reference(**given))[0])
        shown = results[: len(results) - op.hidden]
        return shown[0] if len(shown) == 1 else shown

    return public


def _compiled_operators(work: Replaced) -> Call:
    function, given = _compiled_once(work.function), work.given
    return lambda: function(*given)


@functools.lru_cache(maxsize=1)
def _compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's operators by torch.compile: all buffer sets of a case have the same, and the next case another."""
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def _aten(work: Replaced) -> Call:
    """torch's operators as they are."""
    if not isinstance(work, Replaced):
        raise Absent(f"{work.case.family} is no call of torch's operators")
    return work.plain


def finished(call: Call) -> Any:
    """The result of a rival's call, completed by its `finish` where it leaves a step undone."""
    return getattr(call, "finish", lambda result: result)(call())


def agrees(mine: Any, theirs: Any, loose: float = LOOSE) -> bool:
    """Whether a rival's result, perhaps in two halves, is near ours, which was checked."""
    ours, others = _tensors(mine), _tensors(theirs)
    if len(ours) == 1 and len(others) == 2:
        others = [torch.cat(others, -1)]
    for a, b in zip(ours, others):
        a, b = a.double(), b.double()
        if a.shape != b.shape or not float((a - b).norm()) <= loose * float(a.norm()) + 1e-12:
            return False
    return True


def bar(name: str, work: Work) -> float:
    """The relative RMS by which a rival may be off ours."""
    loose = check.COARSE.low if work.coarse else LOOSE
    rough = ROUGH.get(work.case.call, 0.0) if work.case.dtype == "bfloat16" else 0.0
    return max(loose, LOOSER.get(name, 0.0), rough)


def _tensors(result: Any) -> list[Tensor]:
    made = result if isinstance(result, (tuple, list)) else (result,)
    return [r.dequantize() if isinstance(r, Quantized) else torch.as_tensor(r) for r in made if r is not None]


@triton.jit
def nothing(X):
    """A launch, and no more."""


def _empty(work: Work) -> Call:
    """A kernel that does nothing: what a launch costs in the chain that a case is timed in."""
    x = next(v for v in work.values.values() if type(v) is Tensor)

    def call() -> None:  # a launch returns the kernel, and no result
        nothing[(1,)](x, num_warps=4)

    return call


def _torch_add(work: Work) -> Call:
    x = next(v for v in work.values.values() if type(v) is Tensor)
    other = x.clone()
    return lambda: torch.add(x, other)


def _torch_add_out(work: Work) -> Call:
    x = next(v for v in work.values.values() if type(v) is Tensor)
    other, y = x.clone(), torch.empty_like(x)
    return lambda: torch.add(x, other, out=y)


def _plain(work: Work) -> Call:
    """The same call of ours without codes: what making them, or being given them, costs the host is the rest."""
    if work.case.way == "quantised" and "offsets" in work.values:
        a, weights, offsets = work.values["a"].bfloat16(), work.values["b"].mT.bfloat16(), work.values["offsets"]
        return lambda: tw.grouped_mm(a, weights, offsets, transposed_b=True)
    if work.values.get("out_format") is None:
        raise Absent(f"{work.case.family} makes no codes")
    return work.forward({**work.values, "out_format": None})


def _foreach_norm(work: Work) -> Call:
    """The norm of each tensor by one call of torch's, as `clip_grad_norm_` has it."""
    if work.case.op != "multi_tensor_norm":
        raise Absent(f"torch's norms have nothing for {work.case.family}")
    tensors = work.values["tensors"]
    return lambda: torch._foreach_norm(tensors)


def _torch_rms_norm(work: Work) -> Call:
    if work.case.op != "rms_norm":
        raise Absent(f"torch's norm has nothing for {work.case.family}")
    norm = torch.nn.functional.rms_norm
    if work.steps:  # of which the host's time is taken: as somebody writes it, too
        x, weight, eps = (work.given[name] for name in ("x", "weight", "eps"))
        return work.stepped(lambda: norm(x, x.shape[-1:], weight, eps))
    return directed(lambda x, weight, eps, **_: norm(x, x.shape[-1:], weight, eps), work)


def _torch_scaled_mm(work: Work) -> Call:
    """torch's public product, with scales as it wants them; before that came, what stands behind it."""
    from ..gemm import library

    if work.case.op != "scaled_mm" or not (work.values["a"].is_cuda and library.takes(work.values)):
        raise Absent(f"torch's scaled product has nothing for {work.case.family}")
    function = getattr(torch.nn.functional, "scaled_mm", None)
    if function is None:
        return library.prepared(work.values)
    a, b, scale_a, scale_b, bias = library.multiplied(work.values).tensors
    kinds = [getattr(torch.nn.functional.ScalingType, work.values[n]) for n in ("recipe_a", "recipe_b")]
    dtype = getattr(torch, work.values["out_dtype"])
    return lambda: function(a, b, scale_a, kinds[0], scale_b, kinds[1], bias=bias, output_dtype=dtype)


def _cublas_f32out(work: Work) -> Call:
    x, weight = work.values["x"], work.values["weight"].t()
    return lambda: torch.mm(x, weight, out_dtype=torch.float32)


def _torch_tf32(work: Work) -> Call:
    """The two gradients of a linear layer by torch's TF32 products, of fp32 copies that were made before."""
    x, weight, dy = (t.float() for t in (work.values["x"], work.values["weight"], work.grads[0]))
    dtype = work.values["x"].dtype

    def call() -> tuple[Tensor, Tensor]:
        before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
        try:
            return torch.mm(dy, weight).to(dtype), torch.mm(dy.t(), x).to(dtype)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return call


def _torch_embedding(work: Work) -> Call:
    if work.case.op != "embedding":
        raise Absent(f"torch's embedding has nothing for {work.case.family}")
    function = torch.nn.functional.embedding
    return directed(lambda ids, weight, padding_idx: function(ids, weight, padding_idx), work)


class _Spread(torch.autograd.Function):
    """The row of each pair's token; the gradient is the sum of a token's rows, so that nothing is added atomically."""

    @staticmethod
    def forward(ctx, x, order, inverse, k):
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, d):
        (inverse,) = ctx.saved_tensors
        return d[inverse].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Collect(torch.autograd.Function):
    """The sum of each token's rows: the transpose of `_Spread`."""

    @staticmethod
    def forward(ctx, rows, order, inverse, k):
        ctx.save_for_backward(order)
        ctx.k = k
        return rows[inverse].unflatten(0, (-1, k)).sum(1)

    @staticmethod
    def backward(ctx, dy):
        (order,) = ctx.saved_tensors
        return dy[order // ctx.k], None, None, None


def _grouped_product() -> Callable[..., Tensor]:
    return getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # the public name is younger


def _torch_grouped(work: Work) -> Call:
    """torch's grouped product of rows or of tokens, of which it makes results in the dtype of its factors alone."""
    a, b, offsets = (work.values.get(n) for n in ("a", "b", "offsets"))
    if work.case.op not in ("grouped_mm_rows", "grouped_mm_inner") or a.dtype != torch.bfloat16:
        raise Absent(f"torch's grouped product has nothing for {work.case.family}")
    product, ends = _grouped_product(), offsets.to(torch.int32)
    return lambda: product(a, b, offs=ends)


def _experts_bf16(x: Tensor, gate_up: Tensor, down: Tensor, routing: Tensor, probs: Tensor, **_: Any) -> Tensor:
    """Pairs sorted by expert, torch's grouped products, silu and the rest for Inductor to fuse."""
    experts, k = gate_up.shape[0], routing.shape[1]
    flat = routing.reshape(-1)
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    bounds = torch.arange(experts, device=flat.device)
    ends = torch.searchsorted(flat[order], bounds, right=True).to(torch.int32)
    product = _grouped_product()
    h = product(_Spread.apply(x, order, inverse, k), gate_up.transpose(1, 2), offs=ends)
    gate, up = h.float().chunk(2, -1)
    act = torch.nn.functional.silu(gate) * up * probs.reshape(-1)[order].unsqueeze(-1)
    return _Collect.apply(product(act.to(x.dtype), down.transpose(1, 2), offs=ends), order, inverse, k)


def _compile_bf16(work: Work) -> Call:
    """A mixture of experts in bf16 by torch.compile, whatever our precision is."""
    if work.case.op != "moe_feed_forward":
        raise Absent(f"there is no such program for {work.case.family}")
    torch._dynamo.reset()
    return directed(torch.compile(_experts_bf16, dynamic=False), work)


def _cublaslt(work: Work) -> Call:
    """cuBLASLt through torch, with scales as it wants them."""
    from ..gemm import library

    if work.case.op != "scaled_mm" or not library.takes(work.values):
        raise Absent(f"cuBLASLt has nothing for {work.case.family}")
    return library.prepared(work.values)


def _torch_int_mm(work: Work) -> Call:
    """cuBLAS's product of int8, whose sums are left without their scales."""
    a, b, scale_a, scale_b = (work.values[n] for n in ("a", "b", "scale_a", "scale_b"))
    if a.dtype != torch.int8 or b.dtype != torch.int8:
        raise Absent("torch._int_mm takes int8")

    def call() -> Tensor:
        return torch._int_mm(a, b)

    call.finish = lambda sums: sums.double() * scale_a * scale_b.t()
    return call


def _cublaslt_loop(work: Work) -> Call:
    """One cuBLASLt call a group, of operands and scales that were cut before; results lie apart."""
    from ..gemm import library

    calls, finish = library.calls_by_group(work.case.op, work.values)

    def call() -> list[Tensor]:
        return [one() for one in calls]

    call.finish = finish
    return call


def _cublas(work: Work) -> Call:
    if work.case.op not in ("matmul", "sparse_mm") or not work.values["a"].is_floating_point():
        raise Absent(f"torch.mm has nothing for {work.case.family}")
    a, b = work.values["a"], work.values["b"]
    return lambda: torch.mm(a, b)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, **_: Any) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def _silu_linear(x: Tensor, weight: Tensor, bias: Tensor | None, up: Tensor, **_: Any) -> Tensor:
    return torch.nn.functional.linear(torch.nn.functional.silu(x) * up, weight, bias)


def _torch_linear(work: Work) -> Call:
    """A linear layer in the dtype of its arguments."""
    function = {"linear_fp8": _linear, "glu_linear": _silu_linear}.get(work.case.op)
    if function is None:
        raise Absent(f"torch's linear layer has nothing for {work.case.family}")
    return directed(function, work)


BACKENDS = ("portable", "hopper_latent", "hopper_latent_few")  # that cases have beside the one they ask for


def _backend(name: str, work: Work) -> Call:
    """Our own kernels of another backend than the case asks for: those that any chip takes, or others of one chip."""
    asks, named = work.op.asks, [one for one in work.op.implementations if one.name == name]
    if asks is None or not named:
        raise Absent(f"{work.case.op} has no backend of that name")
    if work.values[asks] == name:
        raise Absent("it is what the case itself measures")
    target = Target.at(next(t for t in work.values.values() if type(t) is Tensor).device)
    if not any(one.takes(target, SimpleNamespace(**{**work.values, asks: name})) for one in named):
        raise Absent("it does not take the call")
    return work.by(**{asks: name}).call


def _cudnn_lse(work: Work) -> Call:
    """Our own call with the forward left to cuDNN, which gives lse as well: what `auto` would take."""
    from ..attention import library

    if work.case.op not in ("attention", "attention_lse") or work.case.direction != "forward":
        raise Absent(f"cuDNN has no forward for {work.case.family}")
    given = SimpleNamespace(**work.values)
    why = library.refusal(given) or library.absence() or (None if library.offered(given) else "torch does not offer it")
    if why is not None:
        raise Absent(why)
    return work.by(backend=library.LIBRARY).call


def _torch(work: Work) -> Call:
    """A token from each row as torch code takes it where limits are tensors: a sort, probabilities, their running sum, and the race
    of exponential numbers that `torch.multinomial` is (it waits for the device itself). Its draws are its own: what is compared is
    the token that our random number takes from the logits that it kept, and from those that equal the last of them."""
    if work.case.op != "sample" or work.values["top_k"] is None or work.values["top_p"] is None:
        raise Absent(f"there is no such program for {work.case.family}")
    z, seed, t, k, p = (work.values[n] for n in ("logits", "seed", "temperature", "top_k", "top_p"))
    last = (k.long() - 1).clamp(0, z.shape[-1] - 1).unsqueeze(-1)

    def call() -> tuple[Tensor, ...]:
        falling, order = (z.float() / t[:, None]).sort(-1, descending=True)
        share = torch.softmax(falling.masked_fill(falling < falling.gather(-1, last), -torch.inf), -1)
        share = share.masked_fill(share.cumsum(-1) - share >= p[:, None], 0.0)
        ids = order.gather(-1, (share / torch.empty_like(share).exponential_()).argmax(-1, keepdim=True))
        return ids, share, falling, order

    def finish(made: tuple[Tensor, ...]) -> Tensor:
        from ..ops.sampling.sample import philox

        _, share, falling, order = (one.double() if one.is_floating_point() else one for one in made)
        least = torch.where(share > 0, falling, torch.inf).amin(-1, keepdim=True)
        weight = torch.exp(falling - falling[:, :1]).masked_fill(falling < least, 0.0)
        running = torch.zeros_like(weight).scatter(-1, order, weight).cumsum(-1)
        high, low = philox(seed)
        u = (high.double() * 2.0**-32 + low.double() * 2.0**-64)[:, None]
        return (running <= u * running[:, -1:]).sum(-1)

    call.finish = finish
    return call


# Relative RMS by which a rival may be off ours that does not quantise, or not the cache, or rounds in between
LOOSER = {"torch_linear": 8e-2, "compile_graph": 8e-2}
# The same of calls of torch's operators in bf16 where others round after each addition: ours is held to float64 before. Half of
# 65536 rows onto one are 32768 roundings, which come to 0.20 of that row and to 0.14 of the result
ROUGH = {name: 0.5 for name, call in CALLS.items() if call.tensors == ADDED}
# Rivals that programs know themselves
OF_PROGRAMS = sorted({name for program in PROGRAMS.values() for name in program.rivals})
# Rivals that goals name, for the cases that name them
NAMED: dict[str, Callable[[Work], Call]] = {
    "aten": _aten,
    "empty": _empty,
    "torch": _torch,
    "plain": _plain,
    "foreach_norm": _foreach_norm,
    "torch_add": _torch_add,
    "torch_add_out": _torch_add_out,
    "torch_rms_norm": _torch_rms_norm,
    "torch_scaled_mm": _torch_scaled_mm,
    "cublas_f32out": _cublas_f32out,
    "torch_tf32": _torch_tf32,
    "torch_embedding": _torch_embedding,
    "compile_bf16": _compile_bf16,
    "cublas": _cublas,
    "cublaslt": _cublaslt,
    "cublaslt_loop": _cublaslt_loop,
    "torch_int_mm": _torch_int_mm,
    "torch_grouped": _torch_grouped,
    "torch_linear": _torch_linear,
    **{name: functools.partial(_backend, name) for name in BACKENDS},
    "cudnn_lse": _cudnn_lse,
}
