"""Deliberately broken kernels: an edit of a source file, and the property that must notice it.

A net that lets one of these through is no net. An edit that no longer applies fails its test: bring it up to date with the file.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from tilewright.check.far_apart import load
from tilewright.op import OPS, Op

ROOT = Path(__file__).resolve().parents[1]
SUBJECT = "tests/subject.py"
_count = itertools.count()


class Mutant(NamedTuple):
    """`old` in `file` becomes `new` everywhere; `prop` must fail for `op`, and what it says must match `says`. `missed_by` is a
    property that does not notice, which is why `prop` is there. `through` are the files, each of which imports the one before it,
    by which `file` comes to the declaration, if it is not in `file` itself."""

    name: str
    old: str
    new: str
    prop: str
    says: str
    file: str = SUBJECT
    op: str = "toy_norm"
    missed_by: str = ""
    through: tuple[str, ...] = ()


def edited(text: str, mutant: Mutant, tag: str) -> str:
    """The file's text with the edit, as `moved` gives it."""
    assert mutant.old in text, f"{mutant.name}: {mutant.file} no longer contains {mutant.old!r}"
    return moved(text.replace(mutant.old, mutant.new), mutant.file, tag)


def moved(text: str, file: str, tag: str) -> str:
    """A file's text with its ops under other names and its imports absolute, for it will stand in another folder."""
    package = Path(file).parent.parts

    def absolute(found: re.Match) -> str:
        return (
            ".".join(("from " + package[0], *package[1 : len(package) - len(found[1]) + 1], *filter(None, [found[2]])))
            + " "
        )

    text = re.sub(r"^from (\.+)([\w.]*) ", absolute, text, flags=re.MULTILINE)
    return re.sub(r'\bOp\(\s*"(\w+)"', rf'Op("{tag}_\1"', text)


@contextmanager
def loaded(mutant: Mutant, folder: Path, tag: str) -> Iterator[ModuleType]:
    """The broken file, or the last of those that it comes through, for as long as this lasts."""
    files, modules = (mutant.file, *mutant.through), []
    try:
        for i, file in enumerate(files):
            text = (ROOT / file).read_text()
            if modules:
                text = redirected(moved(text, file, tag), files[i - 1], modules[-1].__name__)
            else:
                text = edited(text, mutant, tag)
            path = folder / f"{tag}_{i}.py"
            path.write_text(text)
            modules.append(load(str(path), path.stem))
        yield modules[-1]
    finally:
        for module in modules:
            del sys.modules[module.__name__]


@contextmanager
def declared(mutant: Mutant, folder: Path) -> Iterator[tuple[Op, Path]]:
    """The broken op and the file that declares it, for as long as this lasts."""
    tag, before = f"mutant{next(_count)}", set(OPS)
    try:
        with loaded(mutant, folder, tag) as module:
            yield OPS[f"{tag}_{mutant.op}"], Path(module.__file__)
    finally:
        for name in set(OPS) - before:
            del OPS[name]


def redirected(text: str, file: str, module: str) -> str:
    """The text with its imports of and from a file taken from another module."""
    package, _, name = file.removesuffix(".py").replace("/", ".").rpartition(".")
    lines, found = [], 0
    for line in text.splitlines(keepends=True):
        whole = line.removeprefix(f"from {package} import ").rstrip("\n").split(", ") if "(" not in line else []
        if line.startswith(f"from {package}.{name} import"):
            line, found = line.replace(f"{package}.{name}", module, 1), found + 1
        elif line.startswith(f"from {package} import ") and name in whole:
            others = [other for other in whole if other != name]
            kept = f"from {package} import {', '.join(others)}\n" if others else ""
            line, found = f"{kept}import {module} as {name}\n", found + 1
        lines.append(line)
    assert found == 1, f"{file} is not imported once"
    return "".join(lines)


