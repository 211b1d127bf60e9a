"""Our kernels or a library's: the nearest measured product decides, a rule where there is none, and no damaged row does."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton
from typer.testing import CliRunner

import tilewright as tw
from tilewright.__main__ import app
from tilewright.attention import library as attending_library
from tilewright.attention import preference as attended
from tilewright.bench import evidence
from tilewright.bench import preference as derived
from tilewright.bench.cases import CASES, Case
from tilewright.bench.work import arguments
from tilewright.check.variants import Blank
from tilewright.core.target import TARGETS, pretend
from tilewright.gemm import library, preference
from tilewright.runtime.choose import forced

HOPPER = replace(TARGETS["sm_90"], gluon=True)


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """A function that puts lines into the chip's table."""
    monkeypatch.setattr(preference, "SHIPPED", tmp_path)

    def put(*lines: dict | str) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        preference.path_of("sm_90").write_text("".join(f"{text}\n" for text in texts))
        preference.table.cache_clear()
        preference.nearest.cache_clear()

    put()
    yield put
    preference.table.cache_clear()
    preference.nearest.cache_clear()


def row(pair: str, sizes: tuple, own: float, other: float, triton: str = "3.6.0") -> dict:
    return preference.made("scaled_mm", pair, sizes, {"own": own, "cublaslt": other}, "2026-11-15", triton)


def test_the_rule_where_nothing_is_measured(rows):
    assert preference.preferred(HOPPER, "fp8_row_fast", 4096, 4096, 4096) == "cublaslt"
    assert preference.preferred(HOPPER, "bf16", 16, 8192, 8192) == "cublaslt"
    for pair, tokens in (("fp8_block", 4096), ("int8_row", 4096), ("fp8_row_fast", 16), ("no such", 4096)):
        assert preference.preferred(HOPPER, pair, tokens, 8192, 8192) == "own"
    assert "not measured" in preference.decide(HOPPER, "fp8_block", 4096, 4096, 4096).why


def test_the_nearest_row_decides(rows):
    rows(row("fp8_block", (4096, 4096, 4096), 100.0, 110.0), row("fp8_block", (4096, 2112, 7168), 110.0, 100.0))
    assert preference.preferred(HOPPER, "fp8_block", 4096, 4096, 4096) == "own"
    assert preference.preferred(HOPPER, "fp8_block", 4000, 2112, 7168) == "cublaslt"  # both are 4096 x 4096 x 8192
    assert preference.preferred(HOPPER, "fp8_block", 16, 4096, 4096) == "own"  # too far from either: the rule
    assert preference.preferred(TARGETS["sm_100"], "fp8_block", 4096, 2112, 7168) == "own"  # measured elsewhere
    found = preference.decide(HOPPER, "fp8_block", 4000, 2112, 7168)
    assert found.row["times"] == {"cublaslt": 100.0, "own": 110.0} and "2026-11-15 with Triton 3.6.0" in found.why


def test_without_gluon_rows_of_kernels_in_gluon_say_nothing(rows):
    """The library is taken, and no figure of a kernel quoted that would not run. What is portable is as it was measured."""
    rows(row("fp8_block", (4096, 4096, 4096), 100.0, 110.0), row("bf16", (4096, 4096, 4096), 100.0, 110.0))
    without = replace(HOPPER, gluon=False)
    for pair in ("fp8_block", "fp8_row", "fp8_block_f32"):
        for tokens in (16, 4096):
            found = preference.decide(without, pair, tokens, 4096, 4096)
            assert found.best == "cublaslt" and found.row is None and "Gluon" in found.why
    assert preference.preferred(HOPPER, "fp8_block", 4096, 4096, 4096) == "own"
    assert preference.preferred(without, "bf16", 4096, 4096, 4096) == "own"
    assert (
        preference.preferred(replace(TARGETS["sm_100"], gluon=False), "fp8_block", 4096, 4096, 4096) == "own"
    )  # never there


@pytest.mark.parametrize(
    "change",
    [
        "", "{", "[]", "null", "[" * 100_000, {"best": "own"}, {"best": "reference"}, {"pair": 3}, {"bucket": [4096, 4096]},
        {"bucket": [0, 4096, 4096]}, {"bucket": [1 << 40, 4096, 4096]}, {"bucket": [4096.0, 4096, 4096]}, {"bucket": "x"},
        {"times": {"own": 1.0}}, {"times": {"own": float("nan"), "cublaslt": 1.0}}, {"times": {"own": -1.0, "cublaslt": -2.0}},
        {"times": {"own": True, "cublaslt": 2}}, {"times": None}, {"more": 1},
    ],
    ids=lambda change: str(change)[:40],
)  # fmt: skip
def test_damaged_rows_are_ignored(rows, change):
    good = row("fp8_block", (4096, 4096, 4096), 110.0, 100.0)
    rows(good)
    assert preference.preferred(HOPPER, "fp8_block", 4096, 4096, 4096) == "cublaslt"
    rows(change if isinstance(change, str) else {**good, **change})
    with pytest.warns(UserWarning, match="1 damaged"):
        assert preference.preferred(HOPPER, "fp8_block", 4096, 4096, 4096) == "own"  # the rule


