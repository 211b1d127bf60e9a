"""FP8 quantisation on the device: amax, scale, codes, and the tile that is stored row-wise, column-wise or both.

Rules and layouts are those of `formats/fp8.py`, bit for bit. The compile-time FORMAT is a string of words from
`Fp8.device_format`: e4m3 or e5m2; 1x128, 128x128, row, tensor, static or unit; pow2 or fp32; te, exact or linghe; and fast for
the conversion instructions of sm_89 and later, without which integer arithmetic gives the same codes (the interpreter runs no
assembly).

A 128x128 tile is four [32, 128] tensors, the k-th holding rows 4g+k. Four codes of one column, one from each tensor, are one
int32, and the transposed store is a transpose of [32, 128] int32: no byte is shuffled.
"""

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)  # 1.75 * 2**8
E5M2_MAX = tl.constexpr(57344.0)  # 1.75 * 2**15
SMALLEST = tl.constexpr(2.0**-126)  # smallest scale but for linghe's
LINGHE_FLOOR = tl.constexpr(1e-30)
PACK_E4M3 = tl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;"
    " cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }"
)
PACK_E5M2 = tl.constexpr(
    "{ .reg .b16 lo, hi; cvt.rn.satfinite.e5m2x2.f32 lo, $2, $1;"
    " cvt.rn.satfinite.e5m2x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }"
)


@triton.constexpr_function
def has(FORMAT, *words):
    """Whether the format has one of these words."""
    return any(word in FORMAT.split(":") for word in words)


@triton.jit
def max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax(y, axis: tl.constexpr):
    """max |y| along an axis; NaN if there is one, which `tl.max` would drop."""
    return tl.reduce(tl.abs(y), axis, max_nan)


@triton.jit
def amax4(y0, y1, y2, y3):
    """max |y| of four tensors, element by element."""
    return max_nan(max_nan(tl.abs(y0), tl.abs(y1)), max_nan(tl.abs(y2), tl.abs(y3)))


@triton.jit
def quotient(x, d, c):
    """RN(x / d) with c = RN(1 / d), |x / d| far from overflow.

    0 of 2.3e9 pairs differ from the rounded quotient, for three instructions where `div_rn` takes ten and a branch. The
    residual is taken negative: the other way round -0 would become +0. A product with -1 is a sign bit in the next
    instruction; Triton's own -x is 0 - x, which would keep both in registers.
    """
    q = x * c
    return tl.fma(tl.fma(q, d, x * -1.0), c * -1.0, q)


