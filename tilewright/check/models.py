"""Where each op stands in real models, and the calls that these places make of it.

`data/models.json` has the facts of models. A `Place` names, for an op, the facts that its dimensions, options and arguments are;
`calls` makes of them every call of an op at every model's sizes, and beside each plain call those with other optional arguments
that reach a compiled variant which no call before them did. All of it is found on tensors without memory.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.target import INTERPRETING, TARGETS, Target, pretend
from ..op import Op
from ..runtime import config
from ..runtime.kernel import Arguments, Kernel, Wanted
from ..runtime.source import hashed
from .cases import formats, holds
from .variants import Blank, Call, Plain, passes, passes_and_results, variant

TOKENS = (1, 7, 128, 4096)
# What a model has if its line does not say otherwise
USUAL: dict[str, Any] = {
    "act": "silu", "limit": None, "alpha": 1.0, "weight_offset": 0.0, "head_norm": False, "router_bias": False,
    "expert_bias": False, "score": "softmax", "order": "score_first", "normalize": True, "scaling": 1.0, "groups": 1,
    "group_topk": 1, "sinks": False,
}  # fmt: skip
Facts = dict[str, Any]


@cache
def _data() -> dict[str, dict[str, Facts]]:
    return json.loads((config.SHIPPED / "models.json").read_text())


def models() -> dict[str, Facts]:
    """Facts of models by name: dimensions, and what else their layers are called with."""
    return _data()["models"]


def known() -> dict[str, Facts]:
    """Models, and routings that are no whole model."""
    return {**models(), **_data()["routings"]}


def facts(model: Mapping[str, Any], tokens: int) -> Facts:
    """What places may name: a model's own facts and what follows from them for a number of tokens."""
    found = {**USUAL, **model, "tokens": tokens, "one": 1, "eight": 8}
    if "heads" in found:
        heads, kv_heads, size = (found[n] for n in ("heads", "kv_heads", "head_dim"))
        rotary = found.setdefault("rotary", size)
        found |= {
            "attention": heads * size, "joined": (heads + 2 * kv_heads) * size, "head_rows": tokens * heads,
            "queries_per_key": heads // kv_heads, "share": Fraction(size, rotary), "shared_heads": heads > kv_heads,
        }  # fmt: skip
    if "window" in found:  # a query's own key counts as one of it
        found["left"] = found["window"] - 1
    if "turned" in found:  # keys of latent attention have the turned columns beside those that values have
        width = found["head_dim"] + found["turned"]
        found |= {"latent_dim": width, "narrower": Fraction(width, found["head_dim"])}
    if "ffn" in found:
        found["gate_up"] = 2 * found["ffn"]
    if "experts" in found:
        found["top_k"] = min(found["top_k"], found["experts"])
        found["routed"] = tokens * found["top_k"]
    if "expert_ffn" in found:
        found["expert_gate_up"] = 2 * found["expert_ffn"]
    if "vocab" in found:
        found["vocab_share"] = found["vocab"] // 8  # of a rank, where eight share the vocabulary
    return found


# ---------------------------------------------------------------- places


class Fact(NamedTuple):
    """A value that a model's fact is."""

    name: str


@dataclass(frozen=True)
class Place:
    """Where an op stands in a model. `dims` name facts; `arguments` replace what the op's `inputs` drew; a model without a fact
    that `dims` name, or with a false one of `needs`, has no such place. `fewer` is the fact that ranks share: where a call would
    be too large, it is a rank's that holds half of them, or a quarter, and so on."""

    dims: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    fewer: str = ""


def of(*names: str) -> dict[str, Fact]:
    """Options or arguments that have the names of their facts."""
    return {name: Fact(name) for name in names}


ROWS = {"tokens": "tokens"}
ROUTED = {"tokens": "routed", "experts": "experts"}
HEADS = {"batch": "one", "length": "tokens", "heads": "heads", "head_dim": "head_dim"}
WEIGHTED = {"weight": True, **of("weight_offset")}
GATED = of("act", "limit", "alpha")
TURNED = of("queries_per_key", "share")
CHOSEN = {"slots": Fact("top_k"), "form": "best"}
SINGLE = "float32"  # routers' logits, of models that are trained with these ops


