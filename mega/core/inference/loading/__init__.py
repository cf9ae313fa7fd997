"""Weights of any form on ranks of any layout, with all that belongs to a model. It knows no engine.

load       a model opened in place and filled into stages; its tokenizer, its chat template, its ends
identity   what becomes of another tokenizer or template than the model's own
adapters   low-rank adapters that requests may name
pooling    how a folder of sentence-transformers pools states into vectors
"""
