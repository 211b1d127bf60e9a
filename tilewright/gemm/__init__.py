"""Matrix products: dense, of scaled codes, and grouped by expert."""