def products(**settings: Any) -> tuple[Place, ...]:
    """The dense products of a layer: into and out of attention, into and out of the feed-forward network. Ranks share its heads,
    or its width."""
    pairs = (
        ("hidden", "joined", "heads"),
        ("attention", "hidden", "heads"),
        ("hidden", "gate_up", "ffn"),
        ("ffn", "hidden", "ffn"),
    )
    return tuple(
        Place({**ROWS, "hidden": inner, "columns": columns}, fewer=fewer, **settings) for inner, columns, fewer in pairs
    )


def experts(rows: str = "tokens", **settings: Any) -> tuple[Place, ...]:
    """The products of experts, into and out of their feed-forward networks."""
    first = {"tokens": "routed"} if rows == "tokens" else {rows: "tokens"}
    pairs = (("hidden", "expert_gate_up"), ("expert_ffn", "hidden"))
    made = [{**first, "experts": "experts", "hidden": inner, "columns": columns} for inner, columns in pairs]
    return tuple(Place(dims, fewer="experts", **settings) for dims in made)


def widths(*names: str, **settings: Any) -> tuple[Place, ...]:
    """Rows of these widths."""
    return tuple(Place({**ROWS, "hidden": name}, **settings) for name in names)


def of_experts(*names: str, **settings: Any) -> tuple[Place, ...]:
    """Rows of these widths, grouped by expert."""
    return tuple(Place({**ROUTED, "hidden": name}, {"offsets": True}, **settings) for name in names)


