"""Mixtures of experts: routing, the map from tokens to experts, and moving rows by it."""
