"""The demonstration: one small mixture-of-experts language model, trained with plain PyTorch and with tilewright."""
