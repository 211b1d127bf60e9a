"""The calls behind the rows of attention, rotary embeddings and caches. Truth is the published formula written out in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import tilewright as tw

from ...core.format import Quantized
from ...core.target import INTERPRETING, TARGETS, pretend
from ...op import force
from ...runtime.kernel import collect
from ..agreement import BF16, FP16, agrees, normal

Heads = tuple[Tensor, Tensor, Tensor]


# ---- attention -------------------------------------------------------------------------------------------------------


def attended(q: Tensor, k: Tensor, v: Tensor, kv_len: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(o, lse) of [batch, length, heads, head_dim], in float64 on the CPU; row i sees its first kv_len[batch, i] keys."""
    q, k, v = (t.cpu().double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
    s = torch.einsum("blhd,bkhd->bhlk", q, k) / math.sqrt(q.shape[-1])
    if kv_len is not None:
        s = s.masked_fill(torch.arange(k.shape[1]) >= kv_len.cpu()[:, None, :, None], -math.inf)
    return torch.einsum("bhlk,bkhd->blhd", s.softmax(-1), v), s.logsumexp(-1)


def drawn(device: str, dtype: torch.dtype, length: int, keys: int, heads: int, kv_heads: int, width: int = 72) -> Heads:
    shapes = (2, length, heads, width), (2, keys, kv_heads, width), (2, keys, kv_heads, width)
    return tuple(normal(device, *shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes))


def attention(device: str, dtype: torch.dtype = FP16, keys: int = 40, kv_heads: int = 1) -> None:
    """Queries over keys of one head, of some, or of as many as there are."""
    q, k, v = drawn(device, dtype, 17, keys, 4, kv_heads)
    agrees("o", tw.attention(q, k, v), attended(q, k, v)[0], "I")


def first_row_sees_less(device: str) -> None:
    """The state's row sees the prefix and itself, all others everything."""
    q, k, v = drawn(device, FP16, 6, 40, 4, 1)
    kv_len = torch.full((2, 6), 40, device=device, dtype=torch.int32)
    kv_len[:, 0] = 35
    agrees("o", tw.attention(q, k, v, kv_len=kv_len), attended(q, k, v, kv_len)[0], "I")


def attention_of_columns(device: str) -> None:
    """Heads that are columns of one projection, which is not copied."""
    qkv = normal(device, 2, 19, 3 * 4 * 72, dtype=FP16)
    q, k, v = (t.unflatten(-1, (4, 72)) for t in qkv.chunk(3, -1))
    agrees("o", tw.attention(q, k, v), attended(q, k, v)[0], "I")


def attention_by_name(device: str) -> None:
    """One implementation, named by the call; one that is unknown is refused."""
    q, k, v = drawn(device, FP16, 17, 40, 4, 2)
    with pretend(TARGETS["sm_90"]), force("triton"), collect() as launched:
        tw.attention(*(t.to("meta") for t in (q, k, v)), backend="portable")
    assert [one.kernel.name for one in launched] == ["attention_forward"], "another implementation was taken"
    if device != "cpu" or INTERPRETING:
        agrees("o", tw.attention(q, k, v, backend="portable"), attended(q, k, v)[0], "I")
    try:
        tw.attention(q, k, v, backend="nobody's")
    except ValueError as error:
        assert "backend" in str(error)
    else:
        raise AssertionError("a backend that there is not was taken")


def attention_with_lse(device: str, dtype: torch.dtype) -> None:
    q, k, v = drawn(device, dtype, 17, 40, 4, 2)
    o, lse = tw.attention_lse(q, k, v, scale=1.0 / math.sqrt(72))
    exact = attended(q, k, v)
    agrees("o", o, exact[0], "I")
    agrees("lse", lse, exact[1], "I")


def stands_for(x: Tensor, largest: float) -> Tensor:
    """Rows rounded to integers up to `largest`, by a scale of their own in fp32."""
    x = x.cpu().float()
    scale = x.abs().amax(-1, keepdim=True) / largest
    return (x / scale).round().double() * scale.double()


def attention_int8(device: str, weights: bool = False) -> None:
    """Queries and keys, and perhaps weights and values, as integers, against the numbers that those stand for."""
    q, k, v = drawn(device, BF16, 33, 70, 4, 2, 64)
    wide = stands_for(q, 127.0), stands_for(k, 127.0)
    if weights:
        found = tw.attention(q, k, v, math="int8_pv")
        agrees("o", found, attended(*wide, stands_for(v, 127.0))[0], "K")
    else:
        agrees("o", tw.attention(q, k, v, math="int8"), attended(*wide, v)[0], "I")


def attention_mxfp8(device: str) -> None:
    q, k, v = drawn(device, BF16, 33, 70, 4, 2, 64)
    codes = [tw.quantize(t, tw.mx("e4m3")) for t in (q, k)]
    agrees("o", tw.attention(*codes, v), attended(*map(decoded, codes), v)[0], "I")


def decoded(codes: Quantized) -> Tensor:
    """What blocks of 32 e4m3 codes with a power of two each stand for."""
    scale = torch.exp2(codes.scale.cpu().view(torch.uint8).double() - 127).repeat_interleave(32, -1)
    return codes.data.cpu().float().double() * scale[:, : codes.shape[-1]].reshape(codes.shape)


# ---- rotary embeddings and caches ------------------------------------------------------------------------------------


def tables(device: str, positions: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.arange(positions).double()[:, None] * 10000.0 ** (-torch.arange(0, width, 2).double() / width)
    return angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = True) -> Tensor:
    """Pairs of columns of [..., length, heads, width], (2i, 2i + 1) or (i, i + width / 2), rotated in float64."""
    x, c, s = (t.cpu().double() for t in (x, cos, sin))
    c, s = c[:, None], s[:, None]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    a, b = a * c - b * s, b * c + a * s
    return torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)


