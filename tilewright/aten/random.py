"""The random engine: torch's own numbers, drawn by its own counters.

On a GPU torch draws with Philox, four words a call. Threads of a grid that depends on the chip each have a sequence of their own,
and number their calls; which thread, call and word an element has is followed to the letter, so that uniform numbers and dropout's
masks are torch's bit for bit, others nearly, and the generator is left where torch would leave it. On a CPU, which is the
interpreter, torch draws otherwise: there a seed is drawn from the generator, and the numbers are those of a GPU with that seed.

No plan draws: seed and offset are the generator's. During graph capture they are on the device, where Python cannot read them, and
all is aten's.
"""

from __future__ import annotations

import math
import struct
import threading
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ..core.memory import self_overlapping, span
from ..core.target import Target
from ..core.tensor import cdiv
from ..runtime.kernel import collecting, kernel
from . import forms, layout, plans, pointwise, reduction_rows
from . import sort as sorting
from .order import ordered
from .plans import bits_of, only_now, own
from .pointwise import WORDS, number, whole_words
from .row import Declined, taken
from .rows import ROWS

THREADS = 256  # of torch's blocks
RESIDENT = 2048  # threads of an SM, where there is no chip to ask
BLOCK = 256  # threads of torch's that are one program's
TURNS = 4  # that a program takes, so that it begins once for several thousand numbers
LOOPS = 4
MOST_BYTES = 2**31 - 1  # beyond these torch splits a tensor, and draws again for each part
_lock = threading.Lock()
_single = struct.Struct("f")


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def words(seed, call, thread):
    """Four words of a thread's call, by Philox with ten rounds; calls count from the generator's offset on. What all threads share
    is computed once, and a product of 64 bits is one instruction where its halves would be two."""
    a, b = halves(call)
    c, d = thread.to(tl.uint32), tl.full((), 0, tl.uint32)
    key, other = halves(seed)
    for _ in tl.static_range(10):
        one, two = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, b = (two >> 32).to(tl.uint32) ^ b ^ key, two.to(tl.uint32)
        c, d = (one >> 32).to(tl.uint32) ^ d ^ other, one.to(tl.uint32)
        key, other = wrapped_sum(key, 0x9E3779B9), wrapped_sum(other, 0xBB67AE85)
    return a, b, c, d


