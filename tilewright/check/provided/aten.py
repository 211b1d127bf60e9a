"""Torch's own operators, replaced: one plain call of every overload, made from its schema but for arguments whose names do not say
what they are, and held against aten.

Tensors are small and of fp32, or of int32 where an operator takes integers alone; `make` may give others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tilewright as tw

from ...aten import table
from ...aten.leaves import LEAVES
from ...aten.table import overload_of
from ...core.target import INTERPRETING

Make = Callable[..., Tensor]
SHAPE = (6, 40)
INTEGERS = ("bitwise_and", "bitwise_or", "bitwise_not")
# Arguments of an overload that a schema does not tell, by its name, or the operator's without the underscore
GIVEN: dict[str, Callable[[Make], dict[str, Any]]] = {
    "addr": lambda make: {"vec1": make(SHAPE[:1]), "vec2": make(SHAPE[1:])},
    "arange": lambda make: {"start": 1, "end": 9, "step": 2, "device": make(()).device},
    "eye": lambda make: {"n": 4, "m": 5, "device": make(()).device},
    "full": lambda make: {"size": [3, 4], "device": make(()).device},
    "linspace": lambda make: {"start": 0.5, "end": 3.0, "steps": 7, "device": make(()).device},
    "logspace": lambda make: {"start": 0.5, "end": 3.0, "steps": 7, "base": 2.0, "device": make(()).device},
    "ones": lambda make: {"size": [3, 4], "device": make(()).device},
    "zeros": lambda make: {"size": [3, 4], "device": make(()).device},
    "cat": lambda make: {"tensors": [make(SHAPE), make(SHAPE)], "dim": 1},
    "contiguous": lambda make: {"self": make(SHAPE).t()},
    "diag": lambda make: {"self": make((6,))},
    "hstack": lambda make: {"tensors": [make(SHAPE), make(SHAPE)]},
    "pad": lambda make: {"pad": [1, 2]},
    "repeat_interleave": lambda make: {"repeats": 3},
    "stack": lambda make: {"tensors": [make(SHAPE), make(SHAPE)]},
    "tile": lambda make: {"dims": [2, 1]},
    "vstack": lambda make: {"tensors": [make(SHAPE), make(SHAPE)]},
    "clamp": lambda make: {"max": 1.0},
    "constant_pad_nd": lambda make: {"pad": [1, 2, 0, 1]},
    "diagonal_backward": lambda make: {"grad_output": make((6,)), "input_sizes": [6, 7], "offset": 1, "dim1": 0, "dim2": 1},
    "div": lambda make: {"rounding_mode": "floor"},
    "divide": lambda make: {"rounding_mode": "floor"},
    "dot": lambda make: {"self": make((40,)), "tensor": make((40,))},
    "elu_backward": lambda make: {"is_result": False},
    "flip": lambda make: {"dims": [0, 1]},
    "glu_backward": lambda make: {"grad_output": make((6, 20)), "dim": 1},
    "native_dropout_backward": lambda make: {"mask": make(SHAPE, torch.bool)},
    "pow": lambda make: {"exponent": 1.7},  # for which there is no formula but the general one
    "repeat": lambda make: {"repeats": [2, 1, 3]},
    "select_scatter": lambda make: {"src": make((40,)), "dim": 0, "index": 2},
    "slice_scatter": lambda make: {"src": make((6, 10)), "dim": 1, "start": 1, "end": 40, "step": 4},
    "vdot": lambda make: {"self": make((40,)), "other": make((40,))},
}  # fmt: skip
MATRIX_ROWS = {"normalized_shape": [40], "output_mask": [True, True, True]}
GROUPS = {"N": 6, "C": 4, "HxW": 5, "group": 2, "output_mask": [True, True, True]}
# The same of the engine `rows`
GIVEN |= {
    "_softmax": lambda make: {"half_to_float": False},
    "_softmax_backward_data": lambda make: {"input_dtype": make(SHAPE).dtype},
    "_log_softmax": lambda make: {"half_to_float": False},
    "_log_softmax_backward_data": lambda make: {"input_dtype": make(SHAPE).dtype},
    "native_layer_norm": lambda make: {"weight": make((40,)), "bias": make((40,)), **MATRIX_ROWS},
    "native_layer_norm_backward": lambda make: {
        "mean": make((6, 1)), "rstd": make((6, 1)), "weight": make((40,)), "bias": make((40,)), **MATRIX_ROWS,
    },
    "_fused_rms_norm": lambda make: {"weight": make((40,)), "eps": 0.5, **MATRIX_ROWS},
    "rms_norm": lambda make: {"weight": make((40,)), "eps": 0.5, "normalized_shape": [40]},
    "_fused_rms_norm_backward": lambda make: {
        "rstd": make((6, 1)), "weight": make((40,)), "normalized_shape": [40], "output_mask": [True, True],
    },
    "native_group_norm": lambda make: {"input": make((6, 4, 5)), "weight": make((4,)), "bias": make((4,)), **GROUPS},
    "native_group_norm_backward": lambda make: {
        "grad_out": make((6, 4, 5)), "input": make((6, 4, 5)), "mean": make((6, 2)), "rstd": make((6, 2)), "weight": make((4,)),
        **GROUPS,
    },
    "native_batch_norm": lambda make: {**{n: make((40,)) for n in ("weight", "bias", "running_mean", "running_var")},
                                       "training": True},
    "native_batch_norm_backward": lambda make: {
        **{n: make((40,)) for n in ("weight", "running_mean", "running_var", "save_mean", "save_invstd")}, "train": True,
        "output_mask": [True, True, True],
    },
    "_weight_norm_interface": lambda make: {"g": make((6, 1)), "dim": 0},
    "_weight_norm_interface_backward": lambda make: {"saved_g": make((6, 1)), "saved_norms": make((6, 1), torch.float32), "dim": 0},
}  # fmt: skip
# The same of the engine `product`
GIVEN |= {
    "mm": lambda make: {"mat2": make((40, 24))},
    "addmm": lambda make: {"self": make((24,)), "mat1": make(SHAPE), "mat2": make((40, 24))},
    "bmm": lambda make: {"self": make((3, 6, 40)), "mat2": make((3, 40, 24))},
    "mv": lambda make: {"vec": make((40,))},
    "addmv": lambda make: {"self": make((6,)), "mat": make(SHAPE), "vec": make((40,))},
}  # fmt: skip
# The same of the engine `attention`, whose operands are of 16 bits whatever others are
GIVEN["_flash_attention_forward"] = lambda make: {
    "query": make((6, 20, 4, 16)).to(torch.bfloat16), "key": make((6, 24, 2, 16)).to(torch.bfloat16),
    "value": make((6, 24, 2, 16)).to(torch.bfloat16), "cum_seq_q": None, "cum_seq_k": None, "max_q": 20, "max_k": 24,
    "dropout_p": 0.0, "is_causal": True, "return_debug_mask": False, "seqused_k": None, "alibi_slopes": None, "block_table": None,
}  # fmt: skip
PLANES, POOLED = (6, 3, 8, 10), (6, 3, 4, 5)


def corners(pooled: Tensor) -> Tensor:
    """Of windows of 2 x 2 in planes of PLANES, where the first element is."""
    rows, columns = (torch.arange(n, device=pooled.device) for n in POOLED[2:])
    return (2 * PLANES[3] * rows[:, None] + 2 * columns).expand(pooled.shape).contiguous()


WINDOW = {"kernel_size": [2, 2], "stride": [2, 2], "padding": [0, 0], "dilation": [1, 1], "ceil_mode": False}
# The same of the engine `window`
GIVEN |= {
    "avg_pool2d": lambda make: {"self": make(PLANES), **WINDOW},
    "avg_pool2d_backward": lambda make: {
        "grad_output": make(POOLED), "self": make(PLANES), **WINDOW, "count_include_pad": True, "divisor_override": None,
    },
    "max_pool2d_with_indices": lambda make: {"self": make(PLANES), **WINDOW},
    "max_pool2d_with_indices_backward": lambda make: {
        "grad_output": make(POOLED), "self": make(PLANES), **WINDOW, "indices": corners(make(POOLED)),
    },
    "max_pool2d_backward": lambda make: {"grad_output": make(POOLED), "self": make(PLANES), **WINDOW},
    "upsample_nearest2d": lambda make: {"self": make(PLANES), "output_size": [11, 7]},
    "_upsample_bicubic2d_aa": lambda make: {"self": make(PLANES), "output_size": [5, 7], "align_corners": False},
}  # fmt: skip


def apart(make: Make, count: int, n: int) -> Tensor:
    """So many of n indices in no order, no two of them equal."""
    return torch.arange(count, device=make(()).device) * (n - 1) % n


def some(make: Make, shape: tuple[int, ...], n: int) -> Tensor:
    """Indices below n, some of them equal."""
    return make(shape, torch.int64) % n


def labels(make: Make, shape: tuple[int, ...], classes: int) -> dict[str, Any]:
    """Arguments of losses by label."""
    return {
        "self": make(shape), "target": some(make, (shape[0], *shape[2:]), classes), "weight": make((classes,)), "reduction": 1,
        "ignore_index": 1, "grad_output": make(()), "total_weight": make(()),
    }  # fmt: skip


def scattered(make: Make) -> dict[str, Any]:
    index = apart(make, 5, 6)[:, None].expand(5, 40).contiguous()
    return {"dim": 0, "index": index, "src": make(SHAPE), "reduce": "add"}


# The index engine
GIVEN |= {
    "index_select": lambda make: {"index": some(make, (9,), 40)},
    "gather": lambda make: {"index": some(make, (6, 9), 40)},
    "embedding": lambda make: {"weight": make(SHAPE), "indices": some(make, (3, 5), 6)},
    "embedding_dense_backward": lambda make: {
        "grad_output": make((90, 40)), "indices": some(make, (90,), 6), "num_weights": 6, "padding_idx": 1,
        "scale_grad_by_freq": False},
    "embedding_backward": lambda make: {
        "grad": make((90, 40)), "indices": some(make, (90,), 6), "num_weights": 6, "padding_idx": -1,
        "scale_grad_by_freq": False, "sparse": False},
    "index": lambda make: {"indices": [None, some(make, (9,), 40)]},
    "index_put": lambda make: {"indices": [None, apart(make, 9, 40)], "values": make((6, 9))},
    "_index_put_impl": lambda make: {"indices": [some(make, (70,), 6)], "values": make((70, 40)), "accumulate": True},
    "index_add": lambda make: {"index": some(make, (9,), 40), "source": make((6, 9))},
    "scatter": scattered,
    "scatter_add": lambda make: {"index": some(make, (6, 9), 40), "src": make((6, 9))},
    "gather_backward": lambda make: {
        "grad": make((6, 9)), "self": make(SHAPE), "index": some(make, (6, 9), 40), "sparse_grad": False},
    "repeat_interleave.Tensor": lambda make: {"repeats": some(make, (6,), 4)},
    "repeat_interleave.self_Tensor": lambda make: {"repeats": some(make, (40,), 4), "dim": 1},
    "nonzero": lambda make: {"self": make(SHAPE, torch.int32) % 2},
    "isin": lambda make: {"test_elements": make((70,))},
    "nll_loss_forward": lambda make: labels(make, SHAPE, 40),
    "nll_loss_backward": lambda make: labels(make, SHAPE, 40),
    "nll_loss2d_forward": lambda make: labels(make, (2, 5, 3, 4), 5),
    "nll_loss2d_backward": lambda make: labels(make, (2, 5, 3, 4), 5),
}  # fmt: skip
# The sort engine
GIVEN |= {
    "topk": lambda make: {"k": 5, "dim": 1},
    "_unique2": lambda make: {"self": some(make, SHAPE, 9), "return_inverse": True, "return_counts": True},
    "quantile": lambda make: {"q": make((3,)) % 1.0},
    "sort.stable": lambda make: {"stable": True},
}
# The random engine
GIVEN |= {
    "rand": lambda make: {"size": [3, 4], "device": make(()).device},
    "randn": lambda make: {"size": [3, 4], "device": make(()).device},
    "randperm": lambda make: {"n": 9, "device": make(()).device, "out": make((9,), torch.int64), "generator": None},
    "native_dropout": lambda make: {"p": 0.5, "train": True},
    "multinomial": lambda make: {"num_samples": 3},
    "exponential": lambda make: {},
}
RESULTS = {"sum.out": (), "sum.IntList_out": (6,), "cumsum.out": SHAPE, "where.self_out": SHAPE,
           "arange.start_out": (4,), "eye.out": (4, 4), "eye.m_out": (4, 5), "linspace.out": (7,),
           "logspace.out": (7,), "floor_divide.out": SHAPE}  # fmt: skip
RESULTS |= {"mm.out": (6, 24), "addmm.out": (6, 24), "addmv.out": (6,)}


def call_of(name: str, make: Make) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and keywords of one call of an overload."""
    packet = name.partition(".")[0]
    given = (GIVEN.get(name) or GIVEN.get(packet.removesuffix("_"), lambda make: {}))(make)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    skipped = False
    for argument in overload_of(name)._schema.arguments:
        kind = str(argument.type)
        if argument.name == "out":
            value = given["out"] if "out" in given else make(RESULTS[name])
        elif argument.name in given and (
            "Tensor" not in kind or isinstance(given[argument.name], (Tensor, list, type(None)))
        ):
            value = given[argument.name]
        elif argument.name == "mask" or argument.name == "condition":
            value = make(SHAPE, torch.bool)
        elif kind == "Tensor" and argument.name == "value":
            value = make(())
        elif "Tensor" in kind:
            value = make(SHAPE, torch.int32 if packet.removesuffix("_") in INTEGERS else torch.float32)
        elif argument.name == "dim":
            value = 1 if kind == "int" else [1] if "List" in kind else None
        elif argument.has_default_value():
            skipped = True
            continue
        else:
            value = {"number": 3 if packet.removesuffix("_") in INTEGERS else 0.5, "float": 0.5}[kind]
        if argument.kwarg_only or skipped:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def call_as(name: str, dtype: torch.dtype, make: Make) -> tuple[list[Any], dict[str, Any]]:
    """The same call with tensors of a dtype where it has fp32 or int32, or in all places where it has neither, and of whole numbers
    where that dtype has no others."""
    args, kwargs = call_of(
        name, lambda shape, own=torch.float32: make(shape, dtype if own in (torch.float32, torch.int32) else own)
    )
    values = [one for value in (*args, *kwargs.values()) for one in (value if isinstance(value, list) else [value])]
    if not any(isinstance(one, Tensor) and one.dtype == dtype for one in values):
        args = [one.to(dtype) if isinstance(one, Tensor) else one for one in args]
        kwargs = {n: one.to(dtype) if isinstance(one, Tensor) else one for n, one in kwargs.items()}
    if dtype.is_floating_point:
        return args, kwargs
    number = 1 if dtype == torch.bool else 3
    kinds = {a.name: str(a.type) for a in overload_of(name)._schema.arguments}

    def whole(argument: str, value: Any) -> Any:
        return number if "number" in kinds[argument] and isinstance(value, float) else value

    return [whole(n, v) for n, v in zip(kinds, args)], {n: whole(n, v) for n, v in kwargs.items()}


