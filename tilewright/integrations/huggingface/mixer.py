"""Mixers that are recurrences: what their forwards call under the names that Qwen3-Next, Kimi Linear, Mamba-2 and their kin share,
by `linear_attention`, `causal_conv1d` and the steps of both. A mixer keeps its own forward, which sees ours under those names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.recurrent.causal_conv1d import causal_conv1d
from ...ops.recurrent.causal_conv1d_step import causal_conv1d_step
from ...ops.recurrent.linear_attention import linear_attention
from ...ops.recurrent.linear_attention_step import linear_attention_step
from .lightning import lightning
from .probe import PRODUCTS, UNRUN, Source, compared, device_of
from .roles import Count, Found, Skip, bound, ignore

ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}
PACKED = ("seq_idx", "cu_seqlens", "cu_seq_lens_q")  # by which sequences lie one after the other in a row
COLUMNS = "some calls: a decay of each column has no gradient"


def taken(*tensors: Tensor | None, gradient: bool, named: dict[str, Any]) -> bool:
    """Whether an op takes a call of these tensors, and of further arguments by name. None takes packed sequences, and one that has
    no `gradient` takes no call that autograd would record."""
    packed = any(named.get(name) is not None for name in PACKED)
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return not packed and (gradient or not recorded)


# ---- convolutions ----------------------------------------------------------------------------------------------------


def convolving(original: Callable, count: Count) -> Callable:
    def causal_conv1d_fn(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **named: Any
    ) -> Tensor:
        if activation not in ACTIVATIONS or not taken(hidden_states, weight, bias, gradient=True, named=named):
            return original(hidden_states, weight, bias, activation=activation, **named)
        count("causal_conv1d")
        made, _ = causal_conv1d.function(hidden_states.transpose(1, 2), weight, bias, act=ACTIVATIONS[activation])
        return made.transpose(1, 2)

    return causal_conv1d_fn


def convolving_step(original: Callable, count: Count) -> Callable:
    def causal_conv1d_update(
        hidden_states: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **named: Any,
    ) -> Tensor:
        spare, given = conv_state.shape[-1] - (weight.shape[1] - 1), (hidden_states, conv_state, weight, bias)
        one = hidden_states.dim() == 3 and hidden_states.shape[-1] == 1 and spare >= 0
        one = one and activation in ACTIVATIONS and hidden_states.dtype == conv_state.dtype
        if not one or not taken(*given, gradient=False, named=named):
            return original(*given, activation, **named)
        count("causal_conv1d_step")
        if spare:  # inputs that no tap reaches any more
            conv_state[..., :spare] = conv_state[..., 1 : spare + 1].clone()
        state, act = conv_state[..., spare:], ACTIVATIONS[activation]
        return causal_conv1d_step.function(hidden_states[..., 0], weight, bias, state, act=act)[..., None]

    return causal_conv1d_update


# ---- delta rules -----------------------------------------------------------------------------------------------------


def delta_rule(original: Callable, count: Count) -> Callable:
    """Of many tokens or of one, with a decay of each token or of each column: they take the same arguments."""

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **named: Any,
    ) -> tuple[Tensor, Tensor | None]:
        given = (query, key, value, g, beta, initial_state)
        if not taken(*given, gradient=g.dim() < 4, named=named):
            more = {"initial_state": initial_state, "output_final_state": output_final_state}
            return original(
                query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **more, **named
            )
        options = {"normalize": use_qk_l2norm_in_kernel}
        one = query.shape[1] == 1 and initial_state is not None and initial_state.dtype == torch.float32
        if one and taken(*given, gradient=False, named=named):
            # The forward's state is its cache's, over which it copies the new one: written there, that copies nothing
            count("linear_attention_step")
            now = (t[:, 0] for t in (query, key, value))
            o = linear_attention_step.function(*now, initial_state, g[:, 0], beta[:, 0], **options)
            return o[:, None], initial_state if output_final_state else None
        count("linear_attention")
        state = None if initial_state is None else initial_state.float()
        o, last = linear_attention.function(query, key, value, g, beta, state=state, **options)
        return o, last if output_final_state else None

    return rule


# ---- Mamba-2 ---------------------------------------------------------------------------------------------------------


def scanning(original: Callable, count: Count) -> Callable:
    def mamba2_chunk_scan(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_states: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        return_final_states: bool = False,
        **named: Any,
    ) -> Any:
        given = (hidden_states, dt, A, B, C, D, dt_bias, initial_states)
        if named.get("z") is not None or not taken(*given, gradient=True, named=named):
            more = {"D": D, "dt_bias": dt_bias, "initial_states": initial_states, "dt_softplus": dt_softplus}
            more |= {"dt_limit": dt_limit, "return_final_states": return_final_states}
            return original(hidden_states, dt, A, B, C, chunk_size, **more, **named)
        count("linear_attention")
        steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        steps = (nn.functional.softplus(steps) if dt_softplus else steps).clamp(*dt_limit).float()
        wide = hidden_states.float()
        state = None if initial_states is None else initial_states.float().transpose(2, 3)
        values = (wide * steps[..., None]).to(hidden_states.dtype)
        o, last = linear_attention.function(C, B, values, A.float() * steps, state=state, scale=1.0)
        o = o.float() if D is None else o.float() + D[..., None] * wide
        return (o, last.transpose(2, 3)) if return_final_states else o

    return mamba2_chunk_scan


def scanning_step(original: Callable, count: Count) -> Callable:
    def mamba2_selective_state_update(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **named: Any,
    ) -> Tensor:
        given = (state, hidden_states, dt, A, B, C, D, dt_bias, z)
        # Of a head all columns have one number, written once
        alike = not any(t.stride()[-n:] != (0,) * n for t, n in ((dt, 1), (A, 2)))
        alike = alike and (dt_bias is None or dt_bias.stride(-1) == 0)
        if not alike or state.dtype != torch.float32 or not taken(*given, gradient=False, named=named):
            more = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "z": z}
            return original(state, hidden_states, dt, A, B, C, **more, **named)
        count("linear_attention_step")
        steps = dt[..., 0] if dt_bias is None else dt[..., 0] + dt_bias[..., 0].to(dt.dtype)
        steps = (nn.functional.softplus(steps) if dt_softplus else steps).float()
        wide = hidden_states.float()
        values, decay = (wide * steps[..., None]).to(hidden_states.dtype), A[:, 0, 0].float() * steps
        o = linear_attention_step.function(C, B, values, state.transpose(2, 3), decay, scale=1.0).float()
        o = o if D is None else o + wide * D
        o = o if z is None else o * nn.functional.silu(z)
        return o.to(hidden_states.dtype)

    return mamba2_selective_state_update


def no_fused_scan(original: Callable, count: Count) -> Callable:
    """What there is for mamba-ssm's kernel alone: None says that the forward is to go on with the functions above."""
    return lambda *given, **named: None