@triton.jit
def scale_of(amax, FORMAT: tl.constexpr):
    """(stored scale, multiplier) of a block with this amax."""
    MAX: tl.constexpr = E4M3_MAX if has(FORMAT, "e4m3") else E5M2_MAX
    if has(FORMAT, "pow2"):
        # 1.75 is the mantissa of MAX: the exponent grows by one iff the mantissa of amax exceeds .75
        e = (amax.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000
        e -= 0x4000000 if has(FORMAT, "e4m3") else 0x7800000
        e = tl.maximum(e, 0x0E000000 if has(FORMAT, "linghe") else 0x00800000)
        scale = e.to(tl.float32, bitcast=True)
        mult = (0x7F000000 - e).to(tl.float32, bitcast=True)
    elif has(FORMAT, "te"):
        mult = tl.minimum(tl.div_rn(MAX, amax), 1.0 / SMALLEST)
        scale = tl.div_rn(1.0, mult)
    else:
        scale = quotient(amax, MAX, 1.0 / MAX)
        scale = tl.maximum(scale, LINGHE_FLOOR if has(FORMAT, "linghe") else SMALLEST)
        mult = tl.div_rn(1.0, scale)
    if not has(FORMAT, "linghe"):
        scale = tl.where(amax == 0.0, 1.0, scale)
        if not has(FORMAT, "pow2"):
            mult = tl.where(amax == 0.0, 1.0, mult)
    # Inf * 0 and NaN * 0 are NaN: one more instruction each poisons the whole block
    poison = amax * 0.0
    return scale + poison, mult + poison


@triton.jit
def scaled(y, scale, mult, FORMAT: tl.constexpr):
    """The fp32 value whose code y gets."""
    if has(FORMAT, "static", "unit"):
        if has(FORMAT, "unit"):
            v = y
        elif has(FORMAT, "te"):
            v = y * mult
        else:
            v = tl.div_rn(y, scale)
        v = tl.fma(y, 0.0, v)  # Inf becomes NaN, not the largest code
    elif has(FORMAT, "pow2", "te"):
        v = y * mult
    else:
        v = quotient(y, scale, mult)
    return v


@triton.jit
def code_bits(v, FORMAT: tl.constexpr):
    """The code of v in an int32: nearest even, saturating, NaN to 0x7F."""
    E4M3: tl.constexpr = has(FORMAT, "e4m3")
    DROP: tl.constexpr = 20 if E4M3 else 21  # mantissa bits that fp32 has more
    REBIAS: tl.constexpr = 120 << 3 if E4M3 else 112 << 2
    NORMAL: tl.constexpr = 121 << 23 if E4M3 else 113 << 23  # smallest normal code, as fp32 bits
    MAGIC: tl.constexpr = 141 << 23 if E4M3 else 134 << 23  # its last mantissa bit is worth the smallest code
    LARGEST: tl.constexpr = 0x43E00000 if E4M3 else 0x47600000
    bits = v.to(tl.int32, bitcast=True)
    a = tl.minimum(bits & 0x7FFFFFFF, LARGEST)
    normal = ((a + ((1 << (DROP - 1)) - 1) + ((a >> DROP) & 1)) >> DROP) - REBIAS
    magic = tl.full(a.shape, MAGIC, tl.int32).to(tl.float32, bitcast=True)
    small = (a.to(tl.float32, bitcast=True) + magic).to(tl.int32, bitcast=True) - MAGIC
    code = tl.where(a < NORMAL, small, normal) | ((bits >> 24) & 0x80)
    return tl.where(v == v, code, 0x7F)


@triton.jit
def decode(code, FORMAT: tl.constexpr):
    """The fp32 value of a code in a uint8; exact."""
    c = code.to(tl.int32)
    if has(FORMAT, "e4m3"):
        x = (((c & 0x7F) << 20) | ((c & 0x80) << 24)).to(tl.float32, bitcast=True)
        x = tl.where((c & 0x7F) == 0x7F, float("nan"), x * 2.0**120)  # the exponent bias is 120 less than fp32's
    else:
        x = (c << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)  # e5m2 is the upper half of fp16
    return x


@triton.jit
def encode(y, scale, mult, FORMAT: tl.constexpr):
    """The codes of y: an fp8 tile, without the word fast a uint8 one."""
    v = scaled(y, scale, mult, FORMAT)
    if not has(FORMAT, "fast"):
        codes = code_bits(v, FORMAT).to(tl.uint8)
    elif has(FORMAT, "e4m3"):
        codes = v.to(tl.float8e4nv)
    else:
        codes = v.to(tl.float8e5)
    return codes


@triton.jit
def codes_at(P, FORMAT: tl.constexpr):
    """A pointer to codes, of the type that `encode` gives."""
    if not has(FORMAT, "fast"):
        P = P.to(tl.pointer_type(tl.uint8), bitcast=True)
    return P


@triton.jit
def pack4(a, b, c, d, FORMAT: tl.constexpr):
    """The codes of four fp32 values in one int32, a's in the lowest byte."""
    if has(FORMAT, "fast"):
        ASM: tl.constexpr = PACK_E4M3 if has(FORMAT, "e4m3") else PACK_E5M2
        word = tl.inline_asm_elementwise(ASM, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
    else:
        word = code_bits(a, FORMAT) | (code_bits(b, FORMAT) << 8)
        word = word | (code_bits(c, FORMAT) << 16) | (code_bits(d, FORMAT) << 24)
    return word


@triton.jit
def interleave4(a, b, c, d):
    """[n] four times -> [4n] with element 4g+k from the k-th."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (4 * a.shape[0],))


# ---- tiles -----------------------------------------------------------------------------------------------------------


@triton.jit
def find_block(block, OFFSETS, E, M, BLOCK_E: tl.constexpr):
    """(group, first row, rows from there to the group's end) of a 128-row block; no rows when there is no such block.

    OFFSETS are device data: clamped to [0, M], so that whatever they hold no row outside the tensor is touched.
    """
    e = tl.arange(0, BLOCK_E)
    ends = tl.minimum(tl.maximum(tl.load(OFFSETS + e, e < E, 0).to(tl.int64), 0), M)
    starts = tl.minimum(tl.maximum(tl.load(OFFSETS + e - 1, (e > 0) & (e < E), 0).to(tl.int64), 0), M)
    count = tl.maximum(ends - starts, 0)
    blocks = (count + 127) // 128
    last = tl.cumsum(blocks, 0)
    here = (last > block) & (last - blocks <= block)
    group = tl.sum(tl.where(here, e, 0), 0)
    first = tl.sum(tl.where(here, (block - last + blocks) * 128, 0), 0)
    start = tl.sum(tl.where(here, starts, 0), 0)
    rows = tl.sum(tl.where(here, count, 0), 0)
    return group, start + first, rows - first


@triton.jit
def tile_scale(y0, y1, y2, y3, AMAX, FORMAT: tl.constexpr):
    """(scale, multiplier) where the whole tile has one; otherwise nothing of use."""
    if has(FORMAT, "128x128"):
        s, m = scale_of(amax(amax(amax4(y0, y1, y2, y3), 0), 0), FORMAT)
    elif has(FORMAT, "tensor"):
        s, m = scale_of(tl.load(AMAX).to(tl.float32, bitcast=True), FORMAT)
    elif has(FORMAT, "static"):
        s = tl.load(AMAX)
        m = tl.div_rn(1.0, s)
    else:
        s = 1.0
        m = 1.0
    return s, m


@triton.jit
def store_rows(
    y, k: tl.constexpr, s, m, Q, AMAX, row0, col0, rows_left, N, stride_q, FORMAT: tl.constexpr, FULL: tl.constexpr
):
    """Store the codes of rows 4g+k and return their scales."""
    r = 4 * tl.arange(0, 32) + k
    c = tl.arange(0, 128)[None, :]
    if has(FORMAT, "1x128"):
        s, m = scale_of(amax(y, 1), FORMAT)
    elif has(FORMAT, "row"):
        s, m = scale_of(tl.load(AMAX + row0 + r, r < rows_left, 0).to(tl.float32, bitcast=True), FORMAT)
    if has(FORMAT, "1x128", "row"):
        codes = encode(y, s[:, None], m[:, None], FORMAT)
    else:
        codes = encode(y, s, m, FORMAT)
    at = codes_at(Q, FORMAT) + (row0 + r)[:, None] * stride_q + col0 + c
    if FULL:
        tl.store(at, codes)
    else:
        tl.store(at, codes, (r[:, None] < rows_left) & (col0 + c < N))
    return s


@triton.jit
def store_columns(
    y0, y1, y2, y3, s, m, QT, ST, AMAX_T, row0, col0, block, group, rows_left, N, stride_qt, stride_st,
    FORMAT: tl.constexpr, ALIGN: tl.constexpr, GROUPED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Store the codes of the tile's columns, transposed, and their scales if it is the tile that gives them."""
    c = tl.arange(0, 128)
    if has(FORMAT, "1x128"):
        s, m = scale_of(amax(amax4(y0, y1, y2, y3), 0), FORMAT)
        at = ST + block.to(tl.int64) * (stride_st // 4 * 4) + col0 + c
        if FULL:
            tl.store(at, s)
        else:
            tl.store(at, s, col0 + c < N)
    elif has(FORMAT, "row"):
        a = tl.load(AMAX_T + group.to(tl.int64) * N + col0 + c, col0 + c < N, 0)
        s, m = scale_of(a.to(tl.float32, bitcast=True), FORMAT)
    if has(FORMAT, "1x128", "row"):
        s = s[None, :]
        m = m[None, :]
    y0 = scaled(y0, s, m, FORMAT)
    y1 = scaled(y1, s, m, FORMAT)
    y2 = scaled(y2, s, m, FORMAT)
    y3 = scaled(y3, s, m, FORMAT)
    words = tl.trans(pack4(y0, y1, y2, y3, FORMAT))
    store_words(words, QT, row0, col0, rows_left, N, stride_qt, ALIGN, GROUPED, FULL)


@triton.jit
def store_words(
    words, QT, row0, col0, rows_left, N, stride_qt, ALIGN: tl.constexpr, GROUPED: tl.constexpr, FULL: tl.constexpr
):
    """Store [128 columns, 32] words of four codes at QT[col0:, row0:]: as int32 where ALIGN rows divide all offsets.

    ALIGN is 16, 4 or 1, and 1 means bytes. Writing offsets as products with ALIGN tells the compiler: at 16 it stores 16
    bytes at once. Groups may start and end anywhere: there the choice is made at run time.
    """
    c = col0 + tl.arange(0, 128)[:, None]
    g = tl.arange(0, 32)[None, :]
    bytewise = ALIGN < 4
    if GROUPED and ALIGN >= 4:
        bytewise = (row0 % ALIGN != 0) | ((rows_left % ALIGN != 0) & (rows_left < 128))
    if ALIGN >= 4:
        if not bytewise:
            PER: tl.constexpr = ALIGN // 4
            at = QT.to(tl.pointer_type(tl.int32), bitcast=True) + c.to(tl.int64) * (stride_qt // ALIGN * PER) + g
            at += row0 // ALIGN * PER
            if FULL:
                tl.store(at, words)
            else:
                tl.store(at, words, (c < N) & (g < rows_left // ALIGN * PER))
    if bytewise:
        at = QT.to(tl.pointer_type(tl.uint8), bitcast=True) + c.to(tl.int64) * stride_qt + row0 + 4 * g
        for k in tl.static_range(4):
            tl.store(at + k, (words >> (8 * k)).to(tl.uint8), (c < N) & (4 * g + k < rows_left))


@triton.jit
def store_tile4(
    y0, y1, y2, y3, Q, S, QT, ST, AMAX, AMAX_T, row0, col0, block, group, rows_left, N, stride_q, stride_s, stride_qt,
    stride_st, FORMAT: tl.constexpr, ALIGN: tl.constexpr, GROUPED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Quantise the tile y (rows row0.., columns col0..; zero outside) and store what is not None of Q, S and QT, ST.

    `row0` is 64-bit; `block` is the row of block scales, `group` that of column scales. Formats row and tensor read the bits
    of amax from AMAX and AMAX_T, static its scale from AMAX; these and unit leave the scales to `store_given`. FULL says
    that the tile lies wholly inside; ALIGN and GROUPED are told in `store_words`.
    """
    c = tl.arange(0, 128)
    tile = col0 // 128
    s, m = tile_scale(y0, y1, y2, y3, AMAX, FORMAT)
    if has(FORMAT, "128x128"):
        if S is not None:
            tl.store(S + block.to(tl.int64) * stride_s + tile, s)
        if ST is not None:
            tl.store(ST + tile.to(tl.int64) * stride_st + block, s)
    if Q is not None:
        s0 = store_rows(y0, 0, s, m, Q, AMAX, row0, col0, rows_left, N, stride_q, FORMAT, FULL)
        s1 = store_rows(y1, 1, s, m, Q, AMAX, row0, col0, rows_left, N, stride_q, FORMAT, FULL)
        s2 = store_rows(y2, 2, s, m, Q, AMAX, row0, col0, rows_left, N, stride_q, FORMAT, FULL)
        s3 = store_rows(y3, 3, s, m, Q, AMAX, row0, col0, rows_left, N, stride_q, FORMAT, FULL)
        if has(FORMAT, "1x128"):
            at = S + tile.to(tl.int64) * (stride_s // 4 * 4) + row0 + c
            if FULL:
                tl.store(at, interleave4(s0, s1, s2, s3))
            else:
                tl.store(at, interleave4(s0, s1, s2, s3), c < rows_left)
    if QT is not None:
        store_columns(
            y0, y1, y2, y3, s, m, QT, ST, AMAX_T, row0, col0, block, group, rows_left, N, stride_qt, stride_st,
            FORMAT, ALIGN, GROUPED, FULL,
        )  # fmt: skip


@triton.jit
def store_given(S, ST, AMAX, AMAX_T, row0, col0, block, groups, rows_left, N, stride_st, FORMAT: tl.constexpr):
    """Store the scales of formats row, tensor, static and unit: each by one tile, `block` and col0 saying which."""
    c = tl.arange(0, 128)
    if has(FORMAT, "row"):
        if S is not None:
            if col0 == 0:
                s, _ = scale_of(tl.load(AMAX + row0 + c, c < rows_left, 0).to(tl.float32, bitcast=True), FORMAT)
                tl.store(S + row0 + c, s, c < rows_left)
        if ST is not None:
            if block < groups:
                bits = tl.load(AMAX_T + block.to(tl.int64) * N + col0 + c, col0 + c < N, 0)
                s, _ = scale_of(bits.to(tl.float32, bitcast=True), FORMAT)
                tl.store(ST + block.to(tl.int64) * stride_st + col0 + c, s, col0 + c < N)
    elif has(FORMAT, "tensor", "static", "unit"):
        if (block == 0) & (col0 == 0):
            if has(FORMAT, "tensor"):
                s, _ = scale_of(tl.load(AMAX).to(tl.float32, bitcast=True), FORMAT)
            elif has(FORMAT, "static"):
                s = tl.load(AMAX)
            else:
                s = 1.0
            if S is not None:
                tl.store(S, s)
            if ST is not None:
                tl.store(ST, s)
