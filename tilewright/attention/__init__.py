"""Attention: softmax over keys, dense and packed, forward and backward, and the merging of its parts."""