def rms_norm_gradients(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor, mask: list[bool]
) -> tuple:
    """By autograd, of the formula."""
    with torch.enable_grad():
        x, weight = (t.detach().requires_grad_() for t in (x, weight))
        scale = rstd.to(x.dtype)
        mean = (x * x - (x * x).detach()).mean(-1, keepdim=True) + 1 / (scale * scale)
        return torch.autograd.grad(x * torch.rsqrt(mean) * weight, (x, weight), grad)


def pool_gradients(
    grad: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], *rest: Any
) -> Tensor:
    """With the indices that aten finds."""
    indices = torch.ops.aten.max_pool2d_with_indices(x, kernel, stride, padding, *rest)[1]
    return torch.ops.aten.max_pool2d_with_indices_backward(grad, x, kernel, stride, padding, *rest, indices)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, marks_q: Any, marks_k: Any, max_q: int, max_k: int, dropout: float, causal: bool, debug: bool,
    **none: Any,
) -> tuple:  # fmt: skip
    """By the formula: the last query stands at the last key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[2] // k.shape[2]
    keys, values = (t.to(wide).repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("blhd,bkhd->bhlk", q.to(wide), keys) / q.shape[-1] ** 0.5
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[1])
        scores = scores.masked_fill(~seen, float("-inf"))
    o = torch.einsum("bhlk,bkhd->blhd", torch.softmax(scores, -1), values).to(q.dtype)
    state = [torch.empty(shape, dtype=torch.uint64, device=q.device) for shape in ((2,), ())]
    return torch.empty_like(q).copy_(o), torch.logsumexp(scores, -1), *state, q.new_empty(0)


# What overloads are that torch has no kernel of for a processor
REFERENCES: dict[str, Callable[..., Any]] = {
    "_fused_rms_norm_backward": rms_norm_gradients, "max_pool2d_backward": pool_gradients,
    "_flash_attention_forward": flash_attention,
}  # fmt: skip
NARROW = {"_flash_attention_forward"}  # which aten has no float64 of
UNWRITTEN = {"_flash_attention_forward": (2, 3)}  # results that hold what the memory held


def aten_of(name: str, device: str) -> Callable[..., Any]:
    """aten's own, or what stands for it."""
    key = torch._C.DispatchKey.CUDA if device.startswith("cuda") else torch._C.DispatchKey.CPU
    there = overload_of(name).has_kernel_for_dispatch_key(key)
    return REFERENCES[name] if name in REFERENCES and not there else overload_of(name)


