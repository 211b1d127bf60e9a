"""DTensors as arguments: each rank computes its own part of the result, and nothing is sent.

An op's declaration names the dimensions of its arguments; a `Rule` names those of its results and says which may be sharded. On one
dimension of the mesh either all arguments are replicated, and all ranks do the same, or one dimension is sharded: then it is so
in every argument that has it, and the others are replicated. Results that have it are sharded on it; a result that has it not
is the sum of what the ranks have, `Partial`, and so is the gradient of an argument that has it not (a norm's weight, where tokens
are sharded). Every other placement raises: what has to be sent is for the caller to say, but for a few numbers of losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard

from ... import catalogue
from ...op import Op, upcast
from ...ops.rotary.qkv_split import local_heads

Dims = tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """Dimensions of the `results`, and which of all dimensions may be sharded: those `local`. "..." is every leading one.

    `arguments` has the dimensions of arguments where the declaration leaves them open. Sizes of one dimension may differ:
    "heads/q" and "heads/k" are sharded together; `sizes` has those that no argument has. Arguments in `once` are added to what
    is a sum over ranks if it is one, and must then be absent. `mean` is the argument over whose rows the first result is a
    mean. Arguments in `summed`, a few numbers, may be `Partial`, and are then summed over ranks. `advice` is for who shards a
    dimension that is not local."""

    results: tuple[str, ...]
    local: tuple[str, ...] = ("...",)
    arguments: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    once: tuple[str, ...] = ()
    mean: str | None = None
    summed: tuple[str, ...] = ()
    advice: Mapping[str, str] = field(default_factory=dict)


def of_glu(a: Mapping[str, Any]) -> Rule:
    """The rule of `glu`: gate and up in one tensor are far apart in its last dimension, which therefore is not sharded, and
    groups of rows are counted over all ranks."""
    local = () if a["offsets"] is not None else ("...",) if a["up"] is None else ("...", "width")
    return Rule(("... width",), local)


def of_glu_linear(a: Mapping[str, Any]) -> Rule:
    if a["up"] is None:  # as in `of_glu`
        return Rule(("... columns",), ("...", "columns"))
    weight = {"weight": "columns width", "weight_codes": "columns width", "weight_codes_t": "width columns"}
    return Rule(("... columns",), ("...", "columns", "width"), weight, once=("bias",))


PARALLEL = {"vocab": "pass its to_local() to parallel_cross_entropy"}


def of_loss(*results: str) -> Callable[[Mapping[str, Any]], Rule]:
    return lambda a: Rule(("..." if a["reduction"] == "none" else "", *results), advice=PARALLEL)


def of_experts(a: Mapping[str, Any]) -> Rule:
    """The rule of the experts' feed-forward, whose capacity is that of all ranks together."""
    return Rule(("tokens hidden",), ("tokens",) if a["capacity"] is None else ())


DIMENSIONS = {"b": "batch", "s": "length", "d": "size"}


def of_rope(heads: Mapping[str, str], results: tuple[str, ...]) -> Callable[[Mapping[str, Any]], Rule]:
    """The rule of a rotary op whose arguments have these `heads`; `results` names the argument that each result is like."""

    def rule(a: Mapping[str, Any]) -> Rule:
        dims = {n: " ".join({**DIMENSIONS, "h": own}[letter] for letter in a["layout"]) for n, own in heads.items()}
        tables, local = rotary_dims(a, a[results[0]].shape[a["layout"].index("s")])
        return Rule(tuple(dims[r] for r in results), (*local, "heads"), {**dims, **tables})

    return rule


def rotary_dims(a: Mapping[str, Any], length: int) -> tuple[dict[str, str], tuple[str, ...]]:
    """(the dimensions of the angles, which of batch and length may be sharded)."""
    tables = next((a[n] for n in ("freqs", "cos") if a[n] is not None), None)
    # A part of the sequence has the same part of the angles, unless its positions are others
    whole = a["cu_seqlens"] is None and a["cp_size"] == 1 and (tables is None or tables.shape[-2] == length)
    rows = "length" if whole else "positions"
    if tables is not None and tables.dim() == 3:
        rows = f"{'tables' if tables.shape[0] == 1 else 'batch'} {rows}"
    return dict.fromkeys(("freqs", "cos", "sin"), f"{rows} angles"), ("batch", "length") if whole else ("batch",)


def of_qkv(a: Mapping[str, Any]) -> Rule:
    """The rule of `qkv_split`: a part of the columns is whole groups of heads if these are packed together and each rank has
    as many."""
    qkv, outer = a["qkv"], "length batch" if a["transposed"] else "batch length"
    H, KV = local_heads(qkv, a["heads"], a["kv_heads"], a["head_dim"])
    tables, local = rotary_dims(a, qkv.shape[0 if a["transposed"] else 1])
    if a["packing"] == "grouped" and KV % ranks_along(qkv, 2) == 0:
        local = (*local, "heads")
    results = [f"batch length heads/{name} head_dim" for name in "qkk"]
    return Rule(tuple(results), local, {"qkv": f"{outer} heads/qkv", **tables}, {"heads/q": H, "heads/k": KV})