NORM = widths("hidden", options=WEIGHTED)
LAYER_NORM = widths("hidden", options={"weight": True, "bias": True})
GLU_LINEAR = tuple(Place({**ROWS, "hidden": n, "columns": "hidden"}, GATED, fewer=n) for n in ("ffn", "expert_ffn"))
CAUSAL = {"causal": True, **of("queries_per_key")}
ATTENTION = (
    Place(HEADS, CAUSAL, fewer="heads"),
    Place({**HEADS, "head_dim": "latent_dim"}, {**CAUSAL, **of("narrower")}, fewer="heads"),
    Place(HEADS, {**CAUSAL, "windowed": True, "sink": Fact("sinks"), **of("left")}, needs=("window",), fewer="heads"),
)
LOSS = (Place({**ROWS, "vocab": "vocab"}, {"reduction": "mean"}),)
LOGITS = (Place({**ROWS, "experts": "experts"}, of("score"), dtype=SINGLE),)
PERMUTE = (Place({**ROWS, "hidden": "hidden", "experts": "experts"}, {**CHOSEN, "probs": True}),)
WEIGHTS = (("ffn", "hidden"), ("expert_ffn", "hidden"))
MATRICES = tuple(Place({"tokens": rows, "hidden": columns}, {"count": 12}, fewer=rows) for rows, columns in WEIGHTS)
ACTIVATIONS = (*widths("hidden", "ffn"), *of_experts("hidden", "expert_ffn"))
PLACES: dict[str, tuple[Place, ...]] = {
    "add_layer_norm": LAYER_NORM,
    "add_rms_norm": NORM,
    "attention": ATTENTION,
    "attention_codes": ATTENTION,
    "attention_codes_pv": ATTENTION,
    "attention_lse": ATTENTION,
    "attention_blocks": (Place({**HEADS, "heads": "kv_heads"}),),
    "attention_mean": (Place({**HEADS, "heads": "kv_heads"}),),
    "attention_rows": (Place({**HEADS, "heads": "kv_heads"}),),
    "attention_merge": (Place({**HEADS, "parts": "eight"}, fewer="heads"),),
    "cache_move": (Place({**ROWS, "heads": "kv_heads", "head_dim": "head_dim"}),),
    "cache_write": (Place({**ROWS, "heads": "kv_heads", "head_dim": "head_dim"}),),
    # A step of many sequences, and a chunk of one
    "cached_attention": (
        Place({**HEADS, "batch": "tokens", "length": "one"}, of("queries_per_key")),
        Place(HEADS, of("queries_per_key")),
    ),
    "causal_conv1d": (Place({"batch": "one", "length": "tokens", "hidden": "attention"}, {"act": "silu"}),),
    "causal_conv1d_step": (Place({**ROWS, "hidden": "attention"}, {"act": "silu"}),),
    "column_amax": ACTIVATIONS,
    "cross_entropy": LOSS,
    "cross_entropy_join": (Place(ROWS, {"shards": Fact("eight")}),),
    "cross_entropy_lse": LOSS,
    "cross_entropy_parts": (Place({**ROWS, "vocab": "vocab_share"}),),
    "dequantize_codes": (
        *widths("hidden", "ffn"),
        *(Place({"tokens": rows, "hidden": columns}, {"granularity": "128x128"}) for rows, columns in WEIGHTS),
    ),
    "embedding": (Place({**ROWS, "vocab": "vocab", "hidden": "hidden"}, fewer="vocab"),),
    "embedding_accumulate": (Place({**ROWS, "vocab": "vocab", "hidden": "hidden"}, fewer="vocab"),),
    # Behind products into and out of a feed-forward network: what they do not do themselves
    "epilogue": (
        *widths("ffn", options={"bias": True, **of("act")}),
        *widths("hidden", options={"gate": True, "residual": True}),
    ),
    # Of layers of linear attention, which have the width of these
    "gated_group_norm": (
        Place({"batch": "one", "length": "tokens", "hidden": "attention"}, {"groups": Fact("kv_heads"), "weight": True}),
    ),
    "glu": (
        *widths("ffn", options=GATED),
        Place({**ROUTED, "hidden": "expert_ffn"}, {**GATED, "scale": True, "offsets": True}),
    ),
    "glu_linear": GLU_LINEAR,
    "glu_linear_fp8": GLU_LINEAR,
    "grouped_mm_inner": experts(),
    "grouped_mm_inner_fp8": experts(),
    "grouped_mm_masked": experts("rows"),
    "grouped_mm_rows": experts(),
    "grouped_mm_rows_fp8": experts(),
    "hadamard": widths("hidden", "ffn", "expert_ffn"),
    "hadamard_quantize": widths("hidden", "ffn", "expert_ffn"),
    # Of layers whose heads are normalised each by itself: a plane is a head of a token
    "instance_norm": (
        Place({"batch": "tokens", "heads": "heads", "hidden": "head_dim"}, {"weight": True, "bias": True}),
    ),
    "layer_norm": LAYER_NORM,
    # Of layers of linear attention, whose heads are as wide as these
    "linear_attention": (
        Place({**HEADS, "heads": "kv_heads"}, {"decay": "head"}, fewer="kv_heads"),
        Place({**HEADS, "heads": "kv_heads"}, {"decay": "token", "beta": True, "normalize": True}, fewer="kv_heads"),
    ),
    "linear_attention_columns": (
        Place({**HEADS, "heads": "kv_heads"}, {"beta": True, "normalize": True, "with_bonus": False}, fewer="kv_heads"),
    ),
    "linear_attention_step": (Place({**ROWS, "heads": "kv_heads", "head_dim": "head_dim"}, {"log_decay": "token", "beta": True}),),
    "linear_cross_entropy": (
        Place({**ROWS, "hidden": "hidden", "vocab": "vocab"}, {"reduction": "mean"}, fewer="vocab"),
    ),
    "linear_fp8": products(),
    "linear_fp8_accumulate": products(),
    "load_balancing_loss": LOGITS,
    "matmul": products(),
    "mla_rope": (Place(HEADS, {"turned_columns": Fact("turned")}, needs=("q_rank",)),),
    "moe_feed_forward": (
        Place(
            {**ROWS, "hidden": "hidden"},
            {"ffn": Fact("expert_ffn"), "slots": Fact("top_k"), "routing": True, "probs": True, "best": True,
             "weight_scale": 0.02, **of("experts", "act", "limit")},
            needs=("expert_ffn",), fewer="experts",
        ),
    ),
    "moe_permute": PERMUTE,
    "moe_permute_codes": PERMUTE,
    "moe_row_map": (Place({**ROWS, "experts": "experts"}, CHOSEN),),
    "moe_unpermute": PERMUTE,
    "multi_tensor_count_zeros": MATRICES,
    "multi_tensor_norm": MATRICES,
    "multi_tensor_scale": MATRICES,
    # The angles of rotary positions: positions by frequencies
    "outer": widths("rotary", dtype=SINGLE),
    "qkv_split": (
        Place(HEADS, {**TURNED, "q_weight": Fact("head_norm"), "k_weight": Fact("head_norm")}, needs=("shared_heads",)),
    ),
    # A step of many sequences, and a chunk of one
    "qkv_split_cache": (
        Place(
            {**HEADS, "batch": "tokens", "length": "one"},
            {**TURNED, "q_weight": Fact("head_norm"), "k_weight": Fact("head_norm")}, needs=("shared_heads",),
        ),
        Place(HEADS, {**TURNED, "q_weight": Fact("head_norm"), "k_weight": Fact("head_norm")}, needs=("shared_heads",)),
    ),
    "quantize": ACTIVATIONS,
    "rms_norm": (
        *widths("hidden", "q_rank", "kv_rank", options=WEIGHTED),
        Place({"tokens": "head_rows", "hidden": "head_dim"}, WEIGHTED, needs=("head_norm",)),
    ),
    "rms_norm_router": (Place({**ROWS, "hidden": "hidden", "experts": "experts"}, {"weight": True}),),
    "rms_norm_rstd": NORM,
    "rope": (Place(HEADS, TURNED),),
    "rope_one": (Place(HEADS, TURNED), Place({**HEADS, "head_dim": "turned"})),
    "router_linear": (Place({**ROWS, "hidden": "hidden", "experts": "experts"}, {"bias": Fact("router_bias")}),),
    "router_z_loss": LOGITS,
    "routing_map": (Place({**ROWS, "experts": "experts"}, {"slots": Fact("top_k")}, dtype=SINGLE),),
    # Of layers of linear attention, whose heads are as wide as these
    "rwkv_keys": (Place({**ROWS, "hidden": "attention"}, of("heads")),),
    "sample": (Place({**ROWS, "vocab": "vocab"}, {"top_k": True, "top_p": True}), Place({**ROWS, "vocab": "vocab"})),
    "scaled_mm": products(),
    "smooth_quantize": ACTIVATIONS,
    "softmax": (Place({**ROWS, "hidden": "experts"}), Place({**ROWS, "hidden": "vocab"})),
    "sort_chunks": (Place({**ROUTED, "hidden": "hidden"}),),
    # Out of a feed-forward network, for one token
    "sparse_mm": (Place({"tokens": "one", "hidden": "ffn", "columns": "hidden"}, fewer="ffn"),),
    "topk_routing": tuple(
        Place(
            {**ROWS, "experts": "experts"},
            {"most": Fact("top_k"), "bias": Fact("expert_bias"), "limited": False,
             **of("score", "order", "normalize", "scaling")},
            of("groups", "group_topk"), dtype=dtype,
        )
        for dtype in (SINGLE, "bfloat16")
    ),
    "transpose_pad": (
        Place({"tokens": "experts", "length": "expert_gate_up", "hidden": "hidden"}, fewer="experts"),
        Place({"tokens": "one", "length": "ffn", "hidden": "hidden"}),
    ),
    # Of drafts of eight tokens
    "tree_accept": (Place({**ROWS, "length": "eight"}),),
    "tree_bits": (Place({**ROWS, "length": "eight"}),),
}  # fmt: skip


