"""Attention in Gluon for Hopper: the forward in `forward.py`, the backward in `backward.py`."""