MUTANTS = [
    Mutant("row mask dropped", "live = row < M", "live = row < M + ROWS", "accuracy", "outside every tensor"),
    Mutant("row mask off by one", "live = row < M", "live = row <= M", "guarded_memory", "outside every tensor|written"),
    Mutant("column mask dropped", "live & (col < N)", "live & (col < BLOCK)", "accuracy", "x|y|outside"),
    Mutant("column mask off by one", "live & (col < N)", "live & (col <= N)", "accuracy", "x|y|outside"),
    Mutant("tail not written", "y.to(Y.dtype.element_ty), inside)", "y.to(Y.dtype.element_ty), live & (col < N - 1))",
           "guarded_memory", "filled with 0x"),
    Mutant("weight read past its end", "stride_w, col < N, 0.0)", "stride_w)", "guarded_memory", "load outside every tensor"),
    Mutant("partial sums written past their end", "tl.sum(dw, axis=0), n < N)", "tl.sum(dw, axis=0))",
           "guarded_memory", "store outside every tensor|written"),
    Mutant("masked load without other", "inside, 0.0).to(tl.float32)", "inside).to(tl.float32)", "accuracy", "not finite|NaN|nan"),
    Mutant("padding in the variance", "centred = tl.where(inside, x - mean, 0.0)", "centred = x - mean", "accuracy", ": y"),
    Mutant("32-bit row offset", "tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]",
           "tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]", "wide_strides", "outside every tensor|differ|status -11"),
    Mutant("32-bit column offset", "col.to(tl.int64) * stride_n", "col * stride_n", "wide_strides",
           "outside every tensor|differ|status -11"),
    Mutant("bf16 accumulator", "dw += g * xhat", "dw = (dw + g * xhat).to(tl.bfloat16).to(tl.float32)", "accuracy", "d_weight"),
    Mutant("statistics in bf16", "rstd = tl.rsqrt(tl.div_rn(tl.sum(centred * centred, axis=1)[:, None], N.to(tl.float32)) + eps)",
           "rstd = tl.rsqrt(tl.div_rn(tl.sum(centred * centred, axis=1)[:, None], N.to(tl.float32)) + eps)"
           ".to(tl.bfloat16).to(tl.float32)", "accuracy", ": y"),
    Mutant("rounded twice", "y = centred * rstd", "y = (centred * rstd).to(Y.dtype.element_ty).to(tl.float32)",
           "accuracy", "correctly rounded|RMS|too far"),
    Mutant("eps outside the root", "N.to(tl.float32)) + eps)", "N.to(tl.float32))) + eps", "accuracy", ": y"),
    Mutant("offset dropped", ".to(tl.float32) + offset\n", ".to(tl.float32)\n", "accuracy", ": y"),
    Mutant("offset dropped in the backward", ".to(tl.float32) + offset)\n", ".to(tl.float32))\n", "accuracy", "d_x"),
    Mutant("row stride ignored", "*flat.stride(), weight_stride", "N, flat.stride(1), weight_stride",
           "strides", "x .*differ|outside"),
    Mutant("column stride ignored", "col.to(tl.int64) * stride_n", "col", "strides", "differ|outside"),
    Mutant("weight stride ignored", "W + col.to(tl.int64) * stride_w", "W + col", "strides", "weight"),
    Mutant("gradient taken for contiguous", "weight_stride(saved.weight), *g.stride()", "weight_stride(saved.weight), N, 1",
           "strides", "gradient"),
    Mutant("out taken for contiguous", "weight_stride(weight), *y2.stride()", "weight_stride(weight), N, 1", "outs", "out"),
    Mutant("gradient of another row", "load_rows(DY, row, col,", "load_rows(DY, M - 1 - row, col,", "accuracy", "d_|outside"),
    Mutant("upstream gradient taken for 1", "g = load_rows(DY, row, col, inside, stride_ym, stride_yn)",
           "g = tl.where(inside, 1.0, 0.0)", "gradients", "d_"),
    Mutant("upstream gradient overwritten", "        dw += g * xhat\n", "        dw += g * xhat\n"
           "        tl.store(DY + row * stride_ym + col.to(tl.int64) * stride_yn, (g * 0).to(DY.dtype.element_ty), inside)\n",
           "guarded_memory", "upstream gradient"),
    Mutant("NaN leaks to other rows", "centred = tl.where(inside, x - mean, 0.0)",
           "centred = tl.where(inside, x - mean + 0.0 * tl.sum(tl.sum(x, axis=1), axis=0), 0.0)", "isolation", "other rows"),
    Mutant("sum left to chance", "DW + tl.program_id(0).to(tl.int64) * N + n", "DW + n", "repeatable", "d_weight"),
    Mutant("depends on what memory held", "toy_norm_sum(part, dweight, programs, N",
           "toy_norm_sum(torch.empty(programs + 1, N), dweight, programs + 1, N", "guarded_memory", "d_weight"),
    Mutant("gradient only when x wants one", 'wanted = "weight" in saved.needs', 'wanted = {"weight", "x"} <= saved.needs',
           "gradients", "only weight"),
    Mutant("strides other than the fake's", "torch.empty_like(x, memory_format=torch.contiguous_format)\n    mean",
           "torch.empty(N, M, dtype=x.dtype).t()\n    mean", "fakes", "fake y"),
    Mutant("number left out of the call", "*y2.stride(), eps, offset,", "*y2.stride(), eps, 0.0,", "accuracy", ": y"),
    Mutant("fallback for many rows wrong", "tl.cdiv(M, ROWS), PROGRAMS)", "tl.minimum(tl.cdiv(M, ROWS), 2 * PROGRAMS), PROGRAMS)",
           "sizes", "d_"),
]  # fmt: skip

