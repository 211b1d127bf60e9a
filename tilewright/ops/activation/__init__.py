"""Gated units, alone and with the product behind them."""