def test_bytes_that_are_no_text(rows):
    preference.path_of("sm_90").write_bytes(b"\xff\xfe\x00\n")
    preference.table.cache_clear()
    with pytest.warns(UserWarning, match="damaged"):
        assert preference.preferred(HOPPER, "fp8_block", 4096, 4096, 4096) == "own"


def test_a_file_has_the_last_of_a_bucket():
    made = [row("b", (64, 64, 64), 1.0, 2.0), row("a", (64, 64, 64), 1.0, 2.0), row("a", (60, 64, 64), 3.0, 2.0)]
    found = [json.loads(line) for line in preference.text_of(made).splitlines()]
    assert [(r["pair"], r["best"]) for r in found] == [("a", "cublaslt"), ("b", "own")]
    with pytest.raises(ValueError, match="not a row"):
        preference.text_of([{**found[0], "best": "own"}])


def test_the_table_has_a_row_for_each_release_of_triton():
    """The last of each, whichever build; where two are as near, that of the installed release decides."""
    block = "fp8_block_dense/4096x4096x4096"
    about = {
        "op": "scaled_mm",
        "dims": {"tokens": 4096, "columns": 4096, "hidden": 4096},
        "arch": "sm_90",
        "case": block,
    }

    def recorded(us: float, triton: str) -> dict:
        return {**about, "us": us, "rivals": {"cublaslt": 50.0}, "triton": triton, "date": "2026-11-15"}

    made = [recorded(40.0, "3.6.0"), recorded(70.0, "3.9.0"), recorded(60.0, "3.9.1")]
    ((name, text),) = derived.tables(made).items()
    found = [(r["triton"], r["times"]["own"], r["best"]) for r in map(json.loads, text.splitlines())]
    assert name == "preference_sm_90.jsonl" and found == [("3.6.0", 40.0, "own"), ("3.9.1", 60.0, "cublaslt")]
    assert derived.tables([{**one, "rivals": {}} for one in made]) == {}


def test_of_rows_as_near_that_of_the_release_decides(rows):
    sizes = 4096, 4096, 4096
    rows(row("fp8_block", sizes, 1.0, 2.0, "3.6.0"), row("fp8_block", sizes, 2.0, 1.0, "3.9.0"))
    assert preference.decide(HOPPER, "fp8_block", *sizes, "3.6").best == "own"
    assert preference.decide(HOPPER, "fp8_block", *sizes, "3.9").best == "cublaslt"
    assert preference.decide(HOPPER, "fp8_block", *sizes).row["triton"] in ("3.6.0", "3.9.0")
    rows(row("fp8_block", sizes, 1.0, 2.0, "3.6.0"), row("fp8_block", (8192, 4096, 4096), 2.0, 1.0, "3.9.0"))
    assert preference.decide(HOPPER, "fp8_block", *sizes, "3.9").best == "own"  # the nearer


def test_the_shipped_table_is_whole():
    path = preference.path_of("sm_90")
    lines = path.read_text().splitlines() if path.exists() else []
    assert len(preference.read(path)) == len(lines) == len(set(lines))


def test_rows_come_from_evidence():
    dims = {"tokens": 4096, "columns": 2112, "hidden": 7168}
    common = {"op": "scaled_mm", "direction": "forward", "dims": dims, "suite": "", "family": ""}
    cases = {
        "block": Case("block", options={"pair": "fp8_block"}, ours=True, **common),
        "wide": Case("wide", options={"pair": "fp8_block", "out_dtype": "float32"}, ours=True, **common),
        "fast": Case("fast", options={"pair": "fp8_row"}, arguments={"accumulate": "fast"}, ours=True, **common),
        "auto": Case("auto", options={"pair": "fp8_block"}, **common),
        "int4": Case("int4", options={"pair": "int4_row"}, ours=True, **common),
    }
    about = {"op": "scaled_mm", "dims": dims, "us": 50.0, "date": "2026-11-15T06:09:08+00:00", "arch": "sm_90"}
    about["triton"] = "3.6.0"
    recorded = [{**about, "case": name, "rivals": {"cublaslt": 40.0}} for name in (*cases, "gone")]
    recorded += [
        {**about, "case": "block", "rivals": {}},
        {**about, "case": "block", "rivals": {"cublaslt": 1.0}, "arch": "sm_80"},
        {**about, "case": "block", "rivals": {"cublaslt": 1.0}, "triton": "3.5.1"},  # before there was such a Gluon
    ]
    made = derived.rows_of(recorded, "sm_90", cases)
    assert [(r["pair"], r["bucket"], r["best"]) for r in made] == [
        ("fp8_block", [4096, 4096, 8192], "cublaslt"),
        ("fp8_block_f32", [4096, 4096, 8192], "cublaslt"),
        ("fp8_row_fast", [4096, 4096, 8192], "cublaslt"),
    ]


def test_auto_is_near_the_faster_in_all_that_was_recorded():
    """By the shipped table, over products that both made in one run; and where `auto` itself was timed beside the library."""
    recorded = evidence.everything(evidence.folder())
    found = {one.row["case"]: one.auto for one in derived.measured(recorded)}
    assert found and min(found.values()) >= derived.LEAST, found
    timed = [row for row in recorded if row["case"].startswith("auto_")]
    slow = {r["case"]: us / r["us"] for r in timed for us in r["rivals"].values() if us / r["us"] < derived.LEAST}
    assert not slow