# ---- probes ----------------------------------------------------------------------------------------------------------


class Replacement(NamedTuple):
    """What makes ours of the original, what arguments a probe draws, which of them, by place, a call changes, and whether
    each column has a decay, so that there is no gradient."""

    make: Callable[[Callable, Count], Callable]
    draw: Callable[[Source], tuple[tuple, dict[str, Any]]] | None = None
    writes: tuple[int, ...] = ()
    columns: bool = False


def drawn_convolution(draw: Source) -> tuple[tuple, dict[str, Any]]:
    return (draw.tensor(2, 6, 5), draw.tensor(6, 4), draw.tensor(6)), {"activation": "silu"}


def drawn_convolution_step(draw: Source) -> tuple[tuple, dict[str, Any]]:
    given = (draw.tensor(2, 6, 1), draw.tensor(2, 6, 4), draw.tensor(6, 4), draw.tensor(6))
    return given, {"activation": "silu"}


def drawn_rule(tokens: int, columns: bool) -> Callable[[Source], tuple[tuple, dict[str, Any]]]:
    def made(draw: Source) -> tuple[tuple, dict[str, Any]]:
        q, k, v = (draw.tensor(2, tokens, 2, width) for width in (8, 8, 6))
        gates = {"g": -draw.tensor(2, tokens, 2, *([8] if columns else [])).abs()}
        gates |= {"beta": draw.tensor(2, tokens, 2).sigmoid(), "initial_state": draw.tensor(2, 2, 8, 6)}
        return (q, k, v), {**gates, "output_final_state": True, "use_qk_l2norm_in_kernel": True}

    return made


def drawn_scan(draw: Source) -> tuple[tuple, dict[str, Any]]:
    given = (
        draw.tensor(2, 5, 4, 6),
        draw.tensor(2, 5, 4),
        -draw.tensor(4).exp(),
        *(draw.tensor(2, 5, 2, 8) for _ in "BC"),
    )
    named = {"chunk_size": 4, "D": draw.tensor(4), "dt_bias": draw.tensor(4), "initial_states": draw.tensor(2, 4, 6, 8)}
    return given, {**named, "dt_softplus": True, "dt_limit": (0.1, 2.0), "return_final_states": True}