# ---------------------------------------------------------------- calls


@dataclass(frozen=True)
class ModelCall:
    """One call of an op as models make it."""

    op: str
    dims: dict[str, int]
    options: dict[str, Any]
    arguments: dict[str, Any]
    dtype: str
    full: bool = False
    format: int | None = None  # of those that `formats` lists
    models: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """All that it is but the models: `topk_routing tokens=7 experts=256 float32 score=sigmoid …`."""
        words = [self.op, *(f"{n}={v}" for n, v in self.dims.items()), self.dtype]
        words += [f"{n}={_word(v)}" for n, v in sorted({**self.options, **self.arguments}.items())]
        words += ["full"] * self.full + ([] if self.format is None else [f"format={self.format}"])
        return " ".join(words)

    def __hash__(self) -> int:
        return hash(self.name)

    def source(self, op: Op, kind: type[Plain] = Blank, **settings: Any) -> Plain:
        return kind(op, self.dims, self.options, full=self.full, dtype=getattr(torch, self.dtype), **settings)

    def values(self, op: Op, source: Plain | None = None) -> dict[str, Any]:
        """The arguments, without memory or from a draw of this call."""
        if source is None:
            return dict(_blank_values(op, self))
        made = {**op.inputs(source), **self.arguments}
        if self.format is not None:
            made["out_format"] = formats(op, str(source.device))[self.format]
        return op.signature.bind((), made)

    def launches(self, op: Op, target: Target) -> list[Wanted]:
        """What it and its backward launch on a chip."""
        forward, backward = passes(op, Call(self.values(op)), target)
        return forward + backward