def test_what_auto_reaches_in_a_sentence(rows):
    rows(row("fp8_block", (4096, 4096, 4096), 1.0, 2.0))
    about = {"arch": "sm_90", "op": "scaled_mm", "sms": 132, "triton": "3.6.0"}
    same = "fp8_block", (4096, 4096, 4096)
    found = [
        derived.Both({**about, "case": "a"}, *same, {"own": 1.0, "cublaslt": 2.0}),
        derived.Both({**about, "case": "b"}, *same, {"own": 4.0, "cublaslt": 1.0}),
    ]
    line = derived.auto_line(found)
    assert "2 products" in line and "0.500 of the faster" in line and "0.250 at the least (`b`)" in line
    assert derived.auto_line([]) is None


# ---- what the library takes ------------------------------------------------------------------------------------------


def operands(M: int, N: int, K: int, recipes: tuple, dtypes=(torch.float8_e4m3fn,) * 2, **changes) -> SimpleNamespace:
    a, b = (torch.empty(n, K, dtype=dtype, device="meta") for n, dtype in zip((M, N), dtypes))
    given = {"a": a, "b": b.t(), "recipe_a": recipes[0], "recipe_b": recipes[1], "bias": None, "act": None, "c": None}
    given |= {"beta": 0.0, "out_dtype": "bfloat16", "accumulate": "full", "out_format": None, "backend": "auto"}
    return SimpleNamespace(**{**given, **changes})


BLOCKS = "BlockWise1x128", "BlockWise128x128"
ROWS = "RowWise", "RowWise"


def test_what_cublaslt_takes():
    assert library.refusal(HOPPER, operands(64, 64, 256, BLOCKS)) is None
    assert library.refusal(HOPPER, operands(63, 64, 256, ROWS, accumulate="fast")) is None
    codes = torch.float8_e4m3fn, torch.float8_e5m2
    assert library.refusal(HOPPER, operands(64, 64, 256, ROWS, codes)) is None
    refused = {
        "blocks of e5m2": operands(64, 64, 256, BLOCKS, codes),
        "two e5m2": operands(64, 64, 256, ROWS, codes[1:] * 2),
        "int8": operands(64, 64, 256, ROWS, (torch.int8,) * 2),
        "both 128x128": operands(64, 64, 256, BLOCKS[1:] * 2),
        "odd M": operands(62, 64, 256, BLOCKS),
        "odd K": operands(64, 64, 264, ROWS),
        "K of half a block": operands(64, 64, 320, BLOCKS),
        "odd N": operands(64, 72, 256, ROWS),
        "no rows": operands(0, 64, 256, ROWS),
        "fp32 rows": operands(64, 64, 256, ROWS, out_dtype="float32"),
        "act": operands(64, 64, 256, ROWS, act="silu"),
        "c": operands(64, 64, 256, ROWS, c=torch.empty(64, 64), beta=1.0),
        "fp32 bias": operands(64, 64, 256, ROWS, bias=torch.empty(64)),
        "bias of blocks": operands(64, 64, 256, BLOCKS, bias=torch.empty(64, dtype=torch.bfloat16)),
        "b row by row": operands(64, 64, 256, ROWS, b=torch.empty(256, 64, dtype=codes[0], device="meta")),
    }
    for why, given in refused.items():
        assert library.refusal(HOPPER, given) is not None, why
    assert library.refusal(TARGETS["sm_100"], operands(64, 64, 256, BLOCKS)) is not None
    assert library.refusal(TARGETS["gfx950"], operands(64, 64, 256, ("TensorWise",) * 2)) is not None


def test_the_library_is_taken_where_it_is_there_and_faster_or_asked_for(rows, monkeypatch):
    given = operands(4096, 4096, 4096, BLOCKS)
    assert torch.version.cuda is not None or not library.fits(HOPPER, given)
    monkeypatch.setattr(library, "entry_points", lambda: frozenset({"_scaled_mm", "_scaled_mm_v2"}))
    monkeypatch.setattr(library, "cuda_version", lambda: (13, 0))
    assert not library.fits(HOPPER, given)
    token = forced.set("cublaslt")
    assert library.fits(HOPPER, given) and not library.fits(HOPPER, operands(62, 64, 256, BLOCKS))
    forced.reset(token)
    assert library.fits(HOPPER, operands(4096, 4096, 4096, BLOCKS, backend="cublaslt"))
    assert not library.fits(HOPPER, operands(62, 64, 256, BLOCKS, backend="cublaslt"))
    rows(row("fp8_block", (4096, 4096, 4096), 2.0, 1.0))
    assert library.fits(HOPPER, given) and library.absence(given) is None
    assert not library.fits(
        HOPPER, operands(4096, 4096, 4096, BLOCKS, out_dtype="float32")
    )  # another row: fp8_block_f32
    monkeypatch.setattr(library, "entry_points", lambda: frozenset({"_scaled_mm"}))
    assert "_scaled_mm_v2" in library.absence(given) and library.absence(operands(64, 64, 256, ROWS)) is None
    monkeypatch.setattr(library, "cuda_version", lambda: (12, 8))
    assert not library.fits(HOPPER, given) and "12.9" in library.absence(given)