MANY = "tilewright/ops/optimiser/multi_tensor.py"
MUTANTS += [
    Mutant("multi_tensor: tail left out", "for at in range(start, stop, LANES):\n            acc",
           "for at in range(start, stop - 1, LANES):\n            acc", "sizes", "out", MANY, "multi_tensor_norm"),
    Mutant("multi_tensor: padding counted", 'other = 1.0 if KIND == "zeros" else 0.0', "other = 0.0", "accuracy", "out", MANY,
           "multi_tensor_count_zeros"),
    Mutant("multi_tensor: slightly too large", "wide = x.to(tl.float64)", "wide = (x.to(tl.float32) * 1.0000005).to(tl.float64)",
           "accuracy", "out", MANY, "multi_tensor_norm"),
    Mutant("multi_tensor: strides of the source for the result", "offsets(row, at + lane, 8)", "offsets(row, at + lane, 5)",
           "outs", "out", MANY, "multi_tensor_scale"),
    Mutant("multi_tensor: written although it is an argument", "tl.store(P + tl.program_id(0), total", "tl.store(Z, 0.0)\n"
           "    tl.store(P + tl.program_id(0), total", "guarded_memory", "was written|differ", MANY, "multi_tensor_norm"),
]  # fmt: skip

NORM, GLU, LOSS, CODES = (
    f"tilewright/ops/{name}.py"
    for name in ("norm/rms_norm", "activation/glu", "loss/cross_entropy", "quantise/quantize")
)
MUTANTS += [
    Mutant("rms_norm: weight offset dropped", "w += weight_offset", "w += 0.0", "accuracy", "out",
           "tilewright/ops/norm/row_pieces.py", "rms_norm", through=(NORM,)),
    Mutant("rms_norm: eps dropped", "inv_n + eps)", "inv_n)", "accuracy", "rms_norm.*(out|d_x)", NORM, "rms_norm"),
    Mutant("add_rms_norm: norm of the unrounded sum", "r.to(tl.float32)).to(H.dtype.element_ty)", "r.to(tl.float32))", "accuracy",
           "y", NORM, "add_rms_norm"),
    Mutant("add_rms_norm: gradient of the sum dropped", "dx += tl.load(DH", "dx += 0.0 * tl.load(DH", "gradients", "d_", NORM,
           "add_rms_norm"),
    Mutant("glu: scale of another row", "SCALE + row * stride_s", "SCALE + (M - 1 - row) * stride_s", "accuracy", "out|outside",
           GLU, "glu"),
    Mutant("glu: gradients exchanged", "da, db, terms = gated_gradient", "db, da, terms = gated_gradient", "accuracy", "d_", GLU,
           "glu"),
    Mutant("cross_entropy: columns padded with 0", 'inside, -float("inf"))', "inside, 0.0)", "accuracy", "loss", LOSS,
           "cross_entropy"),
    Mutant("cross_entropy: class weight dropped", "own = load_if(W + y * stride_w, counts)", "own = 1.0", "accuracy", "loss", LOSS,
           "cross_entropy"),
    Mutant("dequantize: scales exchanged", "load_way(Way(codes.contiguous(), SCALE,",
           "load_way(Way(codes.contiguous(), SCALE.flip(1),", "accuracy", "out", CODES, "dequantize_codes"),
]  # fmt: skip

ROUTER = "tilewright/ops/moe/moe_router.py"
PLANES, OUTER = "tilewright/ops/norm/instance_norm.py", "tilewright/ops/activation/outer.py"
MUTANTS += [
    Mutant("topk_routing: a group too few of 32", "KEPT=group_topk,", "KEPT=group_topk - (groups == 32),", "as_in_models",
           "chosen: . of . rows chose others", ROUTER, "topk_routing", missed_by="accuracy"),
]  # fmt: skip

