"""transformers: models patched in place, a callback for its `Trainer`, layers for the `kernels` package."""

from .patching import patch, unpatch

__all__ = ["patch", "unpatch"]
