"""Fused operations, one file each. `tilewright.catalogue()` declares them all."""
