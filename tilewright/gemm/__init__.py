"""Matrix products, dense and grouped by expert. `tilewright.catalogue()` declares them all."""