def drawn_scan_step(draw: Source) -> tuple[tuple, dict[str, Any]]:
    A = (-draw.tensor(4).exp())[:, None, None].expand(4, 6, 8)
    given = (draw.tensor(2, 4, 6, 8), draw.tensor(2, 4, 6), draw.tensor(2, 4, 1).expand(2, 4, 6), A)
    named = {"D": draw.tensor(4, 1).expand(4, 6), "dt_bias": draw.tensor(4, 1).expand(4, 6), "dt_softplus": True}
    return (*given, draw.tensor(2, 2, 8), draw.tensor(2, 2, 8)), {**named, "z": draw.tensor(2, 4, 6)}


FUNCTIONS = {
    "causal_conv1d_fn": Replacement(convolving, drawn_convolution),
    "causal_conv1d_update": Replacement(convolving_step, drawn_convolution_step, (1,)),
    "torch_chunk_gated_delta_rule": Replacement(delta_rule, drawn_rule(5, False)),
    "torch_recurrent_gated_delta_rule": Replacement(delta_rule, drawn_rule(1, False)),
    "chunk_kimi_delta_attention": Replacement(delta_rule, drawn_rule(5, True), columns=True),
    "recurrent_kimi_delta_attention": Replacement(delta_rule, drawn_rule(1, True), columns=True),
    "mamba2_chunk_scan": Replacement(scanning, drawn_scan),
    "mamba2_selective_state_update": Replacement(scanning_step, drawn_scan_step, (0,)),
    "mamba2_split_conv1d_scan_combined": Replacement(no_fused_scan),
}
RECURRENCES = {name for name in FUNCTIONS if "conv1d" not in name}


def unlike(name: str, original: Callable, device: torch.device) -> str | None:
    """Why ours does not stand for a function, or None."""
    kind = FUNCTIONS[name]
    if kind.draw is None:
        return None
    given, named = kind.draw(Source(device))

    def calling(function: Callable) -> Callable[[Tensor], tuple]:
        def call(_: Tensor) -> tuple:
            taken = [t.clone() if i in kind.writes else t for i, t in enumerate(given)]
            copies = {n: t.clone() if n == "initial_state" else t for n, t in named.items()}
            made = function(*taken, **copies)
            return (*(made if isinstance(made, tuple) else (made,)), *(taken[i] for i in kind.writes))

        return call

    ours = kind.make(original, ignore)
    return compared(calling(ours), calling(original), PRODUCTS, given[0])


def mixer(name: str, module: nn.Module) -> Found | Skip | None:
    """A forward that calls global functions of such names, a recurrence among them; or MiniMax's, which has it written out."""
    forward = type(module).forward
    plain = inspect.unwrap(forward)
    if not isinstance(plain, FunctionType):
        return None
    called = [n for n in plain.__code__.co_names if n in FUNCTIONS]
    if not RECURRENCES.intersection(called):
        return lightning(name, module)
    originals = {n: plain.__globals__[n] for n in called}
    for n, original in originals.items():
        words = unlike(n, original, device_of(module))
        if words is not None:
            return Skip(f"{n} is not what it was taken for: {words}", failed=not words.startswith(UNRUN))

    def changes(count: Count) -> list[tuple[nn.Module, str, Any]]:
        ours = {n: FUNCTIONS[n].make(original, count) for n, original in originals.items()}
        # Without a __name__ torch.compile takes globals from this scope and not from the module of that name
        scope = {k: v for k, v in plain.__globals__.items() if k != "__name__"} | ours
        return [bound(module, decorated(forward, plain, copied(plain, scope, plain.__closure__)))]

    return Found("linear_attention", changes, COLUMNS if any(FUNCTIONS[n].columns for n in called) else None)


def copied(function: FunctionType, scope: dict[str, Any], closure: tuple[CellType, ...] | None) -> FunctionType:
    made = FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def decorated(forward: Callable, plain: Callable, made: Callable) -> Callable:
    """`made` under the decorators that `plain` has in `forward`: copies of these that hold it in the other's place."""
    if forward is plain:
        return made
    held = forward.__wrapped__
    inner = decorated(held, plain, made)
    cells = tuple(CellType(inner) if c.cell_contents is held else c for c in forward.__closure__ or ())
    if not any(c.cell_contents is inner for c in cells):
        raise ValueError(f"a decorator of {plain.__qualname__} does not hold what it decorates")
    return copied(forward, forward.__globals__, cells)
