"""Attention in Gluon for Hopper: a file a direction, and what they share."""
