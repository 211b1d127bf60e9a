"""Calls of Megatron-Core's functions and small models of its modules, on a CPU or a GPU, for what is to compute the same with ours.

Megatron wants a GPU in places that have nothing to do with what is computed; on a CPU these are answered here.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core")

MODULES = {
    "swiglu": "fusions.fused_bias_swiglu", "rope": "models.common.embeddings.rope_utils", "moe": "transformer.moe.moe_utils",
    "loss": "tensor_parallel.cross_entropy", "fused_loss": "fusions.fused_cross_entropy", "clip": "optimizer.clip_grads",
}  # fmt: skip
MODEL = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "gated_linear_unit": True,
    "activation_func": F.silu, "bias_activation_fusion": True, "normalization": "RMSNorm", "add_bias_linear": False,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "masked_softmax_fusion": False,
}  # fmt: skip
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_router_dtype": "fp32", "moe_z_loss_coeff": 1e-3,
    "moe_token_dispatcher_type": "allgather", "moe_ffn_hidden_size": 24,
}  # fmt: skip
LENGTH, VOCAB = 8, 96
ROUTER = {
    "router_linear",
    "topk_routing",
    "router_z_loss",
    "moe_permute",
    "moe_unpermute",
}  # the ops of a layer of experts
FP32 = 2e-6  # a few sums in another order


def module(name: str) -> ModuleType:
    return importlib.import_module(f"megatron.core.{MODULES.get(name, name)}")


@contextmanager
def ranks(device: str, store: dist.Store | None = None, rank: int = 0, world: int = 1, **sizes: int) -> Iterator[None]:
    """Megatron's process groups, of these `sizes`; without a `store` all are of this process."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", store=store or dist.HashStore(), rank=rank, world_size=world)
        module("parallel_state").initialize_model_parallel(**sizes)
        torch.compiler.set_stance("force_eager")  # Megatron compiles its small functions
        patch.setattr(module("moe"), "te_general_gemm", None, raising=False)  # 0.16 has no such name without TE
        random = module("tensor_parallel.random")
        if device == "cpu":
            patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
            patch.setattr(random.CudaRNGStatesTracker, "fork", lambda *_: nullcontext())
        else:
            random.model_parallel_cuda_manual_seed(0)
        yield
        torch.compiler.set_stance("default")
        module("parallel_state").destroy_model_parallel()
        dist.destroy_process_group()


