"""Adapters to PyTorch's own machinery: DTensor, selective checkpointing, the call of its attention."""

from .attention import scaled_dot_product_attention

__all__ = ["scaled_dot_product_attention"]