@triton.jit
def halves(x):
    """(low, high): a number of 64 bits as two of 32."""
    x = tl.cast(x, tl.int64)
    return (x & 0xFFFFFFFF).to(tl.uint32), ((x >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def wrapped_sum(x, y):
    """Modulo 2^32, by way of 64 bits: the interpreter warns of sums that do not fit."""
    return (x.to(tl.uint64) + y).to(tl.uint32)


@triton.jit
def unit(word):
    """A number in (0, 1]."""
    return word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10


@triton.jit
def unit_of_two(low, high):
    """A number in (0, 1] of 53 bits."""
    bits = low.to(tl.uint64) ^ (high.to(tl.uint64) << 21)
    return bits.to(tl.float64) * 1.1102230246251565e-16 + 5.551115123125783e-17


@triton.jit
def normals(word, other):
    """Two normal numbers of two words, as curand has them, its fast sine and cosine included."""
    radius = tl.sqrt_rn(-2.0 * libdevice.log(unit(word)))
    angle = other.to(tl.float32) * 1.46291807926715968e-9 + 7.3145903963357984e-10
    return libdevice.fast_sinf(angle) * radius, libdevice.fast_cosf(angle) * radius


@triton.jit
def wide_normals(a, b, c, d):
    """Two normal numbers of four words, in float64."""
    radius = libdevice.sqrt(-2.0 * libdevice.log(unit_of_two(a, b)))
    turn = (c.to(tl.uint64) ^ (d.to(tl.uint64) << 21)).to(tl.float64) * 2.220446049250313e-16 + 1.1102230246251565e-16
    return libdevice.sinpi(turn) * radius, libdevice.cospi(turn) * radius


@triton.jit
def shaped(x, P, S0, S1, KIND: tl.constexpr):
    """A number of (0, 1], or a normal one, as a result of P's dtype with the numbers S0 and S1 of its distribution; all bits are
    the result."""
    DTYPE: tl.constexpr = P.dtype.element_ty
    WIDE: tl.constexpr = tl.float64 if tl.float64 == P.dtype.element_ty else tl.float32
    one = number(S0, tl.float64)
    two = number(S1, tl.float64)
    if KIND == "bits":
        return x
    elif KIND == "uniform":
        low = one.to(WIDE).to(DTYPE)
        high = two.to(WIDE).to(DTYPE)
        length = (high.to(WIDE) - low.to(WIDE)).to(DTYPE).to(WIDE)
        value = (x * length + low.to(WIDE)).to(DTYPE)
        return tl.where(value == high, low, value)  # [low, high), not (low, high]
    elif KIND == "normal":
        return (x * two.to(WIDE) + one.to(WIDE)).to(DTYPE)
    else:
        EPSILON: tl.constexpr = 2.220446049250313e-16 if tl.float64 == P.dtype.element_ty else 1.1920928955078125e-07
        # Near 1 a logarithm would be 0, or nothing in 16 bits
        near = x >= 1.0 - EPSILON / 2
        if tl.float64 == WIDE:
            log = tl.where(near, -EPSILON / 2, libdevice.log(x))
            return ((-1.0 / one) * log).to(DTYPE)
        else:
            log = tl.where(near, -EPSILON / 2, libdevice.fast_logf(x))
            return (tl.div_rn(tl.full((), -1.0, tl.float32), one.to(tl.float32)) * log).to(DTYPE)


@triton.jit
def place(OUT, i, n0, n1, n2, s0, s1, s2, s3, FLAT: tl.constexpr):
    if FLAT:
        return OUT + i
    else:
        return OUT + (i % n0) * s0 + (i // n0 % n1) * s1 + (i // n0 // n1 % n2) * s2 + (i // n0 // n1 // n2) * s3


DRAWN = ("N", "T", "n0", "n1", "n2", "s0", "s1", "s2", "s3", "seed", "first", "S0", "S1")


@triton.jit
def some_turns(N, T, EACH: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    """(first turn, the one after the last, first thread) of a program: it stands for BLOCK threads, which take TURNS turns, each of
    EACH elements that lie T apart. torch's threads are whole blocks."""
    across = T // BLOCK
    first = tl.program_id(0) // across * TURNS
    return first, tl.minimum(first + TURNS, tl.cdiv(N, T * EACH).to(tl.int32)), tl.program_id(0) % across * BLOCK


def programs(a: Any, each: int) -> tuple[int]:
    return (cdiv(cdiv(a.N, a.T * each), a.TURNS) * (a.T // a.BLOCK),)


@kernel(grid=lambda a: programs(a, 2 if a.TWO else 4), tokens=DRAWN, default=lambda a: {"num_warps": 2})
def draw(
    OUT, N, T, n0, n1, n2, s0, s1, s2, s3, seed: tl.int64, first: tl.int64, S0: tl.int64, S1: tl.int64, KIND: tl.constexpr,
    TWO: tl.constexpr, FLAT: tl.constexpr, EVEN: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """N numbers by T threads, of which each call gives a thread four, T apart; or TWO of 64 bits. EVEN: N counts whole words."""
    EACH: tl.constexpr = 2 if TWO else 4
    begin, end, base = some_turns(N, T, EACH, TURNS, BLOCK)
    thread = base + tl.arange(0, BLOCK)
    across = T // BLOCK * BLOCK  # as it is, and seen to be whole words
    for turn in range(begin, end):
        numbers = drawn_numbers(words(seed, first + turn, thread), KIND, TWO)
        for k in tl.static_range(EACH):
            # There are fewer elements than bytes that torch draws for at once, but for keys: 32 bits count them
            at = ((turn.to(tl.int64) if KIND == "bits" else turn) * EACH + k) * across + thread
            value = shaped(numbers[k], OUT, S0, S1, KIND)
            tl.store(place(OUT, at, n0, n1, n2, s0, s1, s2, s3, FLAT), value, at < whole_words(N, EVEN))


@triton.jit
def drawn_numbers(four, KIND: tl.constexpr, TWO: tl.constexpr):
    """Four numbers of four words, or two, which `shaped` takes."""
    a, b, c, d = four
    if KIND == "bits":
        return joined(a, b), joined(c, d)
    elif TWO and KIND == "normal":
        return wide_normals(a, b, c, d)
    elif TWO:
        return unit_of_two(a, b), unit_of_two(c, d)
    elif KIND == "normal":
        return normals(a, b) + normals(c, d)
    else:
        return unit(a), unit(b), unit(c), unit(d)


@triton.jit
def joined(high, low):
    return ((high.to(tl.uint64) << 32) | low.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def keep_some(X, Y, MASK, at, word, inside, share, factor):
    """Elements whose word says that they are kept, times what makes up for the others; and which."""
    kept = unit(word).to(share.dtype) < share
    x = tl.load(X + at, inside, 0.0).to(share.dtype)
    tl.store(Y + at, (x * kept.to(share.dtype) * factor).to(Y.dtype.element_ty), inside)
    tl.store(MASK + at, kept, inside)


@kernel(grid=lambda a: programs(a, 4 if a.VEC == 1 else a.VEC), tokens=("N", "T", "seed", "first", "S0", "S1"),
        default=lambda a: {"num_warps": 4})  # fmt: skip
def drop(
    X, Y, MASK, N, T, seed: tl.int64, first: tl.int64, S0: tl.int64, S1: tl.int64, VEC: tl.constexpr, TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Dropout of which a share S0 is kept, times S1. torch's threads take VEC elements at once, for which they call once, or twice
    for 8; or single ones, four of a call being T apart."""
    WIDE: tl.constexpr = tl.float64 if tl.float64 == X.dtype.element_ty else tl.float32
    share, factor = number(S0, tl.float64).to(WIDE), number(S1, tl.float64).to(WIDE)
    begin, end, base = some_turns(N, T, 4 if VEC == 1 else VEC, TURNS, BLOCK)
    thread = base + tl.arange(0, BLOCK)
    for turn in range(begin, end):
        if VEC == 1:
            four = words(seed, first + turn, thread)
            for k in tl.static_range(4):
                at = (turn * 4 + k) * T + thread
                keep_some(X, Y, MASK, at, four[k], at < N, share, factor)
        else:
            if VEC == 2:
                a, b, _, _ = words(seed, first + turn, thread)
                side_by_side = tl.interleave(a, b)
            elif VEC == 4:
                a, b, c, d = words(seed, first + turn, thread)
                side_by_side = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
            else:
                a, b, c, d = words(seed, first + turn * 2, thread)
                e, f, g, h = words(seed, first + turn * 2 + 1, thread)
                even = tl.interleave(tl.interleave(a, e), tl.interleave(c, g))
                side_by_side = tl.interleave(even, tl.interleave(tl.interleave(b, f), tl.interleave(d, h)))
            at = (turn * T + base) * VEC + tl.arange(0, BLOCK * VEC)
            inside = at < N // VEC * VEC  # which is N, seen to be whole vectors
            keep_some(X, Y, MASK, at, side_by_side, inside, share, factor)


# ---- host ------------------------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """How torch draws for a tensor: by so many threads, from a call of this seed's sequences on."""

    threads: int
    seed: int
    first: int


def threads_of(count: int, device: torch.device) -> int:
    """As many as there are elements, or as a chip holds at once."""
    resident = RESIDENT
    if device.type == "cuda" and not collecting():
        resident = torch.cuda.get_device_properties(device).max_threads_per_multi_processor
    return THREADS * min(cdiv(count, THREADS), Target.at(device).sms * (resident // THREADS))


def drawn(count: int, each: int, generator: torch.Generator | None, device: torch.device) -> Drawn:
    """Advance the generator as torch does for so many elements, of which a call gives `each`."""
    only_now()
    threads = threads_of(count, device)
    seed, offset = advance(generator, device, 4 * cdiv(count, threads * each))
    return Drawn(threads, seed, offset // 4)


def advance(generator: torch.Generator | None, device: torch.device, by: int) -> tuple[int, int]:
    """(seed, offset) of a generator, which is moved on."""
    if collecting() or device.type == "meta":
        return 0, 0
    if device.type != "cuda":
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator)), 0
    if torch.cuda.is_current_stream_capturing():
        raise Declined("random numbers during graph capture", lasting=False)
    own_one = torch.cuda.default_generators[device.index] if generator is None else generator
    if own_one.device.type != "cuda":
        raise Declined("a generator of another device")
    with _lock:
        offset = own_one.get_offset()
        own_one.set_offset(offset + by)
        seed = own_one.initial_seed()
    return (seed + 2**63) % 2**64 - 2**63, offset


def check_capture(t: Tensor) -> None:
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Declined("random numbers during graph capture", lasting=False)


def fill(out: Tensor, kind: str, one: float, two: float, generator: torch.Generator | None) -> Tensor:
    """Draw into a tensor, in the order of its memory."""
    taken(out)
    only_now()
    if not out.is_floating_point():
        raise Declined("no floats")
    if self_overlapping(out):
        raise Declined("a result that overlaps itself")
    start, end = span(out)
    if end - start > MOST_BYTES:
        raise Declined("more than torch draws for at once")
    count = out.numel()
    if not count:
        return out
    sizes, (steps,) = layout.loops(tuple(out.shape), [out.stride()])
    if len(sizes) > LOOPS:
        raise Declined("more loops than a launch takes")
    flat = not sizes or steps == (1,)
    missing = LOOPS - len(sizes)
    sizes, steps = [*sizes, *[1] * missing], [*steps, *[0] * missing]
    double = out.dtype == torch.float64
    draws = drawn(count, 2 if double else 4, generator, out.device)
    numbers = draws.seed, draws.first, bits_of(one, torch.float64), bits_of(two, torch.float64)
    shape = count, draws.threads, *sizes[:3], *steps
    how = {"KIND": kind, "TWO": double, "FLAT": flat, "EVEN": flat and count % WORDS == 0}
    plans.launch(draw, (out,), shape, numbers, **how, TURNS=TURNS, BLOCK=BLOCK)
    return out


def finite(*numbers: float) -> bool:
    return all(math.isfinite(n) for n in numbers)


def uniform_(self: Tensor, from_: float = 0.0, to: float = 1.0, *, generator: Any = None, **named: Any) -> Tensor:
    low = named.get("from", from_)
    check_capture(self)
    if self.is_floating_point():
        most = torch.finfo(self.dtype).max
        if not finite(low, to) or not 0 <= to - low <= most or max(abs(low), abs(to)) > most:
            raise Declined("bounds that are refused", lasting=False)
    return fill(self, "uniform", low, to, generator)


def normal_(self: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    check_capture(self)
    if not std >= 0 or math.isnan(mean):
        raise Declined("a deviation that is refused", lasting=False)
    return fill(self, "normal", mean, std, generator)


def exponential_(self: Tensor, lambd: float = 1.0, *, generator: Any = None) -> Tensor:
    check_capture(self)
    if not lambd > 0 or not finite(lambd):
        raise Declined("a rate that is refused", lasting=False)
    return fill(self, "exponential", lambd, 0.0, generator)


MUL, ADD, DIV = (next(row for row in ROWS if row.name == name) for name in ("mul", "add", "div"))


def normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Tensor:
    """Normal numbers with a mean and a deviation for each element, one of which may be a number for all."""
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    taken(*tensors)
    check_capture(tensors[0])
    shape = layout.broadcast([t.shape for t in tensors])
    if shape is None or len({t.dtype for t in tensors}) != 1 or not tensors[0].is_floating_point():
        raise Declined("shapes or dtypes that are refused")
    only_now()
    lowest = std if not isinstance(std, Tensor) else 0.0 if collecting() or not std.numel() else float(std.min())
    if not lowest >= 0:
        raise Declined("a deviation that is refused", lasting=False)
    out = own(torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device))
    normal_(out, 0.0, 1.0 if isinstance(std, Tensor) else std, generator=generator)
    if out.numel():
        if isinstance(std, Tensor):
            pointwise.run(MUL, {"self": out, "other": std}, out)
        if not isinstance(mean, Tensor):  # which torch adds as a tensor of the result's dtype
            mean = float(torch.tensor(mean, dtype=out.dtype))
        pointwise.run(ADD, {"self": out, "other": mean, "alpha": 1}, out)
    return out


def native_dropout(input: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    taken(input)
    if not input.is_floating_point() or not 0 <= p <= 1:
        raise Declined("no floats, or a share that is refused", lasting=False)
    if not layout.is_dense(input):
        raise Declined("a tensor with gaps")
    only_now()
    mask = own(torch.empty_like(input, dtype=torch.bool))
    if train is False or not input.numel():
        out = forms.clone(input)
        pointwise.run(forms.FILL, {"value": True}, mask)
        return out, mask
    out = own(torch.empty_like(input))
    if p == 1:
        pointwise.run(forms.FILL, {"value": 0}, out)
        pointwise.run(forms.FILL, {"value": False}, mask)
        return out, mask
    check_capture(input)
    vector = vector_of(input)
    if input.nbytes > MOST_BYTES or (vector == 1 and not input.is_contiguous()):
        raise Declined("more than torch draws for at once, or elements one by one in another order")
    draws = drawn(input.numel(), 4, None, input.device)
    share = 1.0 - p
    if input.dtype != torch.float64:
        (share,) = _single.unpack(_single.pack(share))  # torch rounds it, then divides
    numbers = draws.seed, draws.first, bits_of(share, torch.float64), bits_of(1.0 / share, torch.float64)
    plans.launch(
        drop, (input, out, mask), (input.numel(), draws.threads), numbers, VEC=vector, TURNS=TURNS, BLOCK=BLOCK
    )
    return out, mask


def vector_of(t: Tensor) -> int:
    """How many elements torch's threads take at once: 16 bytes, if memory is aligned, that leave no remainder."""
    vector = 16 // t.element_size()
    while vector > 1 and (t.numel() % vector or t.data_ptr() % (vector * t.element_size())):
        vector //= 2
    return vector


def holds_below(dtype: torch.dtype, n: int) -> bool:
    """Whether a dtype holds all whole numbers below n."""
    if dtype.is_floating_point:
        return n - 1 <= 2 / torch.finfo(dtype).eps
    return dtype != torch.bool and n - 1 <= torch.iinfo(dtype).max


def randperm_out(n: int, *, generator: Any = None, out: Tensor) -> Tensor:
    """Numbers in an order of its own: that of random keys."""
    taken(out)
    check_capture(out)
    if tuple(out.shape) != (n,) or not out.is_contiguous() or not holds_below(out.dtype, n):
        raise Declined("a result that is resized or strided, or cannot hold them")
    only_now()
    if n:
        draws = drawn(n, 2, generator, out.device)
        keys = own(torch.empty((1, n), dtype=torch.int64, device=out.device))
        numbers = draws.seed, draws.first, 0, 0
        shape = n, draws.threads, *[1] * 3, *[0] * 4
        plans.launch(
            draw, (keys,), shape, numbers, KIND="bits", TWO=True, FLAT=True, EVEN=False, TURNS=TURNS, BLOCK=BLOCK
        )
        pointwise.run(forms.COPY, {"self": ordered(keys, 64, True)[1][0]}, out)
    return out


def multinomial(self: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Tensor:
    """The first of elements that decay at these rates, as torch has it where none is drawn twice."""
    taken(self)
    check_capture(self)
    if not self.is_floating_point() or self.dim() not in (1, 2) or not self.numel() or num_samples < 1:
        raise Declined("weights that are refused")
    if (replacement and num_samples > 1) or num_samples > self.shape[-1]:
        raise Declined("draws with replacement, or too many")
    only_now()
    if not collecting():
        low, high = torch.aminmax(self)
        if not bool((low >= 0) & (high < math.inf)) or bool((self.sum(-1) == 0).any()):
            raise Declined("weights that are refused", lasting=False)
    race = own(torch.empty_like(self))
    exponential_(race, 1.0, generator=generator)
    pointwise.run(DIV, {"self": self, "other": race}, race)
    if num_samples == 1:
        return reduction_rows.argmax(race, -1, True)
    return sorting.topk(race, num_samples)[1]


FORMS = {
    "uniform_": uniform_, "normal_": normal_, "exponential_": exponential_, "normal.Tensor_Tensor": normal,
    "normal.Tensor_float": normal, "normal.float_Tensor": normal, "native_dropout": native_dropout,
    "randperm.generator_out": randperm_out, "multinomial": multinomial,
}  # fmt: skip