TILES, PORTABLE, MERGE, ATTENTION = (
    f"tilewright/attention/{name}.py" for name in ("tiles", "portable", "merge", "attention")
)
MUTANTS += [
    Mutant("attention: a window off by one", "ok &= j <= position + WINDOW.right", "ok &= j <= position + WINDOW.right + 1",
           "accuracy", "attention.*: (o|d_)", TILES, "attention", through=(PORTABLE, ATTENTION)),
    Mutant("attention: keys of the wrong sequence", "other_first = begin_of(OTHER, last,", "other_first = begin_of(OWN, last,",
           "accuracy", "attention.*: (o|d_)", TILES, "attention", through=(PORTABLE, ATTENTION)),
    Mutant("attention: dk of only the first head of a group", "kv_head * GROUP + GROUP)", "kv_head * GROUP + 1)", "accuracy",
           "d_(k|v)", PORTABLE, "attention", through=(ATTENTION,)),
    Mutant("attention: delta of another row", "tl.load(DELTA + at, live,", "tl.load(DELTA + tl.maximum(at - 1, 0), live,",
           "accuracy", "d_q", PORTABLE, "attention", through=(ATTENTION,)),
    Mutant("attention_merge: in base 2", "tl.exp2((lse - base) * LOG2E)", "tl.exp2(lse - base)", "accuracy", "merged", MERGE,
           "attention_merge"),
]  # fmt: skip

SLOTS = "tilewright/attention/cache_write.py"
POOL, CHUNKS, COLUMNS, TOKENS = (
    f"tilewright/ops/recurrent/{name}.py" for name in ("pool", "linear_chunks", "linear_columns", "linear_tokens")
)
MUTANTS += [
    Mutant("causal_conv1d_step: slots past the last", "known = (slot >= 0) & (slot < POOL)", "known = slot >= 0", "wild_indices",
           "outside|out of bounds|stray", POOL, "causal_conv1d_step", through=("tilewright/ops/recurrent/causal_conv1d_step.py",)),
    Mutant("linear_attention: decay to the chunk's end forgotten", "left = wide * (rk * to_end(decay))[:, None]",
           "left = wide * rk[:, None]", "accuracy", ": (o|final)", CHUNKS, "linear_attention",
           through=("tilewright/ops/recurrent/linear_attention.py",)),
    Mutant("linear_attention: a token is loaded past a short sequence's last", "live = known & (i + 1 < count)", "live = known",
           "guarded_memory", "outside|out of bounds|stray", TOKENS, "linear_attention",
           through=("tilewright/ops/recurrent/linear_attention.py",)),
    Mutant("linear_attention: tokens in no sequence go on from a state", "known = known & (sequence < SEQUENCES)", "known = known",
           "accuracy", ": o|outside|out of bounds|stray", TOKENS, "linear_attention",
           through=("tilewright/ops/recurrent/linear_attention.py",)),
    Mutant("linear_attention_columns: a short sequence takes its first token alone", "            token = after\n", "",
           "accuracy", ": (o|final)", TOKENS, "linear_attention_columns",
           through=("tilewright/ops/recurrent/linear_attention.py",)),
    Mutant("linear_attention_columns: a decay too few in a block", "& (j + 1 <= place - LATE)", "& (j + 1 < place - LATE)",
           "accuracy", ": o", COLUMNS, "linear_attention_columns", through=("tilewright/ops/recurrent/linear_attention.py",)),
    Mutant("linear_attention_columns: keys decay past the block that reads them", "live & (i < end)", "live", "accuracy",
           ": (o|final)", COLUMNS, "linear_attention_columns", through=("tilewright/ops/recurrent/linear_attention.py",)),
    Mutant("cache_write: slots past the last", "(slot >= 0) & (slot < PAGES.to(tl.int64) * PAGE)", "slot >= 0", "wild_indices",
           "outside|out of bounds|stray", SLOTS, "cache_write"),
    Mutant("cache_move: read and written at once", "for out in (False, True):", "for out in (True, False):", "accuracy",
           "k_cache after", SLOTS, "cache_move"),
]  # fmt: skip