# ---- functions -------------------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Of a call's arguments; where they are, in which dtype, with values that which dtype has. What is fp32 in Megatron always,
    is so here."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    values: torch.dtype = torch.float32
    tokens: int = 9
    hidden: int = 6
    head_dim: int = 8
    vocab: int = 11
    experts: int = 8

    def single(self, *shape: int, seed: int = 0, grad: bool = True) -> Tensor:
        return randn(*shape, seed=seed).to(self.device).requires_grad_(grad)

    def draw(self, *shape: int, seed: int = 0) -> Tensor:
        return randn(*shape, seed=seed).to(self.device, self.values).to(self.dtype).requires_grad_()

    def whole(self, *numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)

    def heads(self) -> Tensor:
        return self.draw(self.tokens, 2, 3, self.head_dim)

    def labels(self) -> Tensor:
        return (torch.arange(2 * self.tokens, device=self.device) % self.vocab).view(-1, 2)

    def angles(self, positions: int, columns: int, interleaved: bool = False) -> Tensor:
        half = torch.arange(positions)[:, None] * 0.3 ** torch.arange(columns // 2)
        both = half.repeat_interleave(2, -1) if interleaved else torch.cat([half, half], -1)
        return both.float()[:, None, None].to(self.device)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotary_config(**given: object) -> SimpleNamespace:
    names = ("apply_rope_fusion", "rotary_interleaved", "multi_latent_attention")
    return SimpleNamespace(**{**dict.fromkeys(names, False), "mrope_section": None, **given})


GROUP = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
GROUPS = {"num_groups": 4, "group_topk": 2, "score_function": "sigmoid"}


class Call(NamedTuple):
    """Which function, what it is given, which op it is to be."""

    function: str
    op: str
    given: Callable[[Sizes], tuple]
    named: Callable[[Sizes], dict[str, Any]] = lambda s: {}


CALLS = {
    "swiglu": Call("swiglu.bias_swiglu_impl", "glu", lambda s: (s.draw(s.tokens, 2, 2 * s.hidden), None)),
    "biased": Call(
        "swiglu.bias_swiglu_impl", "glu", lambda s: (s.draw(s.tokens, 2 * s.hidden), s.draw(2 * s.hidden, seed=1))
    ),
    "weighted": Call(
        "swiglu.weighted_bias_swiglu_impl", "glu",
        lambda s: (s.draw(s.tokens, 2 * s.hidden), None, s.single(s.tokens, 1, seed=1)),
    ),
    "rope": Call(
        "rope.apply_rotary_pos_emb", "rope_one",
        lambda s: (s.heads(), s.angles(s.tokens, s.head_dim // 2), rotary_config()), lambda s: {"mscale": 1.2},
    ),
    "pairs": Call(
        "rope.apply_rotary_pos_emb", "rope_one",
        lambda s: (s.heads(), s.angles(s.tokens, s.head_dim, True), rotary_config(rotary_interleaved=True)),
    ),
    "packed": Call(
        "rope.apply_rotary_pos_emb", "rope_one",
        lambda s: (s.draw(s.tokens, 3, s.head_dim), s.angles(s.tokens - 2, s.head_dim), rotary_config()),
        lambda s: {"cu_seqlens": s.whole(0, s.tokens // 3, s.tokens, dtype=torch.int32), "cp_group": GROUP},
    ),
    "loss": Call(
        "loss.vocab_parallel_cross_entropy", "cross_entropy", lambda s: (s.draw(s.tokens, 2, s.vocab), s.labels())
    ),
    "fused loss": Call(
        "fused_loss.fused_vocab_parallel_cross_entropy", "cross_entropy",
        lambda s: (s.draw(s.tokens, 2, s.vocab), s.labels(), dist.group.WORLD),
    ),
    "gating": Call(
        "moe.router_gating_linear", "router_linear",
        lambda s: (
            s.draw(s.tokens, 2, s.hidden), s.draw(s.experts, s.hidden, seed=1), s.draw(s.experts, seed=2), torch.float32,
        ),
    ),
    "z loss": Call("moe.z_loss_func", "router_z_loss", lambda s: (s.single(s.tokens, s.experts), 0.1)),
    "softmax": Call(
        "moe.topk_routing_with_score_function", "topk_routing", lambda s: (s.single(s.tokens, s.experts), 3),
        lambda s: {"scaling_factor": 2.5},
    ),
    "pre softmax": Call(
        "moe.topk_routing_with_score_function", "topk_routing", lambda s: (s.single(s.tokens, s.experts), 3, True)
    ),
    "sigmoid": Call(
        "moe.topk_routing_with_score_function", "topk_routing", lambda s: (s.single(s.tokens, s.experts), 4),
        lambda s: {**GROUPS, "expert_bias": s.single(s.experts, seed=1, grad=False)},
    ),
    "chunks": Call(
        "moe.sort_chunks_by_idxs", "sort_chunks",
        lambda s: (
            s.draw(s.tokens, s.hidden), s.whole(2, 0, s.tokens - 5, 3), s.whole(2, 3, 1, 0), s.single(s.tokens, seed=1)
        ),
    ),
}  # fmt: skip


def run(call: Call, sizes: Sizes) -> list[Tensor]:
    """Results that are tensors, and the gradients of all that learn."""
    where, name = call.function.split(".")
    given = call.given(sizes)
    made = getattr(module(where), name)(*given, **call.named(sizes))
    found = [t for t in (made if isinstance(made, tuple) else (made,)) if isinstance(t, Tensor)]
    sum(weighed(t, 9) for t in found if t.requires_grad).backward()
    return [*(t.detach() for t in found), *(t.grad for t in given if getattr(t, "grad", None) is not None)]


def weighed(t: Tensor, seed: int) -> Tensor:
    """A sum whose gradient is different everywhere, and is a bf16 number."""
    return (t.float() * randn(*t.shape, seed=seed).bfloat16().to(t.device)).sum()


def there_and_back(sizes: Sizes, padded: bool = False) -> list[Tensor]:
    """Rows of tokens to their experts and back, with and without probabilities, and the gradients."""
    moe = module("moe")
    x, logits = sizes.draw(sizes.tokens, sizes.hidden), sizes.single(sizes.tokens, sizes.experts, seed=1)
    probs, routing = moe.topk_routing_with_score_function(logits, 2)
    if padded:  # written into the same memory, which then has more experts for a token than were chosen
        routing = moe.pad_routing_map(routing, 4)
    rows, row_probs, order, *_ = moe.permute(x, routing, probs, num_out_tokens=int(routing.sum()))
    # As experts that differ: of equal rows a token's probabilities, whose sum is 1, have no gradient but rounding errors
    worked = rows * randn(rows.shape[0], 1, seed=2).to(rows)
    y = moe.unpermute((worked * row_probs[:, None]).to(x.dtype), order, x.shape)
    again = moe.unpermute(worked, order, x.shape, probs=probs, routing_map=routing)
    (weighed(y, 2) + weighed(again, 3)).backward()
    return [rows.detach(), row_probs.detach(), y.detach(), again.detach(), x.grad, logits.grad]


def close(found: list[Tensor], truth: list[Tensor], bar: float = FP32) -> None:
    """The same but for `bar`, of the largest value."""
    assert len(found) == len(truth) > 1
    for ours, theirs in zip(found, truth):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        scale = theirs.abs().amax().clamp(min=1e-9) if theirs.dtype.is_floating_point else 1
        assert ((ours.double() - theirs.double()).abs().amax() / scale).item() <= bar


# ---- models ----------------------------------------------------------------------------------------------------------------


def build(
    moe: bool, grouped: bool = False, dtype: torch.dtype = torch.float32, vocab: int = VOCAB, length: int = LENGTH, **sizes: Any
) -> nn.Module:  # fmt: skip
    given = {**MODEL, **(EXPERTS if moe else {}), **sizes, "params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    config = module("transformer").TransformerConfig(**given, moe_grouped_gemm=grouped)
    layer = module("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=grouped, normalization="RMSNorm"
    )
    torch.manual_seed(0)
    return module("models.gpt").GPTModel(config, layer, vocab, length, position_embedding_type="rope")


def step(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    """The loss of every token and all gradients."""
    vocab, length, device = model.vocab_size, model.max_sequence_length, next(model.parameters()).device
    ids = torch.randint(0, vocab, (2, length), generator=torch.Generator().manual_seed(seed)).to(device)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool, device=device), 1)[None, None]
    model.zero_grad()
    loss = model(ids, torch.arange(length, device=device).expand(2, length), mask, labels=ids)
    loss.mean().backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}


def state_of_groups(state: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """The weights of a model whose experts may be single ones, for one with these `names`, of grouped experts."""
    made = {key: value for key, value in state.items() if "_extra_state" not in key}
    for name in (n for n in names if n.endswith(("weight1", "weight2")) and n not in made):
        prefix, linear = name[: -len("weight1")] + "local_experts.", f"linear_fc{name[-1]}.weight"
        count = sum(key.startswith(prefix) and key.endswith(linear) for key in made)
        made[name] = torch.stack([made.pop(f"{prefix}{e}.{linear}") for e in range(count)])
    return made


# ---- core attention --------------------------------------------------------------------------------------------------------

GROUPS_OF_KEYS = 2  # for 4 heads of queries


def masks() -> Any:
    return module("transformer.enums").AttnMaskType


def core_config(**given: Any) -> Any:
    """A config without experts, of which some settings want TransformerEngine if they are given to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = module("transformer").TransformerConfig(
            **{**MODEL, "num_query_groups": GROUPS_OF_KEYS, "use_cpu_initialization": True}
        )
    for name, value in given.items():
        setattr(made, name, value)
    return made


def attending(
    kind: str = "causal",
    core: type | None = None,
    softmax_scale: float | None = None,
    way: str | None = None,
    **given: Any,
) -> Any:
    """A core attention: ours, or of the class `core`; `way` is how ranks that share sequences exchange them."""
    from tilewright.integrations.megatron.attention import CoreAttention

    torch.manual_seed(0)
    settings = {"softmax_scale": softmax_scale, **({} if way is None else {"cp_comm_type": way})}
    return (core or CoreAttention)(core_config(**given), 1, getattr(masks(), kind), "self", **settings)


def heads(length: int = LENGTH, keys: int = LENGTH, batch: int = 2) -> list[Tensor]:
    shapes = (length, batch, 4, 8), (keys, batch, GROUPS_OF_KEYS, 8), (keys, batch, GROUPS_OF_KEYS, 8)
    return [randn(*shape, seed=i) for i, shape in enumerate(shapes)]


def attend(core: Any, given: list[Tensor], *args: Any, weights: Tensor | None = None, **named: Any) -> list[Tensor]:
    """The result, and the gradients of heads and of what the module learns."""
    given = [t.detach().clone().requires_grad_() for t in given]
    made = core(*given, *args, **named)
    (made * (randn(*made.shape, seed=9) if weights is None else weights)).sum().backward()
    learned = [p.grad for p in core.parameters()]
    core.zero_grad()
    return [made.detach(), *(t.grad for t in given), *learned]
