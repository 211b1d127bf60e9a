"""Attention in Gluon for Hopper: a file a direction."""
