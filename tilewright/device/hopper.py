"""FP8 both ways from a 128x128 tile held by four warps on Hopper, in Gluon.

A tile is two halves of 64 rows. A thread holds four rows of twice eight columns of each: shared memory is read without bank
conflicts, and the codes of four rows of a column are one word, so that the transposed store moves words. FORMAT is told in
`quantize`.
"""

from ..core.triton_versions import gl, gluon
from .quantize import encode, max_nan, pack4, scale_of

TILE = gl.constexpr(gl.BlockedLayout([4, 8], [4, 8], [4, 1], [1, 0]))
COLUMN = gl.constexpr(gl.BlockedLayout([4, 1], [1, 32], [1, 4], [0, 1]))  # a thread has one column of all four warps
WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))  # a thread has four words of one column
UNPACK = gl.constexpr("{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }")


@gluon.jit
def widen(x):
    """bf16 in fp32. Of two in a word the upper is the word without its lower half: one instruction, where a conversion takes
    two."""
    return gl.inline_asm_elementwise(UNPACK, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def store_rows(y, Q, S, row0, rows_left, col0, N, stride_s, AT: gl.constexpr, FORMAT: gl.constexpr, MASK: gl.constexpr):
    """Row-wise codes and scales of 64 rows."""
    r = AT + gl.arange(0, 64, gl.SliceLayout(1, TILE))
    c = gl.arange(0, 128, gl.SliceLayout(0, TILE))
    s, m = scale_of(gl.reduce(gl.abs(y), 1, max_nan), FORMAT)
    codes = encode(y, gl.expand_dims(s, 1), gl.expand_dims(m, 1), FORMAT)
    at = Q + row0.to(gl.int64) * N + col0 + gl.expand_dims(r * N, 1) + gl.expand_dims(c, 0)
    scales = S + (col0 // 128).to(gl.int64) * (stride_s // 4 * 4) + row0 + r
    if MASK:
        gl.store(at, codes, gl.expand_dims(r < rows_left, 1))
        gl.store(scales, s, r < rows_left)
    else:
        gl.store(at, codes)
        gl.store(scales, s)


@gluon.jit
def store_words(words, QT, row0, rows_left, col0, M, AT: gl.constexpr, MASK: gl.constexpr):
    """Words [128 columns, 16] at QT[col0:, row0 + AT:], 16 bytes at a time: 16 divides M, row0 and the rows left."""
    c = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, WORDS)), 1)
    g = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, WORDS)), 0) + AT // 4
    at = QT.to(gl.pointer_type(gl.int32), bitcast=True) + col0.to(gl.int64) * (M // 16 * 4) + row0 // 16 * 4
    at = at + c * (M // 16 * 4) + g
    if MASK:
        gl.store(at, words, g < rows_left // 16 * 4)
    else:
        gl.store(at, words)


@gluon.jit
def store_bytes(words, QT, row0, rows_left, col0, M, AT: gl.constexpr):
    """The same for a group that begins or ends anywhere."""
    c = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, WORDS)), 1)
    r = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, WORDS)), 0) * 4 + AT
    at = QT.to(gl.pointer_type(gl.uint8), bitcast=True) + col0.to(gl.int64) * M + row0 + c * M + r
    for k in range(4):
        gl.store(at + k, (words >> (8 * k)).to(gl.uint8), r + k < rows_left)


@gluon.jit
def store_columns(
    y, QT, row0, rows_left, col0, M, AT: gl.constexpr, FORMAT: gl.constexpr, MASK: gl.constexpr, GROUPED: gl.constexpr
):
    """Column-wise codes of 64 scaled rows, transposed."""
    even, odd = gl.split(y.reshape([16, 2, 2, 128]).permute((0, 3, 1, 2)))
    y0, y2 = gl.split(even)
    y1, y3 = gl.split(odd)
    words = gl.convert_layout(pack4(y0, y1, y2, y3, FORMAT).permute((1, 0)), WORDS)
    if GROUPED:
        if (row0 % 16 != 0) | ((rows_left % 16 != 0) & (rows_left < 128)):
            store_bytes(words, QT, row0, rows_left, col0, M, AT)
        else:
            store_words(words, QT, row0, rows_left, col0, M, AT, MASK)
    else:
        store_words(words, QT, row0, rows_left, col0, M, AT, MASK)


@gluon.jit
def store_tile(
    y0, y1, Q, S, QT, ST, block, row0, rows_left, col0, M, N, stride_s, stride_st,
    FORMAT: gl.constexpr, MASK: gl.constexpr, GROUPED: gl.constexpr,
):  # fmt: skip
    """The two halves of a tile quantised both ways."""
    store_rows(y0, Q, S, row0, rows_left, col0, N, stride_s, 0, FORMAT, MASK)
    store_rows(y1, Q, S, row0, rows_left, col0, N, stride_s, 64, FORMAT, MASK)
    # Within a warp first, then one thread a column: each column's scale is computed once, not by all who hold the column
    top = gl.reduce(max_nan(gl.abs(y0), gl.abs(y1)).reshape([4, 16, 128]), 1, max_nan)
    s, m = scale_of(gl.reduce(gl.convert_layout(top, COLUMN), 0, max_nan), FORMAT)
    c = gl.arange(0, 128, gl.SliceLayout(0, COLUMN))
    gl.store(ST + block.to(gl.int64) * (stride_st // 4 * 4) + col0 + c, s)
    m = gl.expand_dims(gl.convert_layout(m, gl.SliceLayout(0, TILE)), 0)
    store_columns(y0 * m, QT, row0, rows_left, col0, M, 0, FORMAT, MASK, GROUPED)
    store_columns(y1 * m, QT, row0, rows_left, col0, M, 64, FORMAT, MASK, GROUPED)
