"""INT4 weights as AWQ and GPTQ checkpoints hold them, in this library's `int4("1x128", zero=True)`; the other order of nibbles.

Both keep unsigned codes u of a weight [K inputs, N outputs], eight to an int32, x = (u - z) * scale, with scale and z for
each group of inputs and each output. Here the codes are u - 8, the zero points z - 8, and the weight is [N, K], as of a
linear layer: `scaled_mm(x, from_awq(...).t())`. Lossless; plain torch, once per checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.format import Quantized
from .fp8 import BLOCK, ceil128, padded
from .integers import int4, pack_nibbles

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight elements the nibbles of a word hold, lowest first


def from_awq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int = 128, *, dtype: torch.dtype | None = None
) -> Quantized:
    """The weight of an AWQ layer: `qweight` int32 [K, N/8], `qzeros` int32 [K/group, N/8], `scales` [K/group, N].

    `group`, a multiple of 128 or -1 for all inputs, is how many inputs share a scale; `dtype` the logical one, by default that of
    the scales.
    """
    codes = _spread_words(_words("qweight", qweight), AWQ_ORDER)
    zeros = _spread_words(_words("qzeros", qzeros), AWQ_ORDER)
    return _weight(codes, zeros, scales, group, dtype)


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    group: int = 128,
    *,
    version: int = 1,
    reorder: bool = False,
    dtype: torch.dtype | None = None,
) -> Quantized:
    """The weight of a GPTQ layer: `qweight` int32 [K/8, N], `qzeros` int32 [K/group, N/8], `scales` [K/group, N].

    `version` 1 stores zero points minus one, 2 as they are. `g_idx` [K] is the group of each input; where they are not runs
    of `group` inputs (act order), `reorder` sorts the inputs by group, and the product takes
    `x[:, g_idx.argsort(stable=True)]`.
    """
    if version not in (1, 2):
        raise ValueError(f"version: must be 1 or 2, not {version!r}")
    codes = _spread_words(_words("qweight", qweight).t(), IN_ORDER).t()
    zeros = _spread_words(_words("qzeros", qzeros), IN_ORDER)
    zeros = (zeros + 1) & 15 if version == 1 else zeros  # 0 minus one was stored as 15
    if g_idx is not None:
        codes = _in_groups(codes, g_idx, codes.shape[0] if group == -1 else group, reorder)
    return _weight(codes, zeros, scales, group, dtype)


def high_first(codes: Tensor) -> Tensor:
    """Bytes of two 4-bit codes with the nibbles exchanged: the even code in the high one, or back again."""
    if codes.dtype not in (torch.uint8, torch.int8):
        raise TypeError(f"codes: must be uint8 or int8, two codes a byte, got {codes.dtype}")
    nibbles = codes.view(torch.uint8)
    return ((nibbles << 4) | (nibbles >> 4)).view(codes.dtype)


def _words(name: str, t: Tensor) -> Tensor:
    if t.dtype != torch.int32 or t.dim() != 2:
        raise ValueError(f"{name}: must be an int32 matrix of eight codes a word, got {list(t.shape)} of {t.dtype}")
    return t


def _spread_words(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """The unsigned codes, uint8 [R, 8 C], that words [R, C] of eight nibbles hold."""
    shifts = torch.tensor([4 * order.index(i) for i in range(8)], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8).flatten(1)


def _in_groups(codes: Tensor, g_idx: Tensor, group: int, reorder: bool) -> Tensor:
    """Codes [K, N] in the order in which group g has the inputs from g * group on."""
    if g_idx.shape != codes.shape[:1]:
        raise ValueError(f"g_idx: must have {codes.shape[0]} elements, one for each input, got {list(g_idx.shape)}")
    wanted = torch.arange(codes.shape[0], device=g_idx.device) // group
    if torch.equal(g_idx.to(torch.int64), wanted):
        return codes
    found, order = g_idx.to(torch.int64).sort(stable=True)
    if not torch.equal(found, wanted):
        raise ValueError(f"g_idx: every group must have {group} inputs, but for the last")
    if not reorder:
        raise ValueError("g_idx: groups are not runs of inputs; reorder=True sorts the inputs, see there")
    return codes[order.to(codes.device)]


def _weight(codes: Tensor, zeros: Tensor, scales: Tensor, group: int, dtype: torch.dtype | None) -> Quantized:
    """A weight [N, K] from unsigned codes [K, N] and zero points and scales [groups, N]."""
    K, N = codes.shape
    blocks = ceil128(K)
    if group != -1 and (group <= 0 or group % BLOCK):
        raise ValueError(f"group: must be a multiple of {BLOCK}, or -1 for all inputs, not {group}")
    repeat = max(1, blocks) if group == -1 else group // BLOCK
    wanted = (-(-blocks // repeat), N)
    for name, t in (("qzeros", zeros), ("scales", scales)):
        if t.shape != wanted:
            unpacked = "once unpacked " if name == "qzeros" else ""
            raise ValueError(
                f"{name}: must {unpacked}be {list(wanted)} for {K} inputs in groups of {group}, got {list(t.shape)}"
            )
    format = int4("1x128", zero=True)
    format.check((N, K))
    scale, zero = (t.repeat_interleave(repeat, 0)[:blocks] for t in (scales.float(), zeros.float() - 8))
    data = pack_nibbles((codes ^ 8).t().contiguous().view(torch.int8))
    return Quantized.from_tensors(format, dtype or scales.dtype, (N, K), (data, padded(scale), padded(zero)))
