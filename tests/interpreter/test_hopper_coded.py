"""Attention over keys in codes for Hopper, played from its own source by `gluon_machine`: values, whatever order barriers allow,
NaN in all that nobody sees. And that the machine sees what is wrong with such a kernel."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from tests import gluon_machine
from tests.attention_oracle import CALLS, call, ints
from tests.interpreter.test_hopper_attention import CHIP
from tilewright.attention.coded import reference
from tilewright.attention.coded_rows import first_of_blocks
from tilewright.attention.coded_rows import reference as rows_of
from tilewright.attention.coded_rows import reference_blocks as blocks_of
from tilewright.attention.hopper import coded
from tilewright.attention.hopper import coded_values as values
from tilewright.attention.seen import seen
from tilewright.core.target import pretend
from tilewright.runtime.kernel import Arguments, collect

MATHS = ("int8", "fp8", "fp8_pv")
BARS = {"int8": 2.4e-3, "fp8": 2.4e-3, "fp8_pv": 3e-2}  # of o in bf16, relative RMS: weights in e4m3 are within 1/16
KINDS = tuple((math, scaled) for math in MATHS for scaled in ("key", "block") if (math, scaled) != ("int8", "block"))
SEEN = ("causal", "left", "right", "kv_len", "cu_seqlens_q", "cu_seqlens_k")
MORE = {
    "mean": {"length": 130, "keys": 200, "causal": True, "mean": True},
    "mean and everything": {**CALLS["everything"], "mean": True},
    "128 and 64": {"D": 128, "V": 64, "length": 150, "keys": 300, "kv_len": ints(260)},
}
NAMES = (
    "causal",
    "heads share keys",
    "everything",
    "lengths",
    "packed, windows, lengths",
    "128 columns",
    "fp16",
    *MORE,
)


def coded_call(how, scaled="key", mean=False, **options):
    """Arguments of a call, with NaN in all that nobody sees: codes of int8 have none, but their scales do."""
    a = call(**options)
    shift = 0.5 * torch.randn(a["k"].shape[0], *a["k"].shape[2:], generator=torch.Generator().manual_seed(1))
    place = seen(a["q"], a["k"], *(a[name] for name in SEEN))
    lonely, unseen = ~place.visible.any(2), ~place.visible.any(1)
    a["q"] = a["q"].masked_fill(lonely[..., None, None], math.nan)
    a["v"] = a["v"].masked_fill(unseen[..., None, None], math.nan)
    rest = {
        "q_scale": None,
        "v_scale": None,
        "k_mean": shift if mean else None,
        "out_dtype": "bfloat16",
        "scaled": scaled,
    }
    if scaled == "block":
        a["k"], rest["k_scale"] = by_block(a, a["k"], rest["k_mean"], unseen)
        if how.endswith("_pv"):
            a["v"], rest["v_scale"] = by_block(a, a["v"], None, unseen)
        return {**a, **rest}
    k, k_scale = rows_of(a["k"], rest["k_mean"], kind=how.removesuffix("_pv"))
    k_scale = k_scale.masked_fill(unseen[..., None], math.nan)
    if how.endswith("_pv"):
        a["v"], scale = rows_of(a["v"], None, kind="fp8")
        far = torch.tensor([3e38, math.nan]).repeat(scale.shape[1])[: scale.shape[1], None]  # of codes that are NaN
        rest["v_scale"] = torch.where(unseen[..., None], far, scale)
    return {**a, "k": k, "k_scale": k_scale, **rest}


def by_block(a, x, mean, unseen):
    """Codes with a scale for each block, and NaN in all scales that do not count."""
    codes, scale = blocks_of(x, a["q"].shape[1], mean, **{name: a[name] for name in SEEN})
    codes = torch.where(unseen[..., None, None], 0x7F, codes.view(torch.uint8)).view(codes.dtype)
    return codes, torch.where(firsts(a)[:, None], scale, math.nan)


def firsts(a):
    """Whether a key is the first of a block, bool [keys]."""
    keys = a["k"].shape[1]
    return first_of_blocks(keys, a["cu_seqlens_k"], a["k"].device) == torch.arange(keys)


def launched(a, forward=coded.forward):
    """(o, lse), not yet written, and the launch that writes them; the ones before are made."""
    assert coded.fits(CHIP, SimpleNamespace(**a))
    with pretend(CHIP), collect() as found:
        o, lse = forward(**a)
    for wanted in found[:-1]:  # a table of tiles, a counter, scales by head
        grid = wanted.kernel.grid(Arguments(zip(wanted.kernel.names, wanted.ordered)))
        wanted.kernel.jit[grid](*wanted.ordered)
    o.fill_(math.inf)
    lse.fill_(math.inf)
    return o, lse, found[-1]


def agrees(a, o, lse, near=2e-5, bar=2.4e-3):
    """To the reference in fp32, which reads the same codes, and does not round: lse as near as this, o in bf16 to a bar and in fp16
    to an eighth of it, unless weights are codes."""
    wide = {"q": a["q"].float().nan_to_num(1.0), "v": a["v"] if a["v_scale"] is not None else a["v"].float()}
    wanted_o, wanted_lse = reference(**{**a, **wide, "k_scale": a["k_scale"].nan_to_num(1.0)})
    bar = bar / (8 if o.dtype == torch.float16 and a["v_scale"] is None else 1)
    for got, wanted, most in ((o.double(), wanted_o.double(), bar), (lse.double(), wanted_lse.double(), near)):
        assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got == -math.inf, wanted == -math.inf)
        live = wanted.isfinite()
        assert live.any() and (got - wanted)[live].square().mean().sqrt() <= most * wanted[live].square().mean().sqrt()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_values(name, kind):
    a = coded_call(*kind, **{**CALLS, **MORE}[name])
    o, lse, wanted = launched(a)
    gluon_machine.play(wanted, seed=0)
    agrees(a, o, lse, bar=BARS[kind[0]])


def even_call(scaled="key", **options):
    """Weights that are codes: queries of 0 see all keys alike, and scales of values are powers of two, but for what is added to
    them. Some values are 0, whose scales are larger; where scales are of blocks, all of some blocks are."""
    a = coded_call("fp8_pv", scaled, **options)
    source = torch.Generator().manual_seed(2)
    scale = 2.0 ** torch.randint(-12, 3, a["v_scale"].shape, generator=source)
    none = torch.rand(scale.shape, generator=source) < 0.1
    if scaled == "block":
        first = first_of_blocks(a["k"].shape[1], a["cu_seqlens_k"], a["k"].device)
        none = (first // 128 % 3 == 1)[None, :, None].expand(scale.shape)
        codes = (
            a["v"].view(torch.uint8).masked_fill(none[..., None] & (a["v"].view(torch.uint8) != 0x7F).any(-1, True), 0)
        )
        scale = torch.where(firsts(a)[:, None], torch.where(none, 2.0**60, scale), math.nan)
        return {**a, "q": a["q"] * 0.0, "v": codes.view(a["v"].dtype), "v_scale": scale}
    codes = a["v"].float().masked_fill(none[..., None], 0.0).to(a["v"].dtype)
    seen_keys = a["v_scale"].isfinite() & (a["v_scale"] < 1e38)
    a |= {"q": a["q"] * 0.0, "v": torch.where(seen_keys[..., None], codes.view(torch.uint8), 0x7F).view(a["v"].dtype)}
    return {**a, "v_scale": torch.where(seen_keys, torch.where(none, 2.0**30, scale), a["v_scale"])}


@pytest.mark.parametrize("scaled", ["key", "block"])
@pytest.mark.parametrize("name", ["heads share keys", "lengths", "packed, windows, lengths", "packed", "128 columns"])
def test_weights_that_codes_hold(name, scaled):
    """Sums are then those of numbers: what is turned, divided and put in another order comes back."""
    a = even_call(scaled, **CALLS[name])
    o, lse, wanted = launched(a)
    gluon_machine.play(wanted, seed=0)
    agrees(a, o, lse)


AWAIT_SCORES = (
    "        s = warpgroup_mma_wait(1, deps=(s,))\n        if CODED and not BY_BLOCK:\n"
    "            barrier()  # and now these\n"
)
GIVE_KEYS = "        mbarrier.arrive(rings.k.empty.index(following), count=1)\n"
AWAIT_KEYS = "        mbarrier.wait(rings.k.full.index(following), its_phase)\n"
READ_SCALES = "        if not CODED and not BY_BLOCK:\n            by_key = scales_at(scales.k, following, SHAPED)\n"
MUTANTS = {
    "keys are given back before their product ends": (AWAIT_SCORES + GIVE_KEYS, GIVE_KEYS + AWAIT_SCORES),
    "keys are not awaited": (AWAIT_KEYS, ""),
    "scales of another block": (READ_SCALES, READ_SCALES.replace("following", "stage")),
    "scales of one key alone": ("gl.float32, [boxes.shape[4]],", "gl.float32, [boxes.shape[3]],"),
    "scales are not counted": ("K.block_type.nbytes + S.block_type.nbytes", "K.block_type.nbytes"),
    "queries are given back twice": ("rings.q.empty.index(stage_q), count=1", "rings.q.empty.index(stage_q), count=2"),
    "a query that sees nothing": ("by_row = gl.where(begin < end, by_row, 1.0)", "by_row = by_row * 1.0"),
    "sums are not faded": (
        "rings.v)\n            if PLAN.lazy:\n                o = scaled_where_moved(o, fade)\n            else:\n"
        "                o = scaled_rows(o, fade)\n", "rings.v)\n",
    ),
    "the mean is left out": ("shift *= SCORES.scale * LOG2E", "shift *= 0.0"),
    "the first values are not cleared": ("if (key < start) & (work.high - work.low > 1):", "if False:"),
    "a turn is not awaited": ("        await_turn(W)  #", "        #"),
}  # fmt: skip
MANY = {
    "batch": 2, "D": 128, "length": 400, "keys": 700, "left": 200, "causal": True, "kv_len": ints(620, 300), "mean": True,
    "scale": 1.0,
}  # fmt: skip


def found_wrong(a, forward=coded.forward, bar=2.4e-3):
    """Whether an order that barriers allow, of a few, is an error, or comes to other values than the reference."""
    with pytest.raises(AssertionError):
        for seed in range(8):
            o, lse, wanted = launched(a, forward)
            gluon_machine.play(wanted, seed)
            agrees(a, o, lse, bar=bar)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name, tmp_path):
    kept, instead = MUTANTS[name]
    with gluon_machine.broken(coded, kept, instead, tmp_path) as mutant:
        found_wrong(coded_call("int8", **MANY), mutant.forward)


ISSUE_VALUES = "            o = warpgroup_mma(codes_of_words(p0), keys_at(rings.v.first, stage), o, is_async=True)\n"
AWAIT_SUMS = "            o = warpgroup_mma_wait(0, deps=(o,))\n"
GIVE_VALUES = "            mbarrier.arrive(rings.v.empty.index(stage), count=1)\n"
FADE = (
    "            if PLAN.lazy:\n                o = scaled_where_moved(o, fade)\n            else:\n"
    "                o = scaled_rows(o, fade)\n            p,"
)
AWAIT_VALUES = "            mbarrier.wait(rings.v.full.index(following), its_phase)\n"
READ_VALUES = "            log_by = log_divisor_at(scales.v, following, SHAPED)\n"
SET_ASIDE = "                    set_aside(with_aside(o, aside, was, exponent), aside)\n"
MUTANTS_OF_VALUES = {
    "values are given back before their product ends": (
        coded, AWAIT_SUMS + GIVE_VALUES + FADE, GIVE_VALUES + AWAIT_SUMS + FADE,
    ),
    "values are given back twice": (coded, AWAIT_SUMS + GIVE_VALUES + FADE, AWAIT_SUMS + 2 * GIVE_VALUES + FADE),
    "scales of values are read before they arrive": (coded, AWAIT_VALUES + READ_VALUES, READ_VALUES + AWAIT_VALUES),
    "scales of the values before": (coded, "scales, following, SUMS, BY_BLOCK, EDGE", "scales, stage, SUMS, BY_BLOCK, EDGE"),
    "the divisor of the values before": (coded, READ_VALUES, READ_VALUES.replace("following", "stage")),
    "a block's divisor is left out": (values, "own = largest + log_by", "own = largest"),
    "a block's exponent is left out": (values, "below = wanted - own", "below = (wanted - own) * 0.0"),
    "weights of a block enter whole": (coded, "scaled_rows(part_sums(p), share)", "part_sums(p)"),
    "sums are multiplied with what they lack at the end": (coded, "gl.exp2(exponent - top), 0.0)", "1.0, 0.0)"),
    "sums set aside are not faded": (coded, SET_ASIDE, SET_ASIDE.replace("was, exponent)", "exponent, exponent)")),
    "sums set aside are lost": (coded, SET_ASIDE, SET_ASIDE.replace("with_aside(o, aside, was, exponent)", "o")),
    "sums set aside stay": (coded, "                    o = gl.zeros([64, COLUMNS], gl.float32, SUMS)\n", ""),
    "sums are not faded": (coded, FADE, "            p,"),
    "a sum is used before it is there": (
        coded, AWAIT_SUMS + GIVE_VALUES + FADE, AWAIT_SUMS.replace("wait(0", "wait(1") + GIVE_VALUES + FADE,
    ),
    "what is far above is not followed": (values, "(own <= exponent + ABOVE)", "(own <= exponent + 40.0)"),
    "exponents fall without end": (values, "gl.maximum(own, highest - FURTHEST)", "own"),
    "a block's place among all": (coded, "first_block(LENGTHS, tile, BLOCK) * BLOCK - tile.first_k", "0"),
    "keys in their own order": (values, ".permute((0, 1, 3, 2, 4))", ""),
    "scales of values are not counted": (values, "V.block_type.nbytes + S.block_type.nbytes", "V.block_type.nbytes"),
    "sequences share blocks": (values, "tile.first_k // BLOCK + tile.sequence", "tile.first_k // BLOCK"),
    "codes that nobody sees": (values, "tile.first_k + key, seen, COLUMNS", "tile.first_k + key, key < KEYS, COLUMNS"),
    "scales that nobody sees": (
        values, "tile.first_k, key, (key >= start) & (key < stop))", "tile.first_k, key, tile.first_k + key < KEYS)",
    ),
    "scales of rows of 0": (values, "tl.where(some & (s == s), tl.abs(s), 0.0)", "tl.where(s == s, tl.abs(s), 0.0)"),
}  # fmt: skip


PACKED = {
    **CALLS["packed, windows, lengths"],
    "keys": 700,
    "cu_seqlens_k": ints(20, 320, 350, 690),
    "kv_len": ints(270, 31, 301),
}


LONG = {"D": 128, "length": 140, "keys": 1000, "scale": 1.0}
FAR = {**LONG, "scale": 100.0}  # scores of one block are hundreds of powers of two above those of another


def call_of_values(options, alike=False, scaled="key"):
    """A call that mutants are found by, with values of other sizes in other blocks; `alike`: each key has the same weight."""
    a = even_call(scaled, **{name: given for name, given in options.items() if name != "mean"})
    by = 8.0 ** (torch.arange(a["v_scale"].shape[1]) // 128 % 3)[:, None]
    a["v_scale"] = torch.where(a["v_scale"] < 1e30, a["v_scale"] * by, a["v_scale"])
    if not alike:
        drawn = torch.randn(a["q"].shape, generator=torch.Generator().manual_seed(3)).to(a["q"].dtype)
        a["q"] = torch.where(a["q"].isnan(), a["q"], drawn)
    return a


@pytest.mark.parametrize("scaled", ["key", "block"])
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("options", [MANY, PACKED, LONG, FAR])
def test_calls_that_mutants_are_found_by(options, alike, scaled, monkeypatch):
    monkeypatch.setattr(coded, "TOGETHER", 2)
    a = call_of_values(options, alike, scaled)
    for seed in range(3):
        o, lse, wanted = launched(a)
        gluon_machine.play(wanted, seed)
        agrees(a, o, lse, bar=BARS["fp8_pv"])


def tiny_call():
    """A scale of queries times one of keys is 0 in fp32."""
    a = coded_call("fp8_pv", "block", **MANY)
    return {**a, "q": (a["q"].float() * 1e-25).to(a["q"].dtype), "k_scale": a["k_scale"] * 1e-20, "k_mean": None}


def test_factors_too_small_for_a_number():
    a = tiny_call()
    o, lse, wanted = launched(a)
    gluon_machine.play(wanted, 0)
    agrees(a, o, lse, bar=BARS["fp8_pv"])


@pytest.mark.parametrize("scaled", ["key", "block"])
@pytest.mark.parametrize("options", [MANY, LONG, FAR])
def test_no_weight_is_above_what_codes_have_room_for(options, scaled, monkeypatch):
    """The largest weight of a block is 2^RAISED, or 2^ABOVE times as much where the exponent of sums stays: 256, of 448. Past that
    a code would be less than its weight, which sums of rows have whole."""
    found, as_words = [], gluon_machine.playable(values.weights_as_words)

    def watched(w, sums):
        found.append(float(w.nan_to_num(0.0).max()))
        return as_words(w, sums)

    monkeypatch.setitem(gluon_machine.INSTEAD, "weights_as_words", watched)
    monkeypatch.setattr(coded, "TOGETHER", 2)
    gluon_machine.play(launched(call_of_values(options, scaled=scaled))[2], 0)
    assert 2.0**values.RAISED.value <= max(found) * 1.001 and max(found) <= 256 * 1.001


def larger_number(a, b):
    """The larger, as a GPU finds it: a NaN is dropped."""
    return gluon_machine.value(torch.fmax(*torch.broadcast_tensors(gluon_machine.value(a), gluon_machine.value(b))))


def largest_number(x, axis):
    x = x.as_subclass(torch.Tensor)
    found = torch.where(x.isnan(), -math.inf, x).amax(axis)
    return gluon_machine.value(torch.where(x.isnan().all(axis), math.nan, found))


def spoilt_call(kind, **options):
    """A call with a query of NaN and one of inf, and where codes have NaN with some in keys, all of which somebody sees."""
    a = coded_call(*kind, D=128, length=200, keys=200, causal=True, **options)
    q, keys = a["q"].clone(), a["k"].view(torch.uint8).clone()
    q[:, 20, 0, 3], q[:, 90, 1, 0] = math.nan, math.inf
    if kind[0] != "int8":
        keys[:, (100, 150), 0, 5] = 0x7F
    return {**a, "q": q, "k": keys.view(a["k"].dtype)}


def spoils_what_sees_it(a, o, lse):
    """NaN is where the reference has it, and nowhere else."""
    wanted = reference(**{**a, "q": a["q"].float(), "v": a["v"] if a["v_scale"] is not None else a["v"].float()})
    assert all(torch.equal(got.isnan(), want.isnan()) for got, want in zip((o, lse), wanted))
    assert 0 < wanted[1].isnan().sum() < wanted[1].numel()


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_spoils_the_rows_that_see_it(kind, monkeypatch):
    monkeypatch.setattr(gluon_machine.LANGUAGE, "maximum", larger_number)
    monkeypatch.setattr(gluon_machine.LANGUAGE, "max", largest_number)
    a = spoilt_call(kind)
    o, lse, wanted = launched(a)
    gluon_machine.play(wanted, 0)
    spoils_what_sees_it(a, o, lse)


def test_a_nan_that_is_dropped_is_found(tmp_path, monkeypatch):
    """Codes of int8 have no NaN: the scale of a row alone tells of one."""
    monkeypatch.setattr(gluon_machine.LANGUAGE, "maximum", larger_number)
    monkeypatch.setattr(gluon_machine.LANGUAGE, "max", largest_number)
    a, kept = spoilt_call(("int8", "key")), "gl.where(by_row < LEAST, LEAST, by_row)"
    with gluon_machine.broken(coded, kept, "gl.maximum(by_row, LEAST)", tmp_path) as mutant:
        o, lse, wanted = launched(a, mutant.forward)
        gluon_machine.play(wanted, 0)
        with pytest.raises(AssertionError):
            spoils_what_sees_it(a, o, lse)


MUTANTS_OF_BLOCKS = {
    "scales of the block after": (
        coded, "scales_of_block(scales, place, key, PLAN.block)", "scales_of_block(scales, place, key + PLAN.block, PLAN.block)",
    ),
    "scales of another sequence's keys": (coded, "scales.k, place, place.first + key)", "scales.k, place, key)"),
    "scales of another sequence's values": (coded, "place.block + key // BLOCK)", "key // BLOCK)"),
    "scales of another head": (coded, "place.head.to(gl.int64) * S.stride_h", "place.head.to(gl.int64) * 0"),
    "weights are not raised": (values, "VANISHED, below, VANISHED) - RAISED", "VANISHED, below, VANISHED)"),
    "a scale of a block of 0": (values, "tl.where(some & (s == s), tl.abs(s), 0.0)", "tl.where(s == s, tl.abs(s), 0.0)"),
    "factors of 0": (coded, "by_row = factor_of(by_row * by_key)", "by_row = by_row * by_key"),
    "keys are not awaited": (coded, AWAIT_KEYS, ""),
    "values are not awaited": (
        coded, "                await_values_after(rings, following, its_phase)\n            # Which",
        "                pass\n            # Which",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS_OF_BLOCKS)
def test_mutants_of_blocks_are_found(name, tmp_path, monkeypatch):
    words = {"sequence": PACKED, "head": {**MANY, "heads": 4, "kv_heads": 2}}
    options = next((given for word, given in words.items() if word in name), MANY)
    a = tiny_call() if "factors" in name else call_of_values(options, "block of 0" in name, "block")
    one_is_found(MUTANTS_OF_BLOCKS[name], a, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", MUTANTS_OF_VALUES)
def test_mutants_of_values_are_found(name, tmp_path, monkeypatch):
    words = {"place": PACKED, "share blocks": PACKED, "aside": LONG, "fall": FAR}
    options = next((given for word, given in words.items() if word in name), MANY)
    a = call_of_values(options, "rows of 0" in name or "codes" in name)
    one_is_found(MUTANTS_OF_VALUES[name], a, tmp_path, monkeypatch)


def one_is_found(mutant, a, tmp_path, monkeypatch):
    module, kept, instead = mutant
    with gluon_machine.broken(module, kept, instead, tmp_path) as mutant:
        for one in vars(mutant) if module is values else ():  # what the other module takes from there
            if getattr(coded, one, None) is getattr(values, one, coded):
                monkeypatch.setattr(coded, one, getattr(mutant, one))
        monkeypatch.setattr(coded if module is values else mutant, "TOGETHER", 2)
        found_wrong(a, coded.forward if module is values else mutant.forward, BARS["fp8_pv"])


def test_a_copy_of_scales_that_begins_anywhere_is_found(tmp_path):
    """Keys of packed sequences begin at no multiple of 16 bytes."""
    a = coded_call("int8", **CALLS["packed"])
    kept, instead = "key % 4, key - key % 4", "0, key"
    with (
        gluon_machine.broken(coded, kept, instead, tmp_path) as mutant,
        pytest.raises(gluon_machine.Wrong, match="a copy from"),
    ):
        gluon_machine.play(launched(a, mutant.forward)[2], 0)
