"""Attention of decoders, by `attention`, through transformers' attention interface.

Layers ask their config which implementation they are to call, and the model asks it how to make masks for that. A patched model has
a *view* of its config, which differs from it in this one answer: the config itself stays as it is, for others may share it. Our
masks are no tensors [batch, 1, length, keys] but what arguments of `attention` say (`Mask`), wherever that is known.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention.attention import attention as op
from ...attention.cached import cached_attention
from .probe import PRODUCTS, UNRUN, Source, device_of, shallow, twin
from .projections import autocast_dtype
from .report import changed
from .roles import TRAINING, Count, Found, Skip, cast, compared_in_modes, ignore

NAME = "tilewright"  # of our implementation, in a config
ATTENDS = "_tilewright_attends"  # where an attention module keeps whom its calls are told
INTERFACE, EAGER = "ALL_ATTENTION_FUNCTIONS", "eager_attention_forward"  # what such a module's forward calls
DROPOUT, OTHER_KEYS = "dropout in training", "its mask is for another number of keys"
LEARNS = "its mask wants a gradient"
ALL = slice(None)
LARGEST = 2**20  # elements that a probe draws for one parameter
# Further arguments by which a layer asks for more than `attention` does
BEYOND = {
    "output_attentions": "output_attentions: its weights are asked for", "head_mask": "a head mask",
    "position_bias": "a bias by position",
}  # fmt: skip
Leave = Callable[[str], None]  # told why a call is left to the model's own code


# ---- masks ------------------------------------------------------------------------------------------------------------------


class Mask(NamedTuple):
    """What causal queries see, where transformers would have a mask. The last query stands at the last key, of those that there
    are: a static cache has room for more."""

    shape: tuple[int, int, int, int]  # batch, 1, length, keys
    window: int | None = None  # how many keys at most, a query's own included
    padding: Tensor | None = None  # bool [batch, keys]: which are there
    sequence: Tensor | None = None  # [batch, length]: which packed sequence a token is in, from 0 on, never falling
    marks: Tensor | None = None  # int32: where these begin and end, the rows of the batch one after the other
    filled: Tensor | None = None  # int32 [batch]: how many keys of a static cache there are, these queries' included

    @property
    def ndim(self) -> int:
        return 4

    def contiguous(self) -> Mask:
        return self

    def __getitem__(self, at: Any) -> Any:
        """A field, as of any tuple, or `mask[:, :, -n:, :]` of the last queries, where layers are asked for no others."""
        if not isinstance(at, tuple):
            return tuple.__getitem__(self, at)
        batch, _, length, keys = self.shape
        kept = range(length)[at[2]] if at[:2] + at[3:] == (ALL, ALL, ALL) and isinstance(at[2], slice) else None
        if kept is None or kept != range(length - len(kept), length):
            raise TypeError(f"'{Mask.__name__}' object has no elements, asked for {at}")
        if self.sequence is not None and len(kept) < length:  # these are as many as queries
            return self.dense(self.sequence.device)[at]
        return self._replace(shape=(batch, 1, len(kept), keys))

    def dense(self, device: torch.device) -> Tensor:
        """The mask that this stands for, bool."""
        batch, _, length, keys = self.shape
        i = torch.arange(keys - length, keys, device=device)[:, None]
        j = torch.arange(keys, device=device)
        if self.filled is not None:
            i = i + (self.filled[:, None, None, None] - keys)
        seen = (j <= i) if self.filled is not None else (j <= i)[None, None]
        if self.window is not None:
            seen = seen & (j > i - self.window)
        if self.padding is not None:
            seen = seen & self.padding[:, None, None]
        if self.sequence is not None:
            seen = seen & (self.sequence[:, None, :, None] == self.sequence[:, None, None, :])
        return seen.expand(batch, 1, length, keys)


class Kinds(NamedTuple):
    """transformers' functions of (batch, head, query, key) that we can say by arguments, by their code."""

    causal: Callable
    both: Any  # of which all must hold
    sliding: Any
    packed: Any
    within: Any  # another, of positions within packed sequences; None of a version that has none


def kinds() -> Kinds:
    from transformers import masking_utils as theirs

    made = [theirs.and_masks(), theirs.sliding_window_overlay(1), theirs.packed_sequence_mask_function(None)]
    within = getattr(theirs, "remap_positions_for_packed_sequence", lambda *_: None)
    return Kinds(theirs.causal_mask_function, *(code_of(f) for f in (*made, within(None, None))))


