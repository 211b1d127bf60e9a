"""Megatron's experts as two grouped products with a gated unit between them, for the rows that a dispatcher has grouped.

    h = x @ weight1[e].T;  y = glu(h, scale=probs) @ weight2[e].T    for the rows of expert e

weight1 is [experts, 2 * ffn, hidden], gate rows first, weight2 [experts, hidden, ffn], ffn being this tensor-parallel rank's part:
as elsewhere in Megatron, what leaves weight2 is summed over these ranks by the dispatcher. Counts of tokens stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu, _initialize_affine_weight_gpu
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes as mark_parallel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from ...nn.expert_codes import KeepsCodes, KeptCodes
from ...nn.experts import moe_feed_forward
from ...ops.activation.glu import glu
from ...ops.moe.grouped_mm import grouped_mm
from ...runtime.accumulate import placeholder

ACTIVATIONS = {F.silu: "silu", F.gelu: "gelu_erf", F.relu: "relu", torch.sigmoid: "sigmoid"}
# What a config must have, and what it is where a version does not know it.
WANTED = {
    "gated_linear_unit": True, "add_bias_linear": False, "moe_latent_size": None, "glu_linear_offset": 0.0,
    "moe_mlp_glu_interleave_size": None, "fp4": None,
}  # fmt: skip


class GroupedMLP(KeepsCodes, MegatronModule):
    """The experts of one rank, for `MoELayer`; a gated unit, without biases.

    With `config.fp8 = "e4m3"` and `fp8_recipe = "blockwise"` all products are of FP8 codes. Weights are quantised once a forward,
    whose backward has the same codes; in training, where Megatron's schedule says which micro-batch of a step is the first, once
    a step. With `disable_parameter_transpose_cache` none are kept, and each forward and each backward makes its own.
    `gradient_accumulation_fusion` adds weight gradients to `main_grad` in the launch of the product, and `delay_wgrad_compute`
    leaves them to `backward_dw`; neither is for FP8. Checkpoints have the keys and shards of `SequentialMLP`.
    """

    def __init__(
        self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None, name: str | None = None
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        check(config)
        self.num_local_experts, self.name = num_local_experts, name
        self.ep_group, self.tp_group, self.dp_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        self.act, self.limit = ACTIVATIONS[config.activation_func], config.activation_func_clamp_value
        self.coded, self.codes = bool(config.fp8), KeptCodes()
        self.is_first_microbatch = False  # Megatron's schedules set it
        self.scheduled = False  # whether they ever did
        self.delays = bool(getattr(config, "delay_wgrad_compute", False))
        self.waiting: list[Callable[[], None]] = []
        self.hooks: list[Callable[[], None]] = []
        ffn, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.weight1 = self.parameter(2 * ffn, hidden, 0, config.init_method)
        self.weight2 = self.parameter(hidden, ffn, 1, config.output_layer_init_method)

    def parameter(self, rows: int, columns: int, axis: int, init_method: Callable) -> nn.Parameter:
        """The part of a parameter [experts, rows, columns] that this tensor-parallel rank has; ranks divide `axis` of a matrix."""
        config, ranks = self.config, self.tp_group.size()
        shape = [rows, columns]
        if shape[axis] % ranks:
            raise ValueError(f"GroupedMLP: moe_ffn_hidden_size must be a multiple of {ranks} ranks, got {shape[axis]}")
        shape[axis] //= ranks
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        made = torch.empty(self.num_local_experts, *shape, dtype=config.params_dtype, device=device)
        for one in made if config.perform_initialization else ():
            if config.use_cpu_initialization:
                _initialize_affine_weight_cpu(
                    one, rows, columns, shape[axis], axis, init_method, params_dtype=config.params_dtype,
                    rank=self.tp_group.rank(), world_size=ranks,
                )  # fmt: skip
            else:
                _initialize_affine_weight_gpu(one, init_method, partition_dim=axis, is_expert=True)
        weight = nn.Parameter(made)
        mark_parallel(weight, True, 1 + axis, 1)
        weight.allreduce = config.expert_model_parallel_size == 1
        if self.delays:
            weight.skip_backward_post_hook = True
        return weight

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        x, probs = permuted_local_hidden_states, permuted_probs
        if self.config.moe_apply_probs_on_input:
            x, probs = (x * probs.unsqueeze(-1)).to(x.dtype), None
        offsets = tokens_per_expert.to(x.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        if self.coded:
            expert = torch.searchsorted(offsets, torch.arange(x.shape[0], device=x.device), right=True, out_int32=True)
            scale = None if probs is None else probs.unsqueeze(-1)
            keep = "all" if torch.is_grad_enabled() else "input"
            given = {"act": self.act, "limit": self.limit, "precision": "fp8", "keep": keep}
            codes = self.weight_codes()
            y = moe_feed_forward.function(x, self.weight1, self.weight2, expert.unsqueeze(-1), scale, *codes, **given)
            return y, None
        h = Product.apply(x, self.weight1, offsets, self)
        act = glu.function(h, act=self.act, limit=self.limit, scale=probs)
        return Product.apply(act, self.weight2, offsets, self), None

    def weight_codes(self) -> tuple[Tensor | None, ...]:
        """The codes of both weights as `moe_feed_forward` takes them, or none for it to make them itself."""
        if self.config.disable_parameter_transpose_cache:
            return ()
        if self.is_first_microbatch:
            self.codes.clear()
            self.scheduled, self.is_first_microbatch = True, False
        # Who evaluates a model by hand after a step has no schedule that says so, and optimisers write past version counters
        self.codes.until_cleared = self.scheduled and self.training
        return *self.codes_of("weight1", self.weight1), *self.codes_of("weight2", self.weight2)

    # ---- gradients of weights ----------------------------------------------------------------------------------------------

    def weight_gradient(self, weight: Tensor, dy: Tensor, rows: Tensor, offsets: Tensor) -> Tensor | None:
        """The gradient of a weight, or what autograd is given instead where it was added to `main_grad`."""
        if not self.config.gradient_accumulation_fusion:
            return grouped_mm(dy, rows, offsets, transposed_a=True, out_dtype=weight.dtype)
        buffer = weight.main_grad
        grouped_mm(dy, rows, offsets, transposed_a=True, c=buffer, beta=1.0, out=buffer)
        return placeholder(weight)

    def add_gradient(self, weight: Tensor, *factors: Tensor) -> None:
        found = self.weight_gradient(weight, *factors)
        if not self.config.gradient_accumulation_fusion:
            weight.grad = found if weight.grad is None else weight.grad + found

    def backward_dw(self) -> None:
        """Compute the gradients that backward passes have left for later, in their order."""
        waiting, self.waiting = self.waiting, []
        with torch.no_grad():
            for add in waiting:
                add()
        for hook in self.hooks if self.delays else ():
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Keep `hook`, by which distributed data parallelism is told that a delayed gradient is there."""
        self.hooks.append(hook)

    # ---- checkpoints -------------------------------------------------------------------------------------------------------

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The shards under the keys of `SequentialMLP`. The halves of weight1 are apart, for each of them is divided by ranks."""
        alone = (metadata or {}).get("singleton_local_shards", False)
        made = {}
        for name, linear, axis, halves in (("weight1", "linear_fc1", 0, 2), ("weight2", "linear_fc2", 1, 1)):
            build = partial(self.shards, axis=axis, halves=halves, outer=sharded_offsets, prefix=prefix, alone=alone)
            made[f"{prefix}{name}"] = ShardedTensorFactory(
                f"{prefix}experts.{linear}.weight", getattr(self, name), build, merged, (0, 0, self.dp_group.rank())
            )
        return made

    @torch.no_grad()
    def shards(
        self, key: str, data: Tensor, replica_id: Any, flattened_range: None = None, *, axis: int, halves: int,
        outer: tuple, prefix: str, alone: bool,
    ) -> list:  # fmt: skip
        """The shard of each half or, with `alone`, those of its experts, each under a key of its own."""
        rank, ranks, first = self.tp_group.rank(), self.tp_group.size(), len(outer)
        options = {"replica_id": replica_id, "prepend_axis_num": first}
        made = []
        for i, part in enumerate(data.chunk(halves, 1)):
            if not alone:
                place = (first + 1 + axis, i * ranks + rank, halves * ranks)
                experts = (first, self.ep_group.rank(), self.ep_group.size())
                made.append(ShardedTensor.from_rank_offsets(key, part.contiguous(), *outer, experts, place, **options))
                continue
            half, start = ("_w", "_v")[i] if halves == 2 else "", self.ep_group.rank() * self.num_local_experts
            keys = [key.replace(f"{prefix}experts.", f"{prefix}experts.{start + e}.") + half for e in range(len(part))]
            place = (first + axis, rank, ranks)
            made.append(
                [
                    ShardedTensor.from_rank_offsets(k, t.contiguous(), *outer, place, **options)
                    for k, t in zip(keys, part)
                ]
            )
        return made


def merged(parts: list) -> Tensor:
    return torch.cat([torch.stack(part) if isinstance(part, list) else part for part in parts], 1)


def check(config: Any) -> None:
    for name, wanted in WANTED.items():
        if getattr(config, name, wanted) != wanted:
            raise ValueError(f"GroupedMLP: {name} must be {wanted}, got {getattr(config, name)}")
    if config.activation_func not in ACTIVATIONS:
        raise ValueError(
            f"GroupedMLP: activation_func must be silu, gelu, relu or sigmoid, got {config.activation_func}"
        )
    if config.recompute_granularity == "selective" and "moe_act" in (config.recompute_modules or ()):
        raise ValueError("GroupedMLP: recompute_modules must not have moe_act")
    if config.fp8 and (config.fp8 != "e4m3" or config.fp8_recipe != "blockwise"):
        raise ValueError(
            f"GroupedMLP: fp8 must be e4m3 with the blockwise recipe, got {config.fp8}, {config.fp8_recipe}"
        )
    later = config.gradient_accumulation_fusion or getattr(config, "delay_wgrad_compute", False)
    if config.fp8 and later:
        raise ValueError("GroupedMLP: fp8 goes without gradient_accumulation_fusion and delay_wgrad_compute")


class Product(torch.autograd.Function):
    """rows @ weight[e].T, whose weight gradient goes where the module says."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor, module: GroupedMLP) -> Tensor:
        ctx.save_for_backward(rows, offsets)
        ctx.weight, ctx.module = weight, module
        return grouped_mm(rows, weight, offsets, transposed_b=True)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        (rows, offsets), weight, module = ctx.saved_tensors, ctx.weight, ctx.module
        drows = grouped_mm(dy, weight, offsets) if ctx.needs_input_grad[0] else None
        dweight = None
        if ctx.needs_input_grad[1] and module.delays:
            module.waiting.append(partial(module.add_gradient, weight, dy, rows, offsets))
        elif ctx.needs_input_grad[1]:
            dweight = module.weight_gradient(weight, dy, rows, offsets)
        return drows, dweight, None, None
