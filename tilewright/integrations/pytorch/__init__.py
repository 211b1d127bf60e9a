"""Adapters to PyTorch's own machinery: DTensor, selective checkpointing."""