def split(device: str, dtype: torch.dtype = BF16, rotated: bool = False) -> None:
    """All query heads, then key heads, then value heads of a projection."""
    heads, kv_heads, width = 4, 2, 32
    qkv = normal(device, 1, 7, 8 * width, dtype=dtype)
    exact = [
        t.unflatten(-1, (-1, width)).cpu().double() for t in qkv.split((heads * width, *2 * (kv_heads * width,)), -1)
    ]
    if rotated:
        cos, sin = tables(device, 7, width, torch.float32)
        found = tw.qkv_split(
            qkv, heads, kv_heads, width, cos=cos, sin=sin, pairing="interleaved", packing="plain"
        )  # fmt: skip
        exact[:2] = [turned(t, cos, sin) for t in exact[:2]]
    else:
        found = tw.qkv_split(qkv, heads, kv_heads, width, packing="plain")
    for name, t, there in zip("qkv", found, exact, strict=True):
        agrees(name, t, there, "A" if rotated and name != "v" else "G")


def split_into_cache(device: str) -> None:
    """Five tokens behind nine that are in the cache; what lies beside them stays."""
    heads, kv_heads, width, first = 4, 1, 32, 9
    qkv = normal(device, 1, 5, 6 * width, dtype=FP16)
    cos, sin = tables(device, 20, width, torch.float32)
    caches = [normal(device, 1, 20, kv_heads, width, dtype=FP16, seed=s) for s in (1, 2)]
    before = [t.cpu().double() for t in caches]
    at = torch.arange(first, first + 5, device=device)[None]
    q = tw.qkv_split_cache(
        qkv, heads, kv_heads, width, *caches, at, cos=cos, sin=sin, positions=at, pairing="interleaved", packing="plain"
    )  # fmt: skip
    exact = [t.unflatten(-1, (-1, width)) for t in qkv.split((heads * width, width, width), -1)]
    here = slice(first, first + 5)
    agrees("q", q, turned(exact[0], cos[here], sin[here]), "A")
    before[0][:, here], before[1][:, here] = turned(exact[1], cos[here], sin[here]), exact[2].cpu().double()
    agrees("k_cache", caches[0], before[0], "A")
    agrees("v_cache", caches[1], before[1], "G")


def rotated_pairs(device: str) -> None:
    """Queries and keys, each stored over itself."""
    q, k = normal(device, 1, 7, 4, 32), normal(device, 1, 7, 1, 32, seed=1)
    cos, sin = tables(device, 7, 32, BF16)
    exact = [turned(x, cos, sin) for x in (q, k)]
    made = tw.rope(q, k, cos[None], sin[None], layout="bshd", pairing="interleaved", out=(q, k))
    assert made[0] is q and made[1] is k, "other tensors came back"
    for name, found, wanted in zip("qk", (q, k), exact):
        agrees(name, found, wanted, "A")


def rotated_halves(device: str) -> None:
    """Tables that have each angle twice; the result is stored over x."""
    x = normal(device, 1, 7, 4, 32, dtype=FP16)
    cos, sin = tables(device, 7, 32, FP16)
    exact = turned(x, cos, sin, interleaved=False)
    made = tw.rope_one(x, cos.repeat(1, 2)[None], sin.repeat(1, 2)[None], layout="bshd", out=x)
    assert made is x, "another tensor came back"
    agrees("x", x, exact, "A")
