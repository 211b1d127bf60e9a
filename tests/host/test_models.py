"""Real models: their facts, where ops stand in them, and the calls that follow."""

from __future__ import annotations

import pytest

import tilewright as tw
from tilewright.check import models
from tilewright.check.cases import dims_of
from tilewright.check.models import PLACES, ModelCall, calls, covering, elements, facts, place_calls, reached, settings
from tilewright.core.target import TARGETS

HOPPER = TARGETS["sm_90"]
OPS = tw.catalogue()
NEEDED = {
    "llama-3-8b", "llama-3-70b", "llama-3.2-1b", "qwen2.5-7b", "qwen2.5-72b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b",
    "qwen3-235b-a22b", "deepseek-v3", "kimi-k2", "glm-4.5", "glm-4.5-air", "gpt-oss-20b", "gpt-oss-120b", "gemma-3-4b",
    "gemma-3-27b", "mixtral-8x7b", "mixtral-8x22b", "olmoe-1b-7b", "ling-mini-2.0", "minimax-m2",
}  # fmt: skip
WORDS = {"act": str, "score": str, "order": str}
FLAGS = ("head_norm", "expert_bias", "router_bias", "normalize", "sinks")
NUMBERS = ("weight_offset", "scaling", "limit", "alpha")


def test_models_are_whole():
    assert models.models().keys() >= NEEDED
    for name, model in models.models().items():
        assert {"hidden", "heads", "kv_heads", "head_dim", "vocab"} <= set(model), name
        assert "ffn" in model or "expert_ffn" in model, name
        assert model["heads"] % model["kv_heads"] == 0, name
        assert model.get("rotary", 2) % 2 == 0 and model.get("rotary", 2) <= model["head_dim"], name
        assert ("experts" in model) == ("top_k" in model) == ("expert_ffn" in model), name
        assert ("q_rank" in model) == ("kv_rank" in model) == ("turned" in model), name
    for name, model in models.known().items():
        for fact, value in model.items():
            kind = WORDS.get(fact) or (bool if fact in FLAGS else float if fact in NUMBERS else int)
            assert type(value) is kind and (kind is not int or value > 0), f"{name}: {fact} = {value!r}"
        if "experts" in model:
            limited = model.get("group_topk", 1)
            assert model["experts"] % model.get("groups", 1) == 0 and model["top_k"] % limited == 0, name


def test_every_op_has_a_place_and_no_other_name_does():
    assert PLACES.keys() == OPS.keys()


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_every_place_is_a_call_that_the_op_takes(op):
    """At every model's sizes: none is refused, all are in some model, and a place fixes every dimension that the op draws."""
    made = place_calls(op, tokens=(7,))
    assert made and all(one.models for one in made)
    for one in made:
        assert one.launches(op, HOPPER), one.name
        drawn = one.source(op)
        op.inputs(drawn)
        assert drawn.dims == one.dims, f"{one.name}: draws {drawn.dims}"
        strange = {*one.options} - {*drawn.options, "count"}
        assert not strange, f"{one.name}: {sorted(strange)} are no options"
        assert {*one.arguments} <= {*op.signature.names}
    for place in PLACES[op.name]:
        assert place_calls(op, tokens=(7,), places=[place]), f"a place that no model has: {place}"


def test_the_routing_that_was_wrong_is_among_the_calls():
    made = place_calls(OPS["topk_routing"])
    fault = [one for one in made if one.arguments["groups"] == 32]
    assert {one.dims["tokens"] for one in fault} == set(models.TOKENS)
    assert all(
        one.options["score"] == "sigmoid" and not one.options["bias"] and one.dims["experts"] == 256 for one in fault
    )
    assert {one.arguments["groups"] for one in made} >= {1, 8, 32}


def test_equal_calls_are_made_once_for_all_their_models():
    made = [
        one
        for one in place_calls(OPS["rms_norm"], tokens=(7,))
        if one.dims["hidden"] == 4096 and one.dims["tokens"] == 7
    ]
    assert len(made) == 1 and {"llama-3-8b", "qwen3-8b", "mixtral-8x7b"} <= set(made[0].models)
    names = [one.name for op in OPS.values() for one in place_calls(op)]
    assert len(set(names)) == len(names)


def test_a_model_s_options_come_with_its_dimensions():
    glu = place_calls(OPS["glu"], ["gpt-oss-20b"], (7,))
    assert [(one.dims["tokens"], one.options["limit"], one.options["alpha"]) for one in glu] == [(28, 7.0, 1.702)]
    split = place_calls(OPS["qkv_split"], ["phi-4-mini"], (7,))[0]
    values = split.values(OPS["qkv_split"])
    assert (values["heads"], values["kv_heads"], values["rotary_dim"]) == (24, 8, 96)


def test_other_calls_are_those_that_reach_another_variant():
    op = OPS["topk_routing"]
    made, plain = calls(op, tokens=(7,)), place_calls(op, tokens=(7,))
    assert made[: len(plain)] == plain and len(made) > len(plain)
    before = set().union(*(reached(op, one) for one in plain))
    for one in made[len(plain) :]:
        new = reached(op, one)
        assert new - before, one.name
        before |= new
    everything = set().union(*(reached(op, other) for one in plain for other in models.others(op, one)))
    assert everything <= before


def test_a_covering_has_every_value_of_every_constant():
    op = OPS["rms_norm"]
    some = place_calls(op, tokens=(7,))
    picked = covering(op, some, HOPPER)

    def every(chosen: list[ModelCall]) -> set:
        return {pair for one in chosen for wanted in one.launches(op, HOPPER) for pair in settings(wanted)}

    assert len(picked) < len(some) and every(picked) == every(some)
    assert covering(op, some, HOPPER, every(some)) == []
    assert len(covering(op, some, HOPPER, cost=lambda one, launches: 1.0, most=0.0)) == 1
    assert len(covering(op, some, HOPPER, cost=lambda one, launches: 1.0, most=2.0)) == 2


def test_a_call_too_large_is_a_rank_s():
    op = OPS["grouped_mm_rows"]
    whole, held = (place_calls(op, ["deepseek-v3"], (7,), most=most) for most in (None, 1 << 28))
    assert {one.dims["experts"] for one in whole} == {256}
    assert all(1 <= one.dims["experts"] < 256 and elements(op, one) <= 1 << 28 for one in held)
    inner = OPS["grouped_mm_inner"]  # whose result has all experts' weights, and whose arguments have none
    assert all(one.dims["experts"] < 256 for one in place_calls(inner, ["deepseek-v3"], (7,), most=1 << 28))
    few = facts({**models.models()["deepseek-v3"], "experts": 4}, 7)
    assert few["top_k"] == 4 and few["routed"] == 28


def test_a_name_tells_calls_apart_and_the_source_follows_the_kernels():
    op = OPS["rms_norm"]
    first, second = place_calls(op, ["llama-3-8b"], (7, 128))
    assert first.name != second.name and first.name.startswith("rms_norm tokens=7 hidden=4096 bfloat16")
    assert models.digest(op, first, HOPPER) != models.digest(op, place_calls(op, ["llama-3-70b"], (7,))[0], HOPPER)
    assert len(models.digest(op, first, HOPPER)) == 16 and models.digest(op, first, HOPPER) == models.digest(
        op, first, HOPPER
    )
    assert dims_of(op) == tuple(first.dims)