@lru_cache(maxsize=1024)  # a call is asked for its size, what it launches and what is new in that
def _blank_values(op: Op, call: ModelCall) -> dict[str, Any]:
    return call.values(op, call.source(op))


def _word(value: Any) -> str:
    return str(value).removeprefix("torch.").replace(" ", "")


def place_calls(
    op: Op,
    names: Iterable[str] | None = None,
    tokens: Sequence[int] = TOKENS,
    most: int | None = None,
    places: Sequence[Place] | None = None,
) -> list[ModelCall]:
    """The plain call of an op at each of its places in models, equal ones once. `most`: how many elements tensors may have in
    all, where a rank can hold fewer; `places`: others than those of the op's name."""
    found: dict[str, ModelCall] = {}
    for model, count in ((m, t) for m in (known() if names is None else names) for t in tokens):
        for place in PLACES.get(op.name, ()) if places is None else places:
            one = _placed(op, place, dict(known()[model]), count, most)
            if one is not None:
                before = found[one.name].models if one.name in found else ()
                found[one.name] = replace(one, models=tuple(dict.fromkeys((*before, model))))
    return list(found.values())


def _placed(op: Op, place: Place, model: Facts, tokens: int, most: int | None) -> ModelCall | None:
    """The call at one place in one model; None where the model has no such place."""
    there = facts(model, tokens)
    if not (set(place.dims.values()) <= there.keys() and all(there.get(n) for n in place.needs)):
        return None
    one = _plain(op, place, there)
    while most is not None and model.get(place.fewer, 0) > 1 and (size := elements(op, one)) > most:
        # Half of them makes no less than half the size, so that as many halves as divide it are too many still
        model[place.fewer] //= 2 ** min(max(1, (size // most).bit_length() - 1), model[place.fewer].bit_length() - 1)
        one = _plain(op, place, facts(model, tokens))
    return one


def _plain(op: Op, place: Place, there: Facts) -> ModelCall:
    def known_here(given: dict[str, Any]) -> dict[str, Any]:
        return {n: there[v.name] if isinstance(v, Fact) else v for n, v in given.items()}

    dims = {n: there[fact] for n, fact in place.dims.items()}
    return ModelCall(op.name, dims, known_here(place.options), known_here(place.arguments), place.dtype)