def test_the_private_product_of_torch_is_the_known_one(monkeypatch):
    """Where its arguments change, cuBLASLt is not reached, and this says so before a GPU does."""
    assert library.knows_recipes()
    monkeypatch.setattr(library, "SCALED_MM_V2", library.SCALED_MM_V2[:-1])
    assert not library.knows_recipes()


def test_a_call_may_ask_for_its_backend(rows, monkeypatch):
    """The names are those of the implementations, another raises, and one that does not take the arguments says which do."""
    from tilewright.core.target import pretend
    from tilewright.gemm.matmul import matmul
    from tilewright.gemm.scaled_mm import product

    for op in (product, matmul):
        names = next(p.choices for p in op.signature.parameters if p.name == "backend")
        assert names == ("auto", "triton", *(one.name for one in op.implementations))
    values = product.signature.bind((), vars(operands(256, 512, 512, BLOCKS)))
    values |= {"scale_a": torch.empty(256, 4, device="meta"), "scale_b": torch.empty(4, 4, device="meta")}
    monkeypatch.setattr(library, "entry_points", lambda: frozenset({"_scaled_mm", "_scaled_mm_v2"}))
    monkeypatch.setattr(library, "cuda_version", lambda: (13, 0))
    rows(row("fp8_block", (256, 512, 512), 2.0, 1.0))

    def taken(backend: str) -> str:
        return product.implementation({**values, "backend": backend}, torch.device("cuda")).name

    with pretend(HOPPER):
        assert [taken(name) for name in ("auto", "cublaslt", "portable")] == ["cublaslt", "cublaslt", "portable"]
        assert taken("triton") != "cublaslt"
        with tw.force("triton"):
            assert taken("cublaslt") == "cublaslt"  # what a call asks for comes before what it stands in
        with pytest.raises(
            RuntimeError, match=r"^scaled_mm: no backend hopper_few_int4 .*; cublaslt, .*portable would do"
        ):
            taken("hopper_few_int4")
    with pytest.raises(ValueError, match=r"matmul: backend must be one of .*got 'cublas'"):
        tw.matmul(torch.ones(2, 2), torch.ones(2, 2), backend="cublas")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        tw.matmul(torch.ones(2, 2), torch.ones(2, 2), backend="portable")