def code_of(function: Any) -> Any:
    return getattr(function, "__code__", None)


def said(function: Any, known: Kinds, packed: bool = False) -> dict[str, Any] | None:
    """Whether a mask function is `causal`, its `window` and its `sequence`; None of one that is more than these. `packed`: it
    counts within packed sequences alone, where positions are as far apart as tokens."""
    if function is known.causal:
        return {"causal": True}
    code = code_of(function)
    # Compilers cannot trace what a function holds
    if code is None or code not in known[1:] or torch.compiler.is_compiling():
        return None
    held, *more = (cell.cell_contents for cell in function.__closure__)
    if code is known.within:
        (inner,) = (part for part in (held, *more) if callable(part))  # the other holds positions
        return said(inner, known) if packed else None
    if code is known.sliding:
        return {"window": held}
    if code is known.packed:
        return {"sequence": held}
    made: dict[str, Any] = {}
    packed = packed or known.packed in map(code_of, held)
    for part in held:
        found = said(part, known, packed)
        if found is None or (made.keys() & found.keys()) - {"causal"}:
            return None
        made |= found
    return made


def mask_for(known: Kinds, **given: Any) -> Mask | Tensor:
    """transformers' interface of functions that make masks. What cannot be said otherwise is made a bool tensor."""
    padding, function = given.get("attention_mask"), given.get("mask_function")
    if isinstance(padding, Mask):  # a model within a model is given what was made before
        return padding
    found = None if function is None or given.get("use_vmap") else said(function, known)
    offset, length = given.get("q_offset"), given.get("q_length")
    # Of static caches the offset is a tensor, and old versions say neither
    whole = isinstance(offset, int) and offset + length == given["kv_offset"] + given["kv_length"]
    # Who wants no mask left out, without packing being the reason, works on the tensor
    wanted = not given.get("allow_is_causal_skip", True)
    # But of static caches transformers leaves out none, whoever asks
    if found == {"causal": True} and not whole and (not wanted or isinstance(offset, Tensor)):
        filled = filled_of(padding, given)
        if filled is not None:
            return Mask((given["batch_size"], 1, length, given["kv_length"]), filled=filled)
    if found is None or "causal" not in found or not whole or wanted and "sequence" not in found:
        from transformers.masking_utils import sdpa_mask

        return sdpa_mask(**{**given, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    batch, keys = given["batch_size"], given["kv_length"]
    if padding is not None:
        padding = padding[:, given["kv_offset"] : given["kv_offset"] + keys]
        padding = nn.functional.pad(padding, (0, keys - padding.shape[1]))
        # One question a forward, as transformers' own implementations ask it: most batches have no padding
        if not torch.compiler.is_compiling() and bool(padding.all()):
            padding = None
    sequence = found.get("sequence")
    marks = None if sequence is None else marks_of(sequence)
    return Mask((batch, 1, length, keys), found.get("window"), padding, sequence, marks)


def filled_of(padding: Tensor | None, given: dict[str, Any]) -> Tensor | None:
    """How many keys of a static cache there are, [batch], all of them from its first place on; None where that is not so, or may
    not be asked."""
    offset, batch, device = given.get("q_offset"), given["batch_size"], given.get("device")
    if torch.compiler.is_compiling() or not isinstance(given["kv_offset"], int) or given["kv_offset"] != 0:
        return None
    if isinstance(offset, int) and device is not None:
        offset = torch.full((1,), offset, dtype=torch.int32, device=device)
    if not isinstance(offset, Tensor) or offset.numel() != 1:
        return None
    filled = (offset + given["q_length"]).reshape(1).to(torch.int32).expand(batch)
    if padding is not None:  # asked once a forward, as for other caches
        there = torch.arange(padding.shape[1], device=padding.device) < filled.to(padding.device)[:, None]
        if not bool((padding.bool() | ~there).all()):
            return None
    return filled


def marks_of(sequence: Tensor) -> Tensor:
    """Where sequences [batch, length] begin and end if rows follow each other, [batch * length + 1]: as many as there may be, so
    that the host need not know how many there are. Where two are the same there is none."""
    batch, length = sequence.shape
    row = torch.arange(batch, device=sequence.device)[:, None] * length
    numbers = torch.arange(batch * length + 1, device=sequence.device)
    return torch.searchsorted((sequence + row).flatten(), numbers, out_int32=True)


# ---- calls ------------------------------------------------------------------------------------------------------------------


class Attends(NamedTuple):
    """Whom a module's calls are told."""

    count: Count
    leave: Leave


NOBODY = Attends(ignore, ignore)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention interface: heads [batch, heads, length, head_dim] to [batch, length, heads, head_dim], and weights,
    which are None. Calls that want more go to the module's own code."""
    count, leave = getattr(module, ATTENDS, NOBODY)
    reason = beyond(module, key, attention_mask, dropout, more)
    if reason is not None:
        leave(reason)
        given = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        more |= {name: value for name, value in given.items() if value is not None}
        function, mask = own_code(module, reason, attention_mask, query)
        return function(module, query, key, value, mask, scaling=scaling, dropout=dropout, **more)
    count("attention")
    dtype = autocast_dtype(query)
    q, k, v = (t.transpose(1, 2) for t in ((query, key, value) if dtype is None else cast(dtype, query, key, value)))
    given = {"scale": scaling, "softcap": softcap or 0.0, "sink": s_aux}
    if isinstance(attention_mask, Tensor):
        return op.function(q, k, v, mask=attention_mask, **given), None
    if attention_mask is None:
        return unmasked(module, q, k, v, sliding_window, more.get("is_causal"), given), None
    if attention_mask.filled is not None:
        return over_static_cache(q, k, v, attention_mask, given), None
    given |= {"causal": True, "left": None if attention_mask.window is None else attention_mask.window - 1}
    if attention_mask.sequence is not None:
        # The marks of whoever packed the batch are as many as there are sequences, ours as many as there may be
        given["cu_seqlens_q"], given["cu_seqlens_k"] = (
            attention_mask.marks if more.get(name) is None else more[name]
            for name in ("cu_seq_lens_q", "cu_seq_lens_k")
        )
        o = op.function(*(t.reshape(1, -1, *t.shape[2:]) for t in (q, k, v)), **given)
        return o.view(*q.shape[:3], -1), None
    mask = None if attention_mask.padding is None else attention_mask.padding[:, None, None]
    return op.function(q, k, v, mask=mask, **given), None


def over_static_cache(q: Tensor, k: Tensor, v: Tensor, mask: Mask, given: dict[str, Any]) -> Tensor:
    """A static cache is one page a sequence, of which the first keys are there; how many is read on the device. Where gradients are
    wanted, the mask is a tensor."""
    graded = (q, k, v) if given["sink"] is None else (q, k, v, given["sink"])
    if torch.is_grad_enabled() and any(t.requires_grad for t in graded):
        return op.function(q, k, v, mask=mask.dense(q.device), **given)
    return cached_attention.function(q, k, v, kv_len=mask.filled.to(q.device), causal=True, **given)[0]


def unmasked(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, window: int | None, causal: bool | None, given: dict[str, Any]
) -> Tensor:
    """What transformers means by no mask: causal, if the module is, and in a cache that is not full yet, over its first keys."""
    length = q.shape[1]
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if not causal or length == 1 and window is None:
        return op.function(q, k, v, **given)
    if length > 1:
        k, v = k[:, :length], v[:, :length]
    return op.function(q, k, v, causal=True, left=None if window is None else window - 1, **given)


def beyond(
    module: nn.Module, key: Tensor, mask: Mask | Tensor | None, dropout: float, more: dict[str, Any]
) -> str | None:
    """Why a call is not for `attention`, or None."""
    if more.get("cache") is not None:
        raise ValueError("attention: paged caches are not supported: unpatch the model, or leave this role out")
    config = getattr(module, "config", None)
    for name, reason in BEYOND.items():
        asked = more.get(name)
        if asked is not None and asked is not False or name == "output_attentions" and getattr(config, name, False):
            return reason
    if mask is not None and mask.shape[-1] != key.shape[2]:
        return OTHER_KEYS
    if isinstance(mask, Tensor) and mask.requires_grad and torch.is_grad_enabled():
        return LEARNS
    return DROPOUT if dropout else None


def own_code(
    module: nn.Module, reason: str, mask: Mask | Tensor | None, like: Tensor
) -> tuple[Callable, Tensor | None]:
    """The module's own attention, and its mask: SDPA, where that is its implementation and does this, or else eager."""
    own = getattr(getattr(module, "config", None), "_attn_implementation_internal", None)
    if own != "sdpa" or reason not in (DROPOUT, OTHER_KEYS, LEARNS):
        return inspect.unwrap(type(module).forward).__globals__[EAGER], added(mask, like)
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(mask, Mask):
        plain = all(part is None for part in mask[1:]) and mask.shape[2] == mask.shape[3]
        mask = None if plain else mask.dense(like.device)
    return sdpa_attention_forward, mask


def added(mask: Mask | Tensor | None, like: Tensor) -> Tensor | None:
    """What eager attention adds to its scores."""
    if isinstance(mask, Mask):
        mask = mask.dense(like.device)
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.finfo(like.dtype).min).to(like.dtype)


# ---- the role ---------------------------------------------------------------------------------------------------------------


@cache
def viewing(kind: type, own: str | None, name: str) -> type:
    """A class of configs whose attention implementation is `name` as long as it is `own` in the config itself. A copy of such a
    config is another; what is pickled is a config of the class itself, which is found by its name."""
    before = kind._attn_implementation

    def implementation(self: Any) -> str | None:
        now = before.fget(self)
        return name if now == own else now

    def copied(self: Any) -> Any:
        return sharing(type(self), dict(self.__dict__))

    def deeply_copied(self: Any, memo: dict) -> Any:
        memo[id(self)] = made = sharing(type(self), {})
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def reduced(self: Any, protocol: Any) -> Any:
        # By a protocol that names the class as an argument: later ones want it to be that of what is pickled
        return sharing(kind, self.__dict__).__reduce_ex__(1)

    view = property(implementation, before.fset)
    given = {"__copy__": copied, "__deepcopy__": deeply_copied, "__reduce_ex__": reduced, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {"_attn_implementation": view, **given})


def sharing(kind: type, attributes: dict[str, Any]) -> Any:
    """An instance whose attributes are these very ones."""
    made = object.__new__(kind)
    object.__setattr__(made, "__dict__", attributes)
    return made


def viewed(config: Any, name: str = NAME) -> Any:
    """A config that shares all its attributes with this one: whatever is set in either is set in both."""
    return sharing(viewing(type(config), config._attn_implementation, name), config.__dict__)


def register() -> None:
    """For `attn_implementation="tilewright"`, too, which chooses it in a config."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, partial(mask_for, kinds()))


def attends(module: nn.Module) -> bool:
    """Whether a module calls the attention interface with what its config says."""
    plain = inspect.unwrap(type(module).forward)
    names = plain.__code__.co_names if isinstance(plain, FunctionType) else ()
    return "config" in module.__dict__ and {INTERFACE, EAGER} <= {*names} and EAGER in plain.__globals__


def judged(module: nn.Module) -> Skip | str | None:
    """Why a module stays as it is, or what is not ours of it, or None."""
    if changed(module):
        return Skip("its forward was replaced before")
    if not getattr(module, "is_causal", False):
        return Skip("it is not causal")
    told: list[str] = []
    words = probed(module, told.append)
    if DROPOUT in told and (words is None or words.startswith(TRAINING)):
        return f"{DROPOUT}: that is left to its own code"
    if told and DROPOUT not in told:
        return Skip(f"it wants more: {told[0]}")
    if words is not None and f"'{Mask.__name__}' object" in words:
        return Skip("it works on its mask, as a tensor")
    return None if words is None else Skip(f"not attention: {words}", failed=UNRUN not in words)


class Attention:
    """The role, in one model. Modules that share a config share how masks are made, so that all of them are replaced or none."""

    def __init__(self, model: nn.Module, leave: Callable[[str, str], None]) -> None:
        self.model, self.leave = model, leave
        self.verdicts: dict[int, Skip | str | None] = {}  # by the id of a config
        self.views: dict[int, Any] = {}
        register()

    def __call__(self, name: str, module: nn.Module) -> Found | Skip | None:
        if not attends(module):
            return None
        config = module.config
        if id(config) not in self.verdicts:
            self.verdicts[id(config)] = self.verdict(config)
        verdict = self.verdicts[id(config)]
        if isinstance(verdict, Skip):
            return verdict
        return Found("attention", lambda count: self.changes(name, module, count), verdict)

    def verdict(self, config: Any) -> Skip | str | None:
        """What is judged of the modules of a config together."""
        less = None
        for name, module in self.model.named_modules():
            if attends(module) and module.config is config:
                found = judged(module)
                if isinstance(found, Skip):
                    return Skip(f"{found.reason} (at {name})", found.failed)
                less = less or found
        return less

    def changes(self, name: str, module: nn.Module, count: Count) -> list[tuple[nn.Module, str, Any]]:
        config = module.config
        own = [(module, ATTENDS, Attends(count, lambda reason: self.leave(name, reason)))]
        if id(config) in self.views:
            return own
        view = self.views[id(config)] = viewed(config)
        self.views[id(view)] = view  # which the other modules of this config have from now on
        self.verdicts[id(view)] = self.verdicts[id(config)]
        return [*own, *((m, "config", view) for m in self.model.modules() if m.__dict__.get("config") is config)]


# ---- its probe --------------------------------------------------------------------------------------------------------------


class Spread(nn.Module):
    """In the place of a linear layer: as many columns, without a weight."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs

    def forward(self, x: Tensor) -> Tensor:
        column = torch.arange(self.out_features, device=x.device)
        return torch.sin(x[..., column * 7 % self.in_features] + 0.37 * column)


def light(module: nn.Module, draw: Source) -> nn.Module:
    """A twin with random numbers for small parameters and stand-ins for linear layers."""
    children = {}
    for name, child in module._modules.items():
        sizes = [getattr(child, n, None) for n in ("in_features", "out_features")]
        linear = all(isinstance(n, int) for n in sizes)
        children[name] = None if child is None else Spread(*sizes) if linear else light(child, draw)
    large = next((n for n, p in module._parameters.items() if p is not None and p.numel() > LARGEST), None)
    if large is not None:
        raise ValueError(f"its {large} is too large to be drawn")
    parameters = {n: draw.tensor(*p.shape) for n, p in module._parameters.items() if p is not None}
    made = twin(module, parameters, children)
    made.__dict__["_parameters"] |= {n: None for n, p in module._parameters.items() if p is None}
    for name in ("forward", "_old_forward", "_hf_hook"):  # which would be those of the module itself
        made.__dict__.pop(name, None)
    return made


def arguments_of(module: nn.Module, draw: Source, length: int) -> list[dict[str, Any]]:
    """What a forward may be called with, beside its mask: widths of the tables of angles are tried."""
    taken = [*inspect.signature(type(module).forward).parameters.values()][1:]
    names, config = {p.name for p in taken}, module.config
    needed = {p.name for p in taken if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    unknown = needed - {"hidden_states", "position_embeddings", "position_ids", "attention_mask", "past_key_values"}
    if unknown or not {"hidden_states", "attention_mask"} <= names:
        return []
    given: dict[str, Any] = dict.fromkeys(needed)
    given |= {"hidden_states": draw.tensor(2, length, config.hidden_size)}
    if "position_ids" in names:
        given["position_ids"] = torch.arange(length, device=draw.device).expand(2, length)
    if "position_embeddings" not in names:
        return [given]
    head = getattr(module, "head_dim", None) or config.hidden_size // config.num_attention_heads
    widths = [getattr(module, "qk_rope_head_dim", None), head, head // 2, head // 4]
    tables = (draw.tensor(2, length, width) for width in dict.fromkeys(w for w in widths if w))
    return [{**given, "position_embeddings": (angles.cos(), angles.sin())} for angles in tables]


def probed(module: nn.Module, leave: Leave) -> str | None:
    """Why a layer does not compute the same by `attention` as by its own eager attention, or None."""
    draw, length = Source(device_of(module)), 7
    made = light(module, draw)
    there = torch.ones(2, length, dtype=torch.bool, device=draw.device)
    there[1, 2] = False
    sequence = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]], device=draw.device)
    shape = (2, 1, length, length)
    masks = [Mask(shape, 4, there), Mask(shape, None, None, sequence, marks_of(sequence))]
    forward, tried = type(module).forward, []

    for given in arguments_of(module, draw, length):

        def run(self: nn.Module, x: Tensor, name: str, given: dict[str, Any] = given) -> Tensor:
            copy = shallow(self)
            copy.__dict__ |= {"config": viewed(module.config, name), ATTENDS: Attends(ignore, leave)}
            ours = name == NAME
            made = [forward(copy, **{**given, "attention_mask": m if ours else added(m, x)}) for m in masks]
            return torch.cat([m[0] if isinstance(m, tuple) else m for m in made])

        words = compared_in_modes(
            lambda self, x, run=run: run(self, x, NAME), lambda self, x, run=run: run(self, x, "eager"),
            PRODUCTS, made, given["hidden_states"],
        )  # fmt: skip
        if words is None or UNRUN not in words:
            return words
        tried.append(words)
    return tried[0] if tried else f"{UNRUN}: it takes other arguments"