def others(op: Op, call: ModelCall) -> Iterator[ModelCall]:
    """The call with other optional arguments: all tensors, each one in or out, each other choice of an option, each format that
    its result can be had in. In the interpreter no format: `quantised` tries them at sizes that take it less long."""
    source = call.source(op)
    op.inputs(source)
    yield replace(call, full=True, options={n: v for n, v in call.options.items() if n not in source.optional})
    for name in source.optional:
        yield replace(call, options={**call.options, name: not source.options[name]})
    for name, choices in source.choices.items():
        if name not in call.options and name not in call.arguments:
            for choice in dict.fromkeys(choices):
                if choice != source.options[name]:
                    yield replace(call, options={**call.options, name: choice})
    for i, fmt in enumerate(() if INTERPRETING else formats(op, "meta")):
        if holds(op, fmt, call.values(op)):
            yield replace(call, format=i)


def reached(op: Op, call: ModelCall, target: Target = TARGETS["sm_90"]) -> frozenset:
    """The names of the compiled variants that a call and its backward need; in the interpreter, which compiles none, launches by
    their settings."""
    found = call.launches(op, target)
    return frozenset(map(settings, found) if INTERPRETING else (variant(one, target.arch).name for one in found))


def calls(
    op: Op,
    names: Iterable[str] | None = None,
    tokens: Sequence[int] = TOKENS,
    target: Target = TARGETS["sm_90"],
    most: int | None = None,
    places: Sequence[Place] | None = None,
) -> list[ModelCall]:
    """Every place's plain call, and of the others those that reach a variant which none before them does."""
    made = place_calls(op, names, tokens, most, places)
    sets = {reached(op, one, target): one for one in reversed(made)}  # calls with one set have others with one set
    seen: set = set().union(*sets)
    for one in reversed(sets.values()):
        for other in others(op, one):
            new = reached(op, other, target) - seen
            if new:
                seen |= new
                made.append(other)
    return made


def settings(wanted: Wanted) -> frozenset[tuple]:
    """Each constant and option of a launch with its value."""
    kernel = wanted.kernel
    pairs = [(n, v) for n, v in zip(kernel.names, wanted.ordered) if n in constants(kernel)]
    return frozenset((kernel.name, name, _word(v)) for name, v in (*pairs, *wanted.options.items()))


@cache
def constants(kernel: Kernel) -> frozenset[str]:
    """The compile-time arguments of a kernel."""
    given = inspect.signature(kernel.jit.fn).parameters.values()
    return frozenset(p.name for p in given if "constexpr" in str(p.annotation))


def covering(
    op: Op,
    some: Iterable[ModelCall],
    target: Target,
    seen: Iterable[tuple] = (),
    cost: Callable[[ModelCall, list[Wanted]], float] | None = None,
    most: float = 0.0,
) -> list[ModelCall]:
    """Of these calls those that set a constant of a kernel to a value which none before them did, nor `seen`; with a `cost`, the
    first of them and as many others as cost no more than `most` together. Which values stand together is left to `calls`."""
    reached_settings, made, total = set(seen), [], 0.0
    for one in some:
        launches = one.launches(op, target)
        new = frozenset().union(*map(settings, launches)) - reached_settings
        price = cost(one, launches) if new and cost is not None else 0.0
        if new and (not made or total + price <= most):
            reached_settings |= new
            total += price
            made.append(one)
    return made


def elements(op: Op, call: ModelCall, target: Target = TARGETS["sm_90"]) -> int:
    """How many elements the arguments and results have together or, where that is more, the tensors of one launch."""
    values = call.values(op)
    forward, backward, results = passes_and_results(op, Call(values), target)
    at_once = [(*values.values(), *results), *(wanted.ordered for wanted in forward + backward)]
    flat = [[t for v in given for t in (v if isinstance(v, (list, tuple)) else (v,))] for given in at_once]
    return max(sum(t.numel() for t in given if isinstance(t, Tensor)) for given in flat)


def digest(op: Op, call: ModelCall, target: Target) -> str:
    """Sixteen hexadecimal digits of the code that a call runs: they change with a kernel's text, constants or grid."""
    with pretend(target):
        return hashed(call.launches(op, target))


def programs(launches: Iterable[Wanted]) -> int:
    """How many programs launches have."""
    return sum(math.prod(one.kernel.grid(Arguments(zip(one.kernel.names, one.ordered)))) for one in launches)
