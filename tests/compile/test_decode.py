"""Hopper's kernel for decoding, of every kind: two programs have room in an SM, products are not serialised, and nothing is spilled
but some bytes by Triton 3.9 where a call has all options."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import triton

import tilewright as tw
from tests.compile.table import wrong_code
from tilewright.check.variants import variant
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect

HOPPER = replace(TARGETS["sm_90"], gluon=True)
CACHED = tw.catalogue()["cached_attention"]
OF_ALL = 65536  # registers of an SM
KEPT = 1024  # bytes of shared memory that an SM keeps for itself, of each program
pytestmark = pytest.mark.skipif(
    not TARGETS["sm_90"].hopper_gluon, reason="this Triton's Gluon is not the one that kernels are written in"
)


E4M3 = torch.float8_e4m3fn


def blank(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def checked(one, name, most, programs=2, least=0):
    """What is compiled, if some programs have room and no more than that is spilled; by Triton 3.6 the `least`."""
    assert one.kernel.name == name
    compiled = one.compile()
    assert not compiled.serialised and not wrong_code(one.kernel.name, compiled)
    assert compiled.spills <= (least if triton.__version__.startswith("3.6.") else most)
    assert programs * (compiled.shared + KEPT) <= HOPPER.shared_memory + KEPT
    assert programs * compiled.registers * compiled.threads <= OF_ALL
    assert "wgmma.mma_async" in compiled.text
    return compiled


@pytest.mark.parametrize(
    ("tokens", "D", "V", "page", "options", "most"),
    [
        (1, 128, 128, None, {}, 0),
        (1, 128, 128, 16, {}, 0),
        (16, 128, 128, 16, {"tree": blank(32, 16, dtype=torch.int64)}, 0),
        (1, 128, 128, 1, {}, 64),
        (1, 128, 128, 8, {}, 64),
        (1, 72, 40, 1, {}, 64),
        (4, 128, 64, 64, {"left": 1000, "softcap": 30.0, "sink": blank(32), "slopes": blank(32)}, 24),
    ],
)
def test_compiled(tokens, D, V, page, options, most):
    batch, room = 32, 8192
    caches = (blank(batch * room // (page or room), page or room, 8, n) for n in (D, V))
    table = None if page is None else blank(batch, room // page, dtype=torch.int32)
    given = (blank(batch, tokens, 32, D), *caches, table, blank(batch, dtype=torch.int32))
    with pretend(HOPPER), torch.no_grad(), collect() as found:
        CACHED.run(CACHED.signature.bind(given, {"backend": "hopper_decode", **options}))
    compiled = checked(variant(found[0]), "attention_decode_hopper", most)
    if page is None or page >= 16:
        assert "cp.async.bulk.tensor.4d" in compiled.text
        return
    # Threads copy 16 bytes each, and as many as there are: what is not copied is 0. All arrive by what they have copied
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*", compiled.text)
    widest = 128 if max(D, V) > 64 else 64
    assert len(copies) == 4 * 64 * widest * 2 // (16 * 128)
    assert all(re.search(r"\], 0x10, %r\d+;", copy) for copy in copies)
    assert compiled.text.count("cp.async.mbarrier.arrive.noinc") == 4 and "cp.async.bulk" not in compiled.text


@pytest.mark.parametrize(
    ("tokens", "kind", "page", "options"),
    [
        (1, E4M3, 16, {}),
        (1, torch.int8, None, {}),
        (8, E4M3, 16, {"tree": blank(32, 8, dtype=torch.int64), "softcap": 30.0}),
        (4, E4M3, 64, {"left": 1000, "softcap": 30.0, "sink": blank(32), "slopes": blank(32)}),
    ],
)
def test_compiled_for_codes(tokens, kind, page, options):
    """Words are loaded as wide as they lie, two conversions to a word, and nothing moves between threads but largest scores."""
    batch, room = 32, 8192
    caches = (blank(batch * room // (page or room), page or room, 8, 128, dtype=kind) for _ in range(2))
    table = None if page is None else blank(batch, room // page, dtype=torch.int32)
    given = (blank(batch, tokens, 32, 128), *caches, table, blank(batch, dtype=torch.int32))
    scales = {n: blank(1, 1, 8, 1, dtype=torch.float32) for n in ("k_scale", "v_scale")}
    with pretend(HOPPER), torch.no_grad(), collect() as found:
        CACHED.run(CACHED.signature.bind(given, {"backend": "hopper_decode", **scales, **options}))
    programs, spilled = (3, 0) if tokens == 1 else (2, 96 if "slopes" in options else 0)
    compiled = checked(variant(found[0]), "attention_decode_codes_hopper", spilled, programs, spilled)
    assert "cp.async.bulk.tensor.4d" in compiled.text
    assert compiled.count("LDS.128") >= 8 and compiled.count("LDS.U8") <= 1 and not compiled.count("LDS.U16")
