"""The newest Triton compiles what is hot, and every kernel in Gluon: the table of `tests/compile` is the oldest one's."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.check.variants import FORWARD, HOT, Call, Variant, drawn, in_hot_formats, is_gluon, needed

OPS = tw.catalogue()
# Bytes a thread: another compiler may keep a few addresses in memory, not a tile. Kernels in Gluon fill the registers that they
# are given, and Triton 3.9 has its assembler allocate these by a simpler rule: `docs/measured.md` says what that comes to
SPILLS, GLUON_SPILLS = 64, 192
MORE_SPILLS = {
    "attention_backward_hopper": 424,
    "attention_codes_hopper": 1900,
    # Addresses: of a walk before and after its loop, of a walk back twelve that each chunk loads. Triton 3.6 spills 68 bytes
    # of the first at most, and none of the second
    "linear_attention_states": 124,
    "linear_attention_states_backward": 96,
    "keep_few": 592,  # has 40 registers a thread, so that three programs fit in an SM; none by Triton 3.6
}


@cache
def hot_variants() -> dict[str, list[Variant]]:
    """By op, what its plain and its quantised hot call compile, the kernels of several ops with the first of them."""
    found: dict[str, list[Variant]] = {}
    seen: set[str] = set()
    for op in OPS.values():
        mine = needed(op, (Call(drawn(op, HOT[0])), *in_hot_formats(op, drawn(op, HOT[0]))))
        assert mine, f"{op.name} launches nothing"
        found[op.name] = [one for one in mine if one.name not in seen]
        seen.update(one.name for one in mine)
    return found


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_hot_calls_compile_for_hopper(op):
    for one in hot_variants()[op.name]:
        compiled = one.compile()
        most = MORE_SPILLS.get(one.kernel.name, GLUON_SPILLS if is_gluon(one.kernel) else SPILLS)
        assert compiled.shared_is_there and compiled.spills <= most, f"{one.name}: {compiled}"


# ---------------------------------------------------------------- kernels in Gluon that no hot call takes


class Small(NamedTuple):
    """A call that takes a kernel, the quickest to compile, and the bytes a thread that the kernel may spill."""

    op: str
    call: Callable[[], Call]
    most: int = 0


def blank(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def rows_of(columns: int, **more: Any) -> Call:
    """Of a norm."""
    return Call({**drawn(OPS["rms_norm"], {**HOT[0], "hidden": columns}, full=True), **more}, FORWARD if more else None)


def product(pair: str, rows: int) -> Call:
    """Of codes."""
    return Call(drawn(OPS["scaled_mm"], {**HOT[0], "tokens": rows}, options={"pair": pair}))


def cached(heads: int, kv_heads: int, columns: int, tokens: int, codes: torch.dtype | None = None, **more: Any) -> Call:
    """Attention over pages."""
    keys = blank(512, 64, kv_heads, columns, **({} if codes is None else {"dtype": codes}))
    values = {"q": blank(4, tokens, heads, columns), "k_cache": keys}
    values["v_cache"] = None if "value_dim" in more else keys
    whose = {"block_table": blank(4, 128, dtype=torch.int32), "kv_len": blank(4, dtype=torch.int32)}
    return Call({**values, **whose, **more}, FORWARD)


SMALL = {
    "attention_chunks_hopper": Small("cached_attention", lambda: cached(32, 8, 64, 2048, backend="hopper_chunks"), 180),
    "attention_decode_hopper": Small("cached_attention", lambda: cached(32, 8, 128, 1, backend="hopper_decode")),
    "attention_decode_codes_hopper": Small(
        "cached_attention", lambda: cached(32, 8, 128, 1, torch.float8_e4m3fn, backend="hopper_decode")
    ),
    "attention_latent_hopper": Small(
        "cached_attention", lambda: cached(16, 1, 576, 1, value_dim=512, backend="hopper_latent")
    ),
    "attention_latent_few_hopper": Small(
        "cached_attention", lambda: cached(16, 1, 576, 1, value_dim=512, backend="hopper_latent_few")
    ),
    "plain_hopper": Small("scaled_mm", lambda: product("int8_row", 8192)),
    "rms_norm_backward_shared": Small("rms_norm", lambda: rows_of(16400)),
    "rms_norm_rows": Small("rms_norm", lambda: rows_of(3072, out_format=tw.fp8("1x128", ways="row"))),
    "rms_norm_shared": Small("rms_norm", lambda: rows_of(32784)),
    "small_int4_hopper": Small("scaled_mm", lambda: product("int4_weight", 16), 72),
}


@pytest.mark.parametrize("kernel", SMALL)
def test_other_kernels_in_gluon_compile(kernel):
    small = SMALL[kernel]
    found = [one for one in needed(OPS[small.op], [small.call()]) if one.kernel.name == kernel]
    assert found, f"the call takes no {kernel}"
    for one in found:
        compiled = one.compile()
        assert compiled.shared_is_there and not compiled.serialised and compiled.spills <= small.most, (
            f"{one.name}: {compiled}"
        )


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize("pair", ["fp8_block", "fp8_row"])
def test_few_rows_compile_by_every_tile(pair, rows):
    """Rows of a tile are copied in pieces of 16 and multiplied as one: a view of several must not begin from one of them."""
    (one,) = (v for v in needed(OPS["scaled_mm"], [product(pair, rows)]) if v.kernel.name == "small_rows_hopper")
    compiled = one.compile()
    assert f"ROWS={rows}" in one.name and compiled.shared_is_there and compiled.spills == 0, f"{one.name}: {compiled}"


# ---------------------------------------------------------------- kernels behind torch's operators


def test_one_variant_of_every_kernel_behind_torchs_operators_compiles():
    from tests.compile.test_aten import VARIANTS

    first: dict[str, Variant] = {}
    for one in VARIANTS.values():
        first.setdefault(one.kernel.name, one)
    assert len(first) > 60
    compiled = {name: one.compile() for name, one in first.items()}
    most = {name: MORE_SPILLS.get(name, SPILLS) for name in compiled}
    assert not {n: str(made) for n, made in compiled.items() if made.spills > most[n] or not made.shared_is_there}


def test_every_kernel_in_gluon_is_compiled_here():
    """Those that files declare are those that a hot call takes and those of the table above."""
    declared = {
        function.name
        for path in Path(tw.__file__).parent.rglob("*.py")
        if "jit=gluon.jit" in (text := path.read_text())
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef)
        and any("jit=gluon.jit" in ast.unparse(d) for d in function.decorator_list)
    }
    hot = {one.kernel.name for own in hot_variants().values() for one in own if is_gluon(one.kernel)}
    assert declared == hot | SMALL.keys() and not hot & SMALL.keys()
