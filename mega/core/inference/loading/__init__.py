"""Load a model in any format, with its tokenizer, template and adapters, on ranks of any layout.

load       open a model without conversion, and load its weights into stages; find its tokenizer and chat template
same       comparison of the model between ranks
identity   check a tokenizer or template that differs from the model's
adapters   low-rank adapters that requests can select
pooling    read how a sentence-transformers model pools hidden states into vectors
"""
