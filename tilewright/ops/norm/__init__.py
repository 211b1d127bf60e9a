"""Norms over rows and over groups of columns."""
