"""The feed-forward layer of a transformer: y = down @ (act(gate) * up), [gate | up] = gate_up @ rms_norm(x)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.norm.rms_norm import rms_norm
from .expert_codes import KeepsCodes, KeptCodes
from .experts import moe_feed_forward


class Experts(KeepsCodes):
    """What the layers share: the weights of experts, their codes, and the call of `moe_feed_forward`."""

    hidden: int

    def __init__(self, act: str, limit: float | None, precision: str, keep: str) -> None:
        super().__init__()
        self.act, self.limit, self.precision, self.keep = act, limit, precision, keep
        self.codes = KeptCodes()

    def flat(self, x: Tensor) -> Tensor:
        """x [..., hidden] as [tokens, hidden]."""
        if x.shape[-1:] != (self.hidden,):  # of another width it would be other tokens
            raise ValueError(f"{type(self).__name__}: x must be [..., {self.hidden}], got {list(x.shape)}")
        return x.reshape(-1, self.hidden)

    def feed(self, x: Tensor, gate_up: Tensor, down: Tensor, **routed: Any) -> Tensor:
        """The experts' feed-forward of x [tokens, hidden], with the codes of the weights as long as they are the same."""
        given = {"act": self.act, "limit": self.limit, "precision": self.precision, "keep": self.keep, **routed}
        if not torch.is_grad_enabled():
            given["keep"] = "input"
        if self.precision == "fp8":
            for name, weight in (("gate_up", gate_up), ("down", down)):
                keys = f"{name}_codes", f"{name}_scale", f"{name}_codes_t"
                given |= dict(zip(keys, self.codes_of(name, weight)))
        return moe_feed_forward.function(x, gate_up, down, **given)


def parameter(*shape: int, device: Any, dtype: Any) -> nn.Parameter:
    """Weights of a linear layer, uniform within 1 / sqrt(its inputs), as torch has them."""
    made = torch.empty(shape, device=device, dtype=dtype)
    bound = 1 / math.sqrt(max(1, shape[-1]))
    return nn.Parameter(made.uniform_(-bound, bound))


class FeedForward(Experts):
    """RMS norm, two linear layers with a gated unit between them, and with `residual` the sum with what came in.

    Parameters: `norm` [hidden] (None without), `gate_up` [2 * ffn, hidden], the gate's rows first, `down` [hidden, ffn].
    `precision="fp8"` makes the products, those of the backward too, of FP8 codes; weights that learn are then quantised in each
    forward, others once (`KeptCodes`). `keep` is what is kept for the backward: "all" it needs, the first "product", or the
    "input", from which the rest is computed again.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        *,
        act: str = "silu",
        limit: float | None = None,
        norm: bool = True,
        eps: float = 1e-6,
        residual: bool = False,
        precision: str = "input",
        keep: str = "all",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(act, limit, precision, keep)
        self.hidden, self.ffn, self.eps, self.residual = hidden, ffn, eps, residual
        self.norm = nn.Parameter(torch.ones(hidden, device=device, dtype=dtype)) if norm else None
        self.gate_up = parameter(2 * ffn, hidden, device=device, dtype=dtype)
        self.down = parameter(hidden, ffn, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """y of x [..., hidden], in its dtype."""
        normed = x if self.norm is None else rms_norm.function(x, self.norm, self.eps)
        y = self.feed(self.flat(normed), self.gate_up.unsqueeze(0), self.down.unsqueeze(0))
        y = y.reshape(x.shape)
        return x + y if self.residual else y

    def extra_repr(self) -> str:
        return f"{self.hidden}, {self.ffn}, act={self.act}, precision={self.precision}, keep={self.keep}"
