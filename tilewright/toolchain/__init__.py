"""Triton without a GPU: its interpreter corrected and strict, chips emulated, kernels compiled ahead of time."""
