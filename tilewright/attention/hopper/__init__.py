"""Attention in Gluon for Hopper: a file a direction, one over caches of latents, and what they share."""