def test_a_backend_reaches_a_compiled_call():
    a, b = torch.ones(2, 16), torch.ones(16, 3)
    seen = []

    def spy(graph, _):
        seen.extend(node.args for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(lambda x, y: tw.matmul(x, y, backend="auto"), backend=spy, fullgraph=True)(a, b)
    compiled = torch.compile(lambda x, y: tw.matmul(x, y, backend="portable"), backend=spy, fullgraph=True)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        compiled(a, b)
    assert "auto" in seen[0] and "portable" in seen[-1]


def test_how_scales_lie_for_it():
    """Of 1x128 blocks block by block; of 128x128 blocks row by row, padded to four with what was there."""
    scale = torch.arange(40.0).reshape(8, 5)
    found = library.scale_for(scale, "BlockWise1x128", False)
    assert found.stride() == (1, 8) and torch.equal(found, scale)
    assert library.scale_for(found, "BlockWise1x128", True) is found
    found = library.scale_for(scale, "BlockWise128x128", True)
    assert found.shape == (8, 8) and found.stride() == (1, 8) and torch.equal(found[:5].t(), scale)
    assert not found[5:].any()
    padded = torch.zeros(8, 8)
    padded[:, :5] = scale
    view = library.scale_for(padded[:, :5], "BlockWise128x128", True)
    assert view.data_ptr() == padded.data_ptr() and torch.equal(view, padded.t())
    short = padded.reshape(-1)[:61].as_strided((8, 5), (8, 1)).clone().as_strided((7, 5), (5, 1))
    assert library.scale_for(short, "BlockWise128x128", True).shape == (8, 7)
    last = torch.zeros(61).as_strided((8, 5), (8, 1))  # its padding would lie past the end of the memory
    assert library.scale_for(last, "BlockWise128x128", True).untyped_storage().nbytes() == 4 * 64
    assert library.scale_for(scale[:, :1], "RowWise", True).shape == (1, 8)
    assert library.scale_for(scale[:1, :1], "TensorWise", True).shape == ()


@pytest.mark.parametrize("name", ["grouped_mm_rows_fp8", "grouped_mm_inner_fp8"])
def test_groups_one_by_one(name, monkeypatch):
    """What is cut for each group, empty ones left out, gives what the grouped product gives."""
    from tilewright.core.draw import Draw
    from tilewright.gemm.scaled_mm import reference
    from tilewright.op import OPS

    source = Draw(2, {"tokens": 512, "hidden": 256, "columns": 128}, {"columns": 128, "out_dtype": "float32"})
    plain = {"scales": "block", "recipe": "BlockWise1x128", "bias": False, "c": False, "act": None, "glu": None}
    source.options.update(plain)
    source.dims["experts"] = 3
    values = OPS[name].signature.bind((), OPS[name].inputs(source))
    values["offsets"] = torch.tensor([0, 384, 512])
    known = {"a", "b", "scale_a", "scale_b", "recipe_a", "recipe_b", "out_dtype"}
    monkeypatch.setattr(library, "prepared", lambda given: lambda: reference(**{n: given[n] for n in known}))
    calls, finish = library.calls_by_group(name, values)
    assert len(calls) == 2
    torch.testing.assert_close(
        finish([one() for one in calls]), OPS[name].reference(**OPS[name].arguments(values)), rtol=1e-4, atol=1e-2
    )


def test_explain_says_which_and_why(rows, monkeypatch):
    rows(row("fp8_block", (4096, 4096, 4096), 2.0, 1.0, triton.__version__))
    words = ["explain", "scaled_mm", "--option", "pair=fp8_block", "--dim", "columns=4096", "--dim", "hidden=4096"]
    done = CliRunner().invoke(app, [*words, "--dim", "tokens=4096", "--json"])
    made = json.loads(done.stdout)
    assert made["taken"] == "cublaslt" and made["evidence"]["times"]["own"] == 2.0 and made["label"] == "native"
    assert made["implementation"] != "cublaslt" and made["launches"]
    done = CliRunner().invoke(app, [*words, "--dim", "tokens=16"])
    assert "our kernels (not measured; the rule for fp8_block of few rows)" in done.stdout
    done = CliRunner().invoke(app, [*words, "--dim", "tokens=4096", "--option", "backend=portable"])
    assert "our kernels (asked for: portable)" in done.stdout and "implementation portable of" in done.stdout
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(library, "entry_points", lambda: frozenset({"_scaled_mm", "_scaled_mm_v2"}))
    monkeypatch.setattr(library, "cuda_version", lambda: (12, 8))
    done = CliRunner().invoke(app, [*words, "--dim", "tokens=4096"])
    assert "our kernels (scales of rows and blocks came with CUDA 12.9, this torch has 12.8)" in done.stdout
    done = CliRunner().invoke(app, ["explain", "scaled_mm", "--option", "pair=nothing"])
    assert done.exit_code == 2


def explained(*dims: str, arch: str = "sm_90") -> dict:
    words = ["explain", "scaled_mm", "--option", "pair=fp8_block", "--json", "--arch", arch]
    done = CliRunner().invoke(app, [*words, *(word for dim in dims for word in ("--dim", dim))])
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("own", [1.0, 3.0], ids=["ours", "theirs"])
def test_explain_quotes_no_figure_of_another_triton(rows, own):
    """Nor of kernels that the call does not take. cuBLASLt's own time is none of Triton's."""
    call = "tokens=4096", "columns=4096", "hidden=4096"
    rows(row("fp8_block", (4096, 4096, 4096), own, 2.0, triton.__version__))
    found = explained(*call)
    assert found["evidence"]["times"] == {"cublaslt": 2.0, "own": own} and f"own {own:g} us" in found["why"]
    rows(row("fp8_block", (4096, 4096, 4096), own, 2.0, "3.5.1"))
    found = explained(*call)
    assert "own " not in found["why"] and "with Triton 3.5, and this is" in found["why"]
    if own < 2.0:
        assert found["evidence"] is None and " us" not in found["why"] and "taken" not in found
    else:
        assert found["evidence"]["times"] == {"cublaslt": 2.0} and "cublaslt 2 us" in found["why"]
        assert found["taken"] == "cublaslt"


def test_explain_quotes_no_figure_of_another_kernel(rows):
    """The row is of many rows, the call of few, which another kernel multiplies."""
    if not TARGETS["sm_90"].hopper_gluon:
        pytest.skip("this Triton has no Gluon to choose from")
    rows(row("fp8_block", (128, 4096, 4096), 1.0, 2.0, triton.__version__))
    assert explained("tokens=100", "columns=4096", "hidden=4096")["evidence"]["times"]["own"] == 1.0
    found = explained("tokens=64", "columns=4096", "hidden=4096")
    assert found["implementation"] == "hopper_few" and found["evidence"] is None
    assert "and this call takes hopper_few" in found["why"] and " us" not in found["why"]


@pytest.mark.parametrize(
    ("lacks", "known", "guarded", "words"),
    [
        (None, True, True, "kernels in Gluon and the direct launch"),
        ("no tma", True, True, "the direct launch, but not kernels in Gluon"),
        (None, False, True, "kernels in Gluon, but not the direct launch"),
        (None, True, False, "kernels in Gluon, but not the direct launch"),
        ("no tma", False, False, "portable kernels, but not kernels in Gluon nor the direct launch"),
    ],
)
def test_doctor_says_what_this_triton_gets(monkeypatch, lacks, known, guarded, words):
    from tilewright.core import private, triton_versions

    monkeypatch.setattr(triton_versions, "probe", lambda: triton_versions.Gluon({}, lacks))
    monkeypatch.setattr(triton_versions, "launches_directly", lambda: known)
    monkeypatch.setattr(private, "guard", lambda tensors: object() if guarded else None)
    done = CliRunner().invoke(app, ["doctor", "--json"])
    found = {one["what"]: one for one in json.loads(done.stdout)}
    assert found["triton"]["found"] == f"{triton.__version__}, which gets {words}"
    assert ("no tma" in found["kernels for Hopper"]["found"]) == (lacks is not None)
    assert bool(found["kernels for Hopper"]["to mend it"]) == (lacks is not None)
    assert bool(found["launch"]["to mend it"]) == (not (known and guarded))
    if not known:
        assert "launcher is not a known one" in found["launch"]["found"]
    elif not guarded:
        assert "torch has no guard" in found["launch"]["found"]


def attention_row(case: str, own: float, portable: float | None, **about) -> dict:
    """A row of evidence of attention by Hopper's kernels, beside the portable ones."""
    beside = {} if portable is None else {"portable": portable}
    return {
        "op": "attention", "case": case, "dims": CASES[case].dims, "arch": "sm_90", "sms": 132, "us": own, "rivals": beside,
        "triton": "3.6.0", "date": "2026-11-17T10:00:00+00:00", **about,
    }  # fmt: skip


def test_attentions_table_comes_from_evidence(tmp_path, monkeypatch):
    """Forward and backward apart, the faster of two that one run measured; what `auto` then takes is what the table says."""
    own, larger, odd = (c.name for c in CASES.values() if c.family == "attention_prefill_bf16")
    backward = next(c.name for c in CASES.values() if c.family == "attention_bwd_bf16" and c.own)
    step = next(c.name for c in CASES.values() if c.family == "attention_bwd_memory" and c.own)
    wide = next(c.name for c in CASES.values() if c.family == "attention_prefill_d256" and c.own)
    recorded = [
        attention_row(own, 90.0, 130.0),
        attention_row(odd, 90.0, None),  # beside nothing of ours
        attention_row(larger, 130.0, 130.0),
        attention_row(backward, 300.0, 250.0),
        attention_row(step, 300.0, 350.0),  # of both directions at once
        attention_row(wide, 80.0, 120.0, triton="3.5.0"),  # which has no such kernels
        attention_row(wide, 80.0, 120.0, arch="sm_77"),  # a chip that is not known
        attention_row(own, 95.0, 130.0),
    ]
    ((name, text),) = derived.tables(recorded).items()
    found = [json.loads(line) for line in text.splitlines()]
    assert name == "attention_sm_90.jsonl" and [attended.row_of(line) for line in text.splitlines()] == found
    kind = "bf16_128_128_causal"
    assert [(r["direction"], r["kind"], r["bucket"], r["best"]) for r in found] == [
        ("backward", kind, [128, 4096, 4096], "portable"),
        ("forward", kind, [128, 4096, 4096], "hopper"),
        ("forward", kind, [128, 8192, 8192], "portable"),
    ]
    assert found[1]["times"] == {"hopper": 95.0, "portable": 130.0} and found[1]["date"] == "2026-11-17"
    monkeypatch.setattr(attended, "SHIPPED", tmp_path)
    (tmp_path / name).write_text(text)
    derived.forget()
    given = SimpleNamespace(
        **arguments(CASES[own], Blank(tw.catalogue()["attention"], CASES[own].dims, CASES[own].options))
    )
    given.backend = "auto"
    assert attended.wanted("hopper", "forward", HOPPER, given)
    assert not attended.wanted("hopper", "backward", HOPPER, given)
    monkeypatch.undo()
    derived.forget()
    with pytest.raises(ValueError, match="not a row"):
        attended.text_of([{**found[1], "best": "portable"}])


# ---- attention by cuDNN ----------------------------------------------------------------------------------------------


@pytest.fixture
def attended_rows(tmp_path, monkeypatch):
    """A function that puts rows, by their times, into the chip's table of attention. They are of 128 heads and 4096 tokens."""
    monkeypatch.setattr(attended, "SHIPPED", tmp_path)

    def put(*times: dict[str, float], kind: str = "bf16_128_128_full", size: int = 4096, **more) -> None:
        made = {
            "direction": "forward",
            "kind": kind,
            "bucket": [128, size, size],
            "date": "2026-11-17",
            "triton": "3.6.0",
        }
        lines = [{**made, "best": attended.best_of(one), "times": one, **more} for one in times]
        (tmp_path / "attention_sm_90.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        derived.forget()

    put()
    yield put
    monkeypatch.undo()
    derived.forget()


def attending(
    batch=4, length=4096, keys=4096, heads=32, kv_heads=32, D=128, dtype=torch.bfloat16, **given
) -> SimpleNamespace:
    """Arguments of a call without memory."""
    q, k, v = (
        torch.empty(batch, n, h, D, dtype=dtype, device="meta")
        for n, h in ((length, heads), (keys, kv_heads), (keys, kv_heads))
    )
    bound = tw.attention.op.signature.bind((), {"q": q, "k": k, "v": v, **given})
    return SimpleNamespace(**{**bound, "out": None})


def taken(target, **given) -> str:
    values = vars(attending(**given))
    with pretend(target):
        return tw.attention.op.implementation(values, torch.device("cuda")).name


TIMES = {"hopper": 103.0, "portable": 150.0, "cudnn": 100.0}


def test_cudnn_is_taken_where_a_row_says_so(attended_rows, monkeypatch):
    """By 3 % or more, near the row, of its kind, on its chip, where torch offers it, and where nothing has to be copied."""
    monkeypatch.setattr(attending_library, "offered", lambda a: True)
    assert taken(HOPPER) == "hopper"  # nothing is measured
    attended_rows(TIMES)
    for near in ({}, {"heads": 28, "kv_heads": 4}, {"batch": 2, "length": 2048, "keys": 8192}):
        assert taken(HOPPER, **near) == "cudnn", near
    assert taken(HOPPER, batch=4, length=512, keys=512) == "hopper"  # too far
    for other in ({"D": 64}, {"dtype": torch.float16}, {"causal": True}):
        assert taken(HOPPER, **other) == "hopper"
    assert taken(TARGETS["sm_100"]) == taken(TARGETS["sm_80"]) == "portable"
    assert taken(HOPPER, backend="triton") == taken(HOPPER, backend="hopper") == "hopper"
    assert taken(HOPPER, backend="portable") == "portable"
    with tw.force("triton"):
        assert taken(HOPPER) == "hopper" and taken(HOPPER, backend="cudnn") == "cudnn"
    heads_first = torch.empty(4, 32, 4096, 128, dtype=torch.bfloat16, device="meta").transpose(1, 2)
    assert taken(HOPPER, q=heads_first) == "hopper" and taken(HOPPER, q=heads_first, backend="cudnn") == "cudnn"
    assert not attending_library.fits(HOPPER, SimpleNamespace(**{**vars(attending()), "out": heads_first}))
    attended_rows({**TIMES, "hopper": 102.9})
    assert taken(HOPPER) == "hopper" and taken(HOPPER, backend="cudnn") == "cudnn"
    attended_rows({**TIMES, "portable": 102.0})
    assert taken(HOPPER) == "portable"  # the faster of ours


def test_of_ours_the_faster_is_taken_where_cudnn_would_be_and_is_not_there(attended_rows):
    for times, ours in ((TIMES, "hopper"), ({**TIMES, "portable": 103.0, "hopper": 110.0}, "portable")):
        attended_rows(times)
        assert attended.library_wanted(HOPPER, attending()) and taken(HOPPER) == ours
        with pytest.raises(RuntimeError, match=r"^attention: no backend cudnn .*; .*portable would do"):
            taken(HOPPER, backend="cudnn")


def test_times_of_kernels_that_are_not_there_count_for_nothing(attended_rows):
    attended_rows({"hopper": 90.0, "portable": 150.0, "cudnn": 100.0})
    assert not attended.library_wanted(HOPPER, attending())
    assert attended.library_wanted(replace(HOPPER, gluon=False), attending())


def test_rows_of_cudnn_are_held_to_the_rule():
    """A row that says more than its times is not believed."""
    row = {"direction": "forward", "kind": "bf16_128_128_full", "bucket": [128, 4096, 4096], "date": "2026-11-17"}
    row["triton"] = "3.6.0"
    for times, best in (
        (TIMES, "cudnn"),
        ({**TIMES, "hopper": 102.0}, "hopper"),
        ({**TIMES, "cudnn": 150.0}, "hopper"),
    ):
        for name in times:
            read = attended.row_of(json.dumps({**row, "best": name, "times": times}))
            assert (read is not None) == (name == best), (times, name)


def test_attentions_rows_have_cudnn_s_time_where_it_takes_the_call():
    """Of our own call if that was timed, else of torch's; not of codes, of a backward, of windows, or over caches."""
    full = next(c.name for c in CASES.values() if c.family == "attention_prefill_full" and c.own)
    beside = {"portable": 150.0, "cudnn": 101.0}
    (made,) = derived.attention_rows([attention_row(full, 103.0, None, rivals=beside)], "sm_90")
    assert made["times"] == {"hopper": 103.0, **beside} and made["best"] == "hopper"
    beside["cudnn_lse"] = 99.0
    (made,) = derived.attention_rows([attention_row(full, 103.0, None, rivals=beside)], "sm_90")
    assert made["times"]["cudnn"] == 99.0 and made["best"] == "cudnn" and attended.row_of(json.dumps(made)) == made
    for family in (
        "attention_prefill_int8",
        "attention_bwd_full",
        "attention_prefill_window",
        "attention_extend_paged",
    ):
        case = next(c for c in CASES.values() if c.family == family and c.own)
        (made,) = derived.attention_rows([attention_row(case.name, 103.0, None, rivals=beside, op=case.op)], "sm_90")
        assert "cudnn" not in made["times"], family


def test_auto_is_near_the_fastest_in_all_attention_that_was_recorded():
    """By the shipped table, over calls that our kernels and cuDNN made in one run."""
    found = [*derived.attention_measured(evidence.everything(evidence.folder()))]
    ratios = {one.row["case"]: one.auto for one in found}
    assert ratios and min(ratios.values()) >= derived.LEAST, ratios
    assert sum(attended.LIBRARY in one.times for one in found) >= 18
    line = derived.attention_line(found)
    assert "forwards of attention that our kernels and cuDNN made" in line and derived.attention_line([]) is None


def test_cases_time_cudnn_as_auto_takes_it():
    """Every forward that cuDNN takes is timed by our own call too, and `auto` beside it."""
    for case in CASES.values():
        if case.op == "attention" and "cudnn" in case.beside and case.direction == "forward" and case.way is None:
            assert case.family.startswith("auto_") or "cudnn_lse" in case.beside, case.name
    timed = [c for c in CASES.values() if c.family.startswith("auto_attention")]
    assert timed and all(c.metric == "vs:cudnn_lse" and c.goal == derived.LEAST for c in timed)
    assert all(c.arguments.get("backend", "auto") == "auto" for c in timed)


def test_the_private_attention_of_torch_is_the_known_one(monkeypatch):
    """Where its arguments change, cuDNN is not reached, and this says so before a GPU does."""
    attending_library.entry_point.cache_clear()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert attending_library.entry_point() is torch.ops.aten._scaled_dot_product_cudnn_attention.default
    assert attending_library.absence() is None and not attending_library.offered(attending())  # no tensor of CUDA's
    attending_library.entry_point.cache_clear()
    monkeypatch.setattr(attending_library, "SCALED_DOT_PRODUCT", attending_library.SCALED_DOT_PRODUCT[:-1])
    assert attending_library.entry_point() is None and "no attention of cuDNN" in attending_library.absence()
    monkeypatch.undo()
    attending_library.entry_point.cache_clear()


def test_explain_says_whether_cudnn_is_faster(attended_rows):
    words = [
        "explain",
        "attention",
        "--dim",
        "batch=4",
        "--dim",
        "length=4096",
        "--dim",
        "heads=32",
        "--dim",
        "head_dim=128",
    ]
    words += ["--option", "causal=false", "--option", "queries_per_key=1", "--option", "more_keys=0"]
    attended_rows(TIMES, triton=triton.__version__)
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["taken"] == "cudnn" and made["library"] and made["evidence"]["times"] == TIMES
    assert made["implementation"] in ("hopper", "portable") and "cudnn 100 us" in made["why"]
    done = CliRunner().invoke(app, words)
    assert "preference: cuDNN through torch, where torch has it (measured on 2026-11-17" in done.stdout
    done = CliRunner().invoke(app, [*words, "--option", "softcap=2"])
    assert "preference: our kernels (not cuDNN: softcap must be 0, got 2)" in done.stdout
    attended_rows(TIMES, triton="3.5.1")
    done = CliRunner().invoke(app, words)
    assert (
        "cudnn 100 us; ours was slower, measured with Triton 3.5, and this is" in done.stdout
        and "103" not in done.stdout
    )
    attended_rows({**TIMES, "cudnn": 140.0}, triton="3.5.1")
    done = CliRunner().invoke(app, words)
    assert "preference: our kernels (ours was the faster at 128x4096x4096" in done.stdout
    attended_rows()
    done = CliRunner().invoke(app, words)
    assert "preference: our kernels (nothing near is measured; the rule for bf16_128_128_full)" in done.stdout


def test_a_backward_that_is_left_to_the_portable_kernels_tells_nothing():
    (case,) = (c for c in CASES.values() if c.family == "attention_bwd_d64")
    wide = {case.name: replace(case, dims={**case.dims, "head_dim": 256})}  # whose dk and dv no registers hold
    row = attention_row(case.name, 90.0, 130.0)
    assert derived.attention_rows([row], "sm_90") and not derived.attention_rows([row], "sm_90", wide)


def test_rows_of_caches_come_from_evidence():
    """By the room that a sequence has and the size of its pages; a case that names no kernels tells nothing."""
    (case,) = (c for c in CASES.values() if c.family == "attention_extend_paged")
    row = attention_row(case.name, 1900.0, 5400.0, op=case.op)
    asked = {case.name: replace(case, arguments={"backend": "hopper_chunks"})}
    (made,) = derived.attention_rows([row], "sm_90", asked)
    assert attended.row_of(json.dumps(made)) == made and made["best"] == "hopper_chunks"
    assert (made["kind"], made["bucket"]) == ("cached_16_128_128_pages_64", [4, 65536, 8192])
    for other in ({}, {"backend": "hopper"}, {"backend": "hopper_chunks", "split": 512}):
        assert not derived.attention_rows([row], "sm_90", {case.name: replace(case, arguments=other)})


def test_cases_of_caches_make_rows_of_every_kind_that_servers_have():
    """Latents of many and of few heads, of one sequence and of many, in pages and without; chunks over pages and static caches."""
    recorded = [
        attention_row(c.name, 1.0, 2.0, op=c.op)
        for c in CASES.values()
        if c.op == "cached_attention" and c.arguments.get("backend") and "portable" in c.beside
    ]
    latent, chunk = "16_576_512_latent", "16_128_128"
    made = {(row["kind"], *row["bucket"]) for row in derived.attention_rows(recorded, "sm_90")}
    assert made >= {
        *((f"cached_{latent}_pages_64", *size, 8192) for size in ((32, 128), (1, 128), (1, 16))),
        *((f"cached_{latent}_fixed", batch, 128, 8192) for batch in (32, 1)),
        *((f"cached_{chunk}_{pages}", 4, 65536, 8192) for pages in ("pages_64", "pages_16", "fixed")),
    }
