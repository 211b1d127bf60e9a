"""Cross entropy: of logits, of a head that makes them, over several processes."""
