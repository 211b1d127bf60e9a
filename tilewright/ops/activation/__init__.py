"""Gated units, alone and with the product behind them, products with what an activation left, and what follows a product."""
