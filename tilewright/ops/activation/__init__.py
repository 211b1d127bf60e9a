"""Gated units, alone and with the product behind them, and what follows a product."""