def ranks_along(t: Tensor, dim: int) -> int:
    """How many ranks share a dimension."""
    mesh = zip(t.device_mesh.shape, t.placements) if isinstance(t, DTensor) else ()
    return math.prod(size for size, placement in mesh if placement == Shard(dim))


def of_gated_norm(a: Mapping[str, Any]) -> Rule:
    rows = "length batch hidden" if a["transposed"] else "batch length hidden"
    return Rule((rows,), ("batch", "length"), {"gate": rows})


RULES: dict[str, Rule | Callable[[Mapping[str, Any]], Rule]] = {
    "rms_norm": Rule(("... hidden",)),
    "rms_norm_rstd": Rule(("... hidden", "...")),
    "add_rms_norm": Rule(("... hidden", "... hidden")),
    "rms_norm_router": Rule(("... hidden", "... experts")),
    "gated_group_norm": of_gated_norm,
    "glu": of_glu,
    "glu_linear": of_glu_linear,
    "glu_linear_fp8": of_glu_linear,
    "rope": of_rope({"q": "heads/q", "k": "heads/k"}, ("q", "k")),
    "rope_one": of_rope({"x": "heads"}, ("x",)),
    "mla_rope": of_rope({"q": "heads", "kv": "heads", "k_pos": "one"}, ("q", "kv", "kv")),
    "qkv_split": of_qkv,
    "embedding": Rule(("... hidden",), ("...", "hidden")),
    "cross_entropy": of_loss(),
    "cross_entropy_lse": of_loss("..."),
    "cross_entropy_parts": Rule(("... numbers",), advice=PARALLEL),
    "cross_entropy_join": Rule(("tokens",), ("tokens",)),
    "linear_cross_entropy": of_loss(),
    "router_z_loss": Rule(("",), mean="logits"),
    "load_balancing_loss": Rule(("",), mean="logits", summed=("counts",)),
    "matmul": Rule(("... columns",), ("...", "columns", "inner")),
    "linear_fp8": Rule(("... columns",), ("...", "columns", "hidden"), once=("bias",)),
    "router_linear": Rule(("... experts",), ("...", "experts")),
    "topk_routing": Rule(("... slots", "... slots", "experts")),
    "routing_map": Rule(("... experts", "... experts")),
    "moe_feed_forward": of_experts,
    "hadamard": lambda a: Rule(("... hidden",), ("...",) if a["dim"] == -1 else ("hidden",)),
    "transpose_pad": Rule(("... hidden padded",), ("...", "hidden")),
}


def register() -> None:
    """Let the ops of `RULES` take DTensors, and the others say that they do not, from now on and in the whole process."""
    for name, op in catalogue().items():
        if name in RULES:
            op.sharded = taking(op, RULES[name])
        elif op.sharded is None:
            op.sharded = refusing(op)


def refusing(op: Op) -> Callable[..., Any]:
    def sharded(**values: Any) -> Any:
        raise NotImplementedError(
            f"{op.name}: there is no rule for DTensors: pass their to_local(), for what this rank has, or full_tensor()"
        )

    return sharded


def taking(op: Op, rule: Rule | Callable[[Mapping[str, Any]], Rule]) -> Callable[..., Any]:
    def sharded(**values: Any) -> Any:
        if not torch.compiler.is_compiling():  # there the local op's fake does
            op.signature.validate(values)
        return run(op, rule if isinstance(rule, Rule) else rule(values), values)

    return sharded


def run(op: Op, rule: Rule, values: Mapping[str, Any]) -> Any:
    """The op of local tensors, its results as DTensors."""
    tensors = {n: values[n] for n in op.signature.tensors if values[n] is not None}
    mesh = mesh_of(op, tensors, values)
    tensors |= {n: reduced_over_ranks(tensors[n]) for n in rule.summed}
    leading, dims = named(op, rule, tensors)
    split = [sharded_on(op, rule, tensors, dims, i) for i in range(mesh.ndim)]
    reduced = [key for key in split if key is not None and not all(has(expand(r, leading), key) for r in rule.results)]
    if reduced and any(n in tensors for n in rule.once):
        raise ValueError(f"{op.name}: {rule.once[0]} would be added on every rank: add it to the reduced result")

    local = {n: t.to_local(grad_placements=placements(dims[n], split)) for n, t in tensors.items()}
    total = None
    if reduced and values.get("reduction") == "mean":
        local["reduction"], total = "sum", weight_of_labels({**values, **local}, mesh, split)
    whole = None if rule.mean is None or not reduced else tensors[rule.mean].numel()
    if whole and not local[rule.mean].numel():
        made = upcast(local[rule.mean]).sum()  # the mean of no rows would be NaN
    else:
        made = op.function(**{**values, **local})
    single = isinstance(made, Tensor)
    made = [made] if single else [*made]
    if total is not None:
        made[0] = made[0] / total
    if whole:
        made[0] = made[0] * (local[rule.mean].numel() / whole)
    sizes = {name: size for n, t in tensors.items() for name, size in zip(dims[n], t.shape)} | {**rule.sizes}
    found = [distributed(t, expand(r, leading), sizes, mesh, split) for t, r in zip(made, rule.results)]
    return found[0] if single else tuple(found)


