"""A mixture of experts: y[t] = sum over the k experts e that the router gives token t of probs[t, e] * expert_e(rms_norm(x[t]))."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.moe.moe_router import topk_routing
from ..ops.moe.router_linear import router_linear
from ..ops.moe.router_loss import load_balancing_loss, router_z_loss
from ..ops.norm.rms_norm import rms_norm
from .feed_forward import Experts, FeedForward, parameter


class MoEFeedForward(Experts):
    """RMS norm, router, and the feed-forward of the chosen experts, weighted and summed.

    Parameters: `norm` [hidden] (None without), `router` [experts, hidden], `gate_up` [experts, 2 * ffn, hidden], `down`
    [experts, hidden, ffn]; with `shared_ffn` a `FeedForward` of that size, `shared`, sees every token too. `score`, `groups`,
    `group_topk`, `normalize` and `scaling` are those of `topk_routing`; its bias is the buffer `bias` (None unless
    `balance_bias`), for whoever balances by it. `z_loss` and `balance_loss` are coefficients. `capacity` bounds the rows of all
    experts together; by default there is room for any routing. The rest is as in `FeedForward`.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        experts: int,
        topk: int,
        *,
        act: str = "silu",
        limit: float | None = None,
        norm: bool = True,
        eps: float = 1e-6,
        residual: bool = False,
        score: str = "softmax",
        normalize: bool = True,
        scaling: float = 1.0,
        groups: int = 1,
        group_topk: int = 1,
        balance_bias: bool = False,
        z_loss: float = 0.0,
        balance_loss: float = 0.0,
        shared_ffn: int | None = None,
        capacity: int | None = None,
        precision: str = "input",
        keep: str = "all",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(act, limit, precision, keep)
        self.hidden, self.ffn, self.experts, self.topk, self.eps = hidden, ffn, experts, topk, eps
        self.residual, self.capacity, self.z_loss, self.balance_loss = residual, capacity, z_loss, balance_loss
        self.score, self.normalize, self.scaling = score, normalize, scaling
        self.groups, self.group_topk = groups, group_topk
        made = {"device": device, "dtype": dtype}
        self.norm = nn.Parameter(torch.ones(hidden, **made)) if norm else None
        self.router = parameter(experts, hidden, **made)
        self.gate_up = parameter(experts, 2 * ffn, hidden, **made)
        self.down = parameter(experts, hidden, ffn, **made)
        self.register_buffer("bias", torch.zeros(experts, device=device) if balance_bias else None)
        self.shared = None
        if shared_ffn is not None:
            self.shared = FeedForward(
                hidden, shared_ffn, act=act, limit=limit, norm=False, precision=precision, keep=keep, **made
            )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(y, loss): y of x [..., hidden] in its dtype, and the sum of both router losses, fp32, 0 without."""
        flat = self.flat(x)
        normed = flat if self.norm is None else rms_norm.function(flat, self.norm, self.eps)
        logits = router_linear.function(normed, self.router)
        probs, chosen, counts = topk_routing.function(
            logits, self.topk, score=self.score, bias=self.bias, groups=self.groups, group_topk=self.group_topk,
            normalize=self.normalize, scaling=self.scaling,
        )  # fmt: skip
        y = self.feed(normed, self.gate_up, self.down, routing=chosen, probs=probs, capacity=self.capacity)
        if self.shared is not None:
            y = y + self.shared(normed)
        y = y.reshape(x.shape)
        return x + y if self.residual else y, self.losses(logits, counts)

    def losses(self, logits: Tensor, counts: Tensor) -> Tensor:
        loss = logits.new_zeros(())
        if self.z_loss:
            loss = loss + router_z_loss.function(logits, self.z_loss)
        if self.balance_loss:
            loss = loss + load_balancing_loss.function(logits, counts, self.balance_loss, score=self.score)
        return loss

    def extra_repr(self) -> str:
        sizes = f"{self.hidden}, {self.ffn}, experts={self.experts}, topk={self.topk}"
        return f"{sizes}, score={self.score}, precision={self.precision}, keep={self.keep}"