def exact_of(name: str, device: str) -> Callable[..., Any]:
    """The same for operands of float64."""
    return REFERENCES[name] if name in NARROW else aten_of(name, device)


def written(name: str, made: Any) -> Any:
    """Results of an overload, 0 in those that nobody writes."""
    if name not in UNWRITTEN:
        return made
    return tuple(torch.zeros_like(one) if at in UNWRITTEN[name] else one for at, one in enumerate(made))


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    if dtype == torch.float32:
        return torch.rand(shape, device=device) + 0.5
    return torch.randint(0, 2 if dtype == torch.bool else 50, shape, dtype=dtype, device=device)


def copied(value: Any) -> Any:
    """Arguments of a call, so that one made in place leaves them as they are."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    return [copied(v) for v in value] if isinstance(value, list) else value


def replaced(device: str, name: str) -> None:
    """A call of an overload is ours, and its result aten's; without a kernel that can run, that there is a row for it."""
    leaf = LEAVES.get(name, name)
    assert leaf in table.FORMS and table.ENGINE[leaf]
    torch.manual_seed(0)
    args, kwargs = call_of(name, partial(drawn, device=device))
    aten = aten_of(name, device)(*copied(args), **copied(kwargs))
    if device == "cpu" and not INTERPRETING:
        return
    given = copied(args), copied(kwargs)
    if name == "contiguous":
        given = args, kwargs
    with tw.aten.use("all", include=[leaf]):
        ours = overload_of(name)(*given[0], **given[1])
        assert tw.aten.report()[leaf]["taken"], f"{name} is not ours: {tw.aten.report()[leaf]['declined']}"
    if table.ENGINE[leaf] == "random":  # whose draws are not a CPU's: what they are, its own tests say
        ours, aten = blank(ours), blank(aten)
    torch.testing.assert_close(written(leaf, ours), written(leaf, aten))


