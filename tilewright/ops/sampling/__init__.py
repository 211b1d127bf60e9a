"""From logits to tokens: softmax, sampling, and the verification of drafts."""
