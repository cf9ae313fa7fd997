"""Decoders with the names of Hugging Face's transformers: one file for each family, or for a few similar families.

family      defines a family, for both directions: keys of its config.json, fixed values, names of its tensors
            (default: Llama's)
keys        kinds of keys; rope, layers: keys that determine several options
decoders    the list of all families, and the choice of the family in which a model is written
gpt2, gpt_neox, gptj, llama, smollm3, granite, olmo, gemma, phi3, starcoder2, stablelm, mixtures
            families, each with its values, keys and names. A new family is one such file and its line in the list
"""
