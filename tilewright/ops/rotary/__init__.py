"""Rotary positions, and the split of a joint projection into queries, keys and values."""