DEVICE, ROPE, SPLIT, SPLIT_CACHE = (
    f"tilewright/{name}.py"
    for name in ("device/rotary", *(f"ops/rotary/{n}" for n in ("rope", "qkv_split", "qkv_split_cache")))
)
MUTANTS += [
    Mutant("rope: positions of another batch", "at = batch * ANGLES.placed_b + index", "at = index", "accuracy",
           "rope.*: (y|d_)", DEVICE, "rope_one", through=(ROPE,)),
    Mutant("qkv_split: a position not clamped", "tl.where((position >= 0) & (position < P), position, -1)", "position",
           "wild_indices", "outside|out of bounds|stray", DEVICE, "qkv_split", through=(SPLIT,)),
    Mutant("qkv_split_cache: slots of another token", "batch * SLOTS.stride_b + index", "index", "accuracy", "_cache after",
           SPLIT_CACHE, "qkv_split_cache"),
    Mutant("qkv_split_cache: scale of the first of each pair alone", "max_nan(amax(a, 2), amax(b, 2))", "amax(a, 2)",
           "accuracy", "k_(cache|scale) after", SPLIT_CACHE, "qkv_split_cache"),
]  # fmt: skip

CODED, CODED_ROWS = "tilewright/attention/coded.py", "tilewright/attention/coded_rows.py"
MUTANTS += [
    Mutant("attention_codes: scale of another key", "load_scale(KS, batch, kv_head, tile.first_k, j, there, EVERY)",
           "load_scale(KS, batch, kv_head, tile.first_k, tl.maximum(j - 1, 0), there, EVERY)", "accuracy",
           "attention_codes.*: (o|lse)", CODED, "attention_codes"),
    Mutant("attention_codes_pv: a scale for each value where a block has one",
           "load_scale(VS, batch, kv_head, tile.first_k, j, there, EVERY)",
           "load_scale(VS, batch, kv_head, tile.first_k, j, there)", "accuracy", "attention_codes_pv.*: o", CODED,
           "attention_codes_pv"),
    Mutant("attention_blocks: what a window hides counts", "stop = tl.where(tile.count_q > 0, stop, start)",
           "start, stop = 0 * start, count + 0 * stop", "accuracy", "attention_blocks.*: (codes|scale)", CODED_ROWS,
           "attention_blocks"),
    Mutant("attention_blocks: a scale of its own for each part", "tl.zeros([BLOCK_R], tl.float32) + tl.max(top, 0)", "top",
           "accuracy", "attention_blocks.*: (codes|scale)", CODED_ROWS, "attention_blocks"),
    Mutant("attention_codes_pv: weights' scale dropped", "return total + code_product(a, b, FORMAT) * s[:, None]",
           "return total + code_product(a, b, FORMAT)", "accuracy", "attention_codes_pv.*: o", CODED, "attention_codes_pv"),
    Mutant("attention_codes: mean not put back", "raw += shift_by[:, None]", "raw += 0.0 * shift_by[:, None]", "accuracy",
           "attention_codes.*: (o|lse)", CODED, "attention_codes"),
]  # fmt: skip

MODULATED, LAYER = "tilewright/ops/norm/modulated_norm", ("tilewright/ops/norm/layer_norm.py",)
MUTANTS += [
    Mutant("layer_norm: squares of what is not centred", " x = x - mean\n", " x = x - 0.0 * mean\n", "accuracy", "out",
           f"{MODULATED}.py", "layer_norm", through=LAYER),
    Mutant("layer_norm: the row's end counts among squares", "x = tl.where(i * BLOCK + col < N, x, 0.0)", "x = x + 0.0", "accuracy",
           "out|d_x", f"{MODULATED}.py", "layer_norm", through=LAYER),
    Mutant("layer_norm: shift lies like scale", "ts = laid_pieces(SHIFT, row", "ts = laid_pieces(SCALE, row", "accuracy", "out",
           f"{MODULATED}.py", "layer_norm", through=LAYER),
    Mutant("add_layer_norm: norm of the unrounded sum", "(r.to(tl.float32) + x).to(H.dtype.element_ty)", "(r.to(tl.float32) + x)",
           "accuracy", "y", f"{MODULATED}.py", "add_layer_norm", through=LAYER),
    Mutant("layer_norm: mean of the gradient dropped", "g - mean_g - n", "g - 0.0 * mean_g - n", "accuracy", "d_x",
           f"{MODULATED}_backward.py", "layer_norm", through=LAYER),
    Mutant("layer_norm: dscale of the norm alone", "dy * modulate(n, w, b, None, None)", "dy * n", "sizes",
           "d_scale", f"{MODULATED}_backward.py", "layer_norm", through=LAYER),
    Mutant("add_layer_norm: gradient of the sum dropped", "dh += tl.load(DH", "dh += 0.0 * tl.load(DH", "gradients", "d_",
           f"{MODULATED}_backward.py", "add_layer_norm", through=LAYER),
]  # fmt: skip

