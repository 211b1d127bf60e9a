"""Device functions that kernels share. They import `triton.language` alone."""
