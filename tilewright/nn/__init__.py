"""Layers: what holds parameters, over the ops. `tw.nn.FeedForward`, `tw.nn.MoEFeedForward`."""

from .expert_codes import quantize_experts
from .feed_forward import FeedForward
from .moe import MoEFeedForward

__all__ = ["FeedForward", "MoEFeedForward", "quantize_experts"]
