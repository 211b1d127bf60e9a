"""Recurrences along sequences: linear attention, whose state decays, and short causal convolutions; whole sequences, and steps."""
