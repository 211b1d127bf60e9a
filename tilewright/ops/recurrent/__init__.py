"""Recurrences along sequences: linear attention, whose state decays, RWKV's keys, short causal convolutions; whole and by steps."""
