"""Many tensors at once: norms, scaling, clipping of gradients."""