EPILOGUE, SAMPLING = "tilewright/ops/activation/epilogue.py", "tilewright/ops/sampling"
MUTANTS += [
    Mutant("the residual lies like x", "S.r4, S.r3, S.r2, S.r1, S.r0", "S.x4, S.x3, S.x2, S.x1, S.x0", "strides",
           "residual|outside every tensor", EPILOGUE, "epilogue"),
    Mutant("gate left out of the gradient", "    if g is not None:\n        dy *= g\n", "", "accuracy", "d_x",
           EPILOGUE, "epilogue"),
    Mutant("a masked row is NaN", 'return tl.where(m == -float("inf"), 0.0, m)', "return m", "accuracy", "y",
           f"{SAMPLING}/softmax.py", "softmax"),
    Mutant("a row's place in its seed", "(SEED + row * stride_s).to(tl.int64)", "(SEED + row * stride_s).to(tl.int64) + row",
           "accuracy", "ids", f"{SAMPLING}/sample.py", "sample"),
    Mutant("the least of what is kept left out", "(key >= least) & (w.to(", "(key > least) & (w.to(", "accuracy", "ids",
           f"{SAMPLING}/sample.py", "sample"),
    Mutant("ancestors counted by steps", "depth = depth + length", "depth = depth + 1", "accuracy", "depth", f"{SAMPLING}/tree.py",
           "tree_bits"),
]  # fmt: skip

KEYS, SPARSE = "tilewright/ops/recurrent/rwkv_keys.py", "tilewright/ops/activation/sparse_mm.py"
MUTANTS += [
    Mutant("rwkv_keys: gradient along the head kept", "(g - removal * s) * inverse", "(g - 0.0 * removal * s) * inverse",
           "accuracy", "d_k", KEYS, "rwkv_keys"),
    Mutant("rwkv_keys: dka of a alone", "dka += dkeys * (k * (a - 1.0))", "dka += dkeys * (k * a)", "accuracy", "d_ka", KEYS,
           "rwkv_keys"),
    Mutant("rwkv_keys: a long head read by its first columns", "for start in range(0, D, BLOCK):\n        c = columns",
           "for start in range(0, BLOCK, BLOCK):\n        c = columns", "sizes", "removal|d_", KEYS, "rwkv_keys"),
    Mutant("sparse_mm: weights of 0 have a place", "tl.cumsum(counts, 0) - 1, -1)", "tl.cumsum(counts, 0) - 1, 0)", "accuracy",
           "out", SPARSE, "sparse_mm"),
    Mutant("instance_norm: a gradient without the slope", "level - n * slope", "level - 0.0 * n * slope", "accuracy", "d_x",
           PLANES, "instance_norm"),
    Mutant("instance_norm: half of the weight's gradient", "tl.store(SUMS + row, cross, live)",
           "tl.store(SUMS + row, cross * 0.5, live)", "accuracy", "d_weight", PLANES, "instance_norm"),
    Mutant("outer: the last block of rows left out of the sums", "tl.range(band, blocks, BANDS", "tl.range(band, blocks - 1, BANDS",
           "accuracy", "d_", OUTER, "outer"),
    Mutant("sparse_mm: the last of a chunk left out", "count = tl.sum(counts, 0)", "count = tl.sum(counts, 0) - 1", "accuracy",
           "out", SPARSE, "sparse_mm"),
    Mutant("sparse_mm: a part reads into the next", "tl.minimum(part * per + per, tl.cdiv(K, CHUNK))",
           "tl.minimum(part * per + per + 1, tl.cdiv(K, CHUNK))", "sizes", "out", SPARSE, "sparse_mm"),
]  # fmt: skip

# What only the compiled code shows: nothing that a property can see is wrong in these.
COMPILED = [
    Mutant("groups are a dimension of the load",
           "            z = read_logits(X, row[:, :, None], e, there & (row[:, :, None] < M), stride_xt, stride_xe)",
           "            at = tl.arange(0, BLOCK_G)[None, :, None] * SIZE + tl.arange(0, BLOCK_S)[None, None, :]\n"
           "            z = read_logits(X, row[:, :, None], at, (at < E) & (row[:, :, None] < M), stride_xt, stride_xe)\n"
           "            z = tl.reshape(z, [ROWS, 1, BLOCK_G * BLOCK_S])", "reductions",
           r"choice\.py:\d+ from .* lane bits \[0, 3, 4\] are no neighbours", ROUTER, "topk_routing"),
]  # fmt: skip