def blank(made: Any) -> Any:
    """A result without its values: draws are another's."""
    return (
        tuple(map(blank, made))
        if isinstance(made, tuple)
        else torch.zeros_like(made)
        if isinstance(made, Tensor)
        else made
    )


# Which are leaves of others alone: no list asks for them
UNLISTED = ("clone", "copy_", "zero_", "arange.start_out", "linspace.out", "logspace.out", "eye.out", "eye.m_out",
            "floor_divide.out", "log_sigmoid_forward", "index.Tensor", "_index_put_impl_", "scatter_add", "scatter_add_",
            "embedding_dense_backward", "normal_", "randperm.generator_out", "_fused_rms_norm", "_fused_rms_norm_backward",
            "max_pool2d_with_indices_backward")  # fmt: skip
LISTED = [name for name in table.FORMS if name not in UNLISTED]
CHECKS = {name: partial(replaced, name=name) for name in sorted({*LISTED, *LEAVES})}


def resolved(device: str, name: str) -> None:
    """A tensor that is no lazy view is itself; of one that is, torch makes the copy, whatever is replaced."""
    x = drawn(SHAPE, device=device)
    lazy = {"resolve_conj": torch.complex(x, x).conj(), "resolve_neg": torch.complex(x, x).conj().imag}[name]
    resolve = getattr(torch, name)
    there = device != "cpu" or INTERPRETING
    with tw.aten.use("all") if there else contextlib.nullcontext():
        assert resolve(x) is x
        made = resolve(lazy)
    assert not made.is_conj() and not made.is_neg()
    torch.testing.assert_close(made, lazy)


CHECKS |= {name: partial(resolved, name=name) for name in ("resolve_conj", "resolve_neg")}
