"""Load a model in any format, with its tokenizer, template and adapters, on ranks of any layout.

load       open a model in place and fill stages; find its tokenizer, chat template and end tokens
identity   check a tokenizer or template that differs from the model's
adapters   low-rank adapters that requests can select
pooling    read how a sentence-transformers model pools hidden states into vectors
"""
