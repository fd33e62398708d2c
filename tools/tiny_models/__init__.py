"""Tiny random Mixture-of-Experts checkpoints and the logits transformers gives for them."""
