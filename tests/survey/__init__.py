"""Every language model that transformers can build small: patched, compared with its own code, and unpatched."""
