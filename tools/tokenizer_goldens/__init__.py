"""Tokenizers trained on a small corpus, and the ids that transformers and llama.cpp give for them."""