def mesh_of(op: Op, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> DeviceMesh:
    """The mesh of all the tensors."""
    for name in ("out", "out_format"):
        if values.get(name) is not None:
            raise ValueError(f"{op.name}: {name} is not for DTensors: pass their to_local()")
    plain = next((n for n, t in tensors.items() if not isinstance(t, DTensor)), None)
    if plain is not None:
        raise TypeError(f"{op.name}: {plain} is a plain tensor beside DTensors: make it one with distribute_tensor")
    first, *others = tensors
    mesh = tensors[first].device_mesh
    other = next((n for n in others if tensors[n].device_mesh != mesh), None)
    if other is not None:
        raise ValueError(f"{op.name}: {other} is on another mesh than {first}")
    return mesh


def reduced_over_ranks(t: DTensor) -> DTensor:
    return t.redistribute(placements=[Replicate() if p.is_partial() else p for p in t.placements])


def named(op: Op, rule: Rule, tensors: Mapping[str, Tensor]) -> tuple[int, dict[str, Dims]]:
    """(how many leading dimensions "..." stands for, the dimensions of each tensor)."""
    leading, dims = 0, {}
    for parameter in op.signature.parameters:
        name = parameter.name
        if name not in tensors:
            continue
        own = parameter.rule
        if name in rule.arguments:
            dims[name] = tuple(rule.arguments[name].split())
        else:
            if own.leading:
                leading = tensors[name].dim() - len(own.dims)
            dims[name] = expand(" ".join(("...", *own.dims) if own.leading else own.dims), leading)
    return leading, dims


def expand(dims: str, leading: int) -> Dims:
    made: list[str] = []
    for name in dims.split():
        made += [f"...{i}" for i in range(leading)] if name == "..." else [name]
    return tuple(made)


def key_of(name: str) -> str:
    return name.partition("/")[0]


def has(dims: Dims, key: str) -> bool:
    return any(key_of(name) == key for name in dims)


def sharded_on(op: Op, rule: Rule, tensors: Mapping[str, Tensor], dims: Mapping[str, Dims], axis: int) -> str | None:
    """The dimension that is sharded on this axis of the mesh, None if none is."""
    found: dict[str, str] = {}
    for n, t in tensors.items():
        placement = t.placements[axis]
        if type(placement) is Shard:
            found[n] = key_of(dims[n][placement.dim])
        elif not placement.is_replicate():
            raise ValueError(f"{op.name}: {n} is {placement!r} on mesh dimension {axis}: redistribute it first")
    if not found:
        return None
    first, key = next(iter(found.items()))
    words = f"dimension {key[3:]}" if key.startswith("...") else key
    if ("..." if key.startswith("...") else key) not in rule.local:
        advice = rule.advice.get(key, "redistribute it first")
        raise ValueError(f"{op.name}: {first} is sharded on {words}, of which each rank needs all: {advice}")
    for n, t in tensors.items():
        wanted = key if has(dims[n], key) else None
        if found.get(n) != wanted:
            should = "replicated" if wanted is None else f"sharded on {words} as {first} is"
            raise ValueError(f"{op.name}: {n} must be {should} on mesh dimension {axis}, is {t.placements[axis]!r}")
    return key


def placements(dims: Dims, split: list[str | None]) -> list[Placement]:
    """The placement of a result, or of a gradient, that has these dimensions."""
    keys = [key_of(name) for name in dims]
    return [Replicate() if key is None else Shard(keys.index(key)) if key in keys else Partial() for key in split]


def distributed(
    local: Tensor, dims: Dims, sizes: Mapping[str, int], mesh: DeviceMesh, split: list[str | None]
) -> DTensor:
    shape = [sizes[name] if key_of(name) in split else size for name, size in zip(dims, local.shape)]
    stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    if not shape:  # from_local takes an empty shape for one that was not given, and finds the same
        return DTensor.from_local(local, mesh, placements(dims, split), run_check=False)
    return DTensor.from_local(
        local, mesh, placements(dims, split), run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )


def weight_of_labels(a: Mapping[str, Any], mesh: DeviceMesh, split: list[str | None]) -> Tensor:
    """The number that a mean divides by, summed over all ranks: it is the one number that is sent."""
    labels, weight = a["labels"], a["weight"]
    vocab = a["logits"].shape[-1] if "logits" in a else weight.shape[0]
    own = (labels >= 0) & (labels < vocab) & (labels != a["ignore_index"])
    if "logits" in a and weight is not None:  # of the classes, not of a linear layer
        own = torch.where(own, upcast(weight)[labels.clamp(0, vocab - 1)], 0.0)
    return DTensor.from_local(own.sum(), mesh, placements((), split), run_check=False).full_tensor()
