"""Decoders as Hugging Face's transformers names them: one file a family, or a few that differ by a value.

family      what a family is: keys of its config.json, values, names of its tensors (or else
            Llama's); both ways
keys        kinds of keys; rope, layers: keys that several options are read off
decoders    the one list of families, and which of them a model is written as
gpt2, gpt_neox, gptj, llama, smollm3, granite, olmo, gemma, phi3, starcoder2, stablelm, mixtures
            families: rows of values, of keys and of names. A new one is one such file and its line in the list
"""
