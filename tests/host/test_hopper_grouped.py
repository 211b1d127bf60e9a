"""Which grouped products of 16-bit numbers Hopper's own kernels take, what they are launched with, and that gradients take them
too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewright as tw
from tilewright.check.variants import Call, passes
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect

HOPPER = replace(TARGETS["sm_90"], gluon=True)
ROWS, INNER = tw.catalogue()["grouped_mm_rows"], tw.catalogue()["grouped_mm_inner"]


def blank(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def by_rows(M=300, K=72, N=136, E=3, dtype=torch.bfloat16, **other):
    a, weight = blank(M, K, dtype=dtype), blank(E, N, K, dtype=dtype)
    return {"a": a, "b": weight.transpose(1, 2), "offsets": blank(E, dtype=torch.int32), **other}


def by_tokens(T=300, M=72, N=136, E=3, dtype=torch.bfloat16, **other):
    a, b = blank(T, M, dtype=dtype).t(), blank(T, N, dtype=dtype)
    return {"a": a, "b": b, "offsets": blank(E, dtype=torch.int32), **other}


def chosen(op, values, target=HOPPER):
    with pretend(target), tw.force("triton"):
        return op.implementation(op.signature.bind((), values)).name


def products(found):
    """Of collected launches: each kernel's name and arguments."""
    return [(w.kernel.name, dict(zip(w.kernel.names, w.ordered))) for w in found if w.kernel.name != "list_tiles"]


def launched(op, values):
    with pretend(HOPPER), tw.force("triton"), torch.no_grad(), collect() as found:
        op.run(op.signature.bind((), values))
    return products(found)


def with_gradients(op, values):
    return products(sum(passes(op, Call(values), HOPPER), []))


@pytest.mark.parametrize(
    ("op", "values", "name"),
    [
        (ROWS, by_rows(), "hopper"),
        (ROWS, by_rows(M=1, K=8, E=1, dtype=torch.float16), "hopper"),
        (ROWS, by_rows(b=blank(3, 72, 136)), "hopper"),  # columns contiguous, as data gradients have them
        (ROWS, by_rows(a=blank(300, 144)[:, :72]), "hopper"),
        (ROWS, by_rows(out_dtype="float32"), "hopper"),
        (ROWS, by_rows(bias=blank(3, 136), act="silu"), "hopper_fused"),
        (ROWS, by_rows(glu="silu"), "portable_fused"),
        (ROWS, by_rows(K=76), "portable"),  # rows that do not begin at multiples of 16 bytes
        (ROWS, by_rows(N=140), "portable"),
        (ROWS, by_rows(N=128), "portable"),  # half of every tile would be empty
        (ROWS, by_rows(M=0), "portable"),
        (ROWS, by_rows(dtype=torch.float32), "portable"),
        (ROWS, by_rows(a=blank(300, 72, dtype=torch.float16)), "portable"),
        (ROWS, by_rows(a=blank(72, 300).t()), "portable"),
        (ROWS, by_rows(a=blank(1, 72).expand(300, 72)), "portable"),
        (INNER, by_tokens(), "hopper"),
        (INNER, by_tokens(T=1, dtype=torch.float16, out_dtype="float32"), "hopper"),
        (INNER, by_tokens(c=blank(3, 72, 136), beta=1.0, out=blank(3, 72, 200)[:, :, :136]), "hopper"),
        (INNER, by_tokens(c=blank(3, 136, 72).transpose(1, 2), beta=1.0), "portable"),
        (INNER, by_tokens(a=blank(72, 300)), "portable"),  # tokens contiguous: groups would begin anywhere in a row
        (INNER, by_tokens(M=64), "portable"),
        (INNER, by_tokens(M=76), "portable"),
        (INNER, by_tokens(T=0), "portable"),
        (INNER, by_tokens(dtype=torch.float32), "portable"),
    ],
)  # fmt: skip
def test_choice(op, values, name):
    assert chosen(op, values) == name


@pytest.mark.parametrize(("op", "values"), [(ROWS, by_rows()), (INNER, by_tokens())])
def test_other_chips_have_no_such_kernel(op, values):
    assert {chosen(op, values, t) for t in (TARGETS["sm_100"], replace(HOPPER, gluon=False))} == {"portable"}


def test_a_layer_and_its_gradients():
    """Forward the weight lies as [columns, inner]; the gradient of the rows multiplies with it as it is."""
    values = by_rows(M=65536, K=2048, N=1536, E=64)
    (first, y), (second, da), (third, db) = with_gradients(ROWS, values)
    assert (first, second, third) == ("grouped_rows_hopper", "grouped_rows_hopper", "grouped_tokens_hopper")
    assert (y["BY_COLUMNS"], y["A"].shape, y["B"].shape) == (True, [65536, 2048], [64, 1536, 2048])
    assert (da["BY_COLUMNS"], da["A"].shape, da["B"].shape) == (False, [65536, 1536], [64, 1536, 2048])
    assert (db["M"], db["N"], db["T"]) == (2048, 1536, 65536) and db["C"].shape == [64, 2048, 1536]
    assert all(a["PROGRAMS"] == HOPPER.sms for a in (y, da, db))
    assert (y["count"], y["N"], y["K"]) == (512 + 64, 1536, 2048)


def test_a_mixture_of_experts_and_its_gradients():
    """Two products forward; four backward, of which two are of weights."""
    op = tw.catalogue()["moe_feed_forward"]
    values = {
        "x": blank(64, 256), "gate_up": blank(4, 512, 256), "down": blank(4, 256, 256), "routing": blank(64, 2, dtype=torch.int32),
        "probs": blank(64, 2, dtype=torch.float32),
    }  # fmt: skip
    names = [name for name, _ in with_gradients(op, values) if name.startswith("grouped")]
    assert names == ["grouped_rows_hopper"] * 3 + [
        "grouped_tokens_hopper",
        "grouped_rows_hopper",
        "grouped_tokens_hopper",
    ]


@pytest.mark.parametrize(
    ("op", "values", "boxed"),
    [
        (ROWS, by_rows(), True),
        (ROWS, by_rows(out_dtype="float32"), False),
        (INNER, by_tokens(), True),
        (INNER, by_tokens(out=blank(3, 72, 140)[:, :, :136]), False),  # rows that begin anywhere
        (INNER, by_tokens(out_dtype="float32"), False),
    ],
)
def test_results_leave_in_bulk_where_they_can(op, values, boxed):
    ((_, given),) = launched(op, values)
    assert (given["C"] is not None) == boxed
    assert not boxed or given["C"].block_shape == [1, 64, 64]


@pytest.mark.parametrize(("beta", "added"), [(0.5, True), (0.0, False)])
def test_nothing_is_added_without_beta(beta, added):
    c = blank(3, 72, 136)
    ((_, given),) = launched(INNER, by_tokens(c=c, beta=beta, out=c))
    assert (given["ADD"] is not None) == added and given["Y"] is c
