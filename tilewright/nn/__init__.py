"""Layers: what holds parameters, over the ops. `tw.nn.Linear`, `tw.nn.FeedForward`, `tw.nn.MoEFeedForward`."""

from .expert_codes import quantize_experts
from .feed_forward import FeedForward
from .linear import Linear
from .linear_fp8 import linear_fp8_main_grad
from .moe import MoEFeedForward

__all__ = ["FeedForward", "Linear", "MoEFeedForward", "linear_fp8_main_grad", "quantize_experts"]
