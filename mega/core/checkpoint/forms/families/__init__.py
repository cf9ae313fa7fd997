"""Decoders as Hugging Face's transformers names them: one file for each family, or for a few that differ by a value.

family      the definition of a family: keys of its config.json, fixed values, names of its tensors (by default
Llama's);
            used in both directions
keys        kinds of keys; rope, layers: keys that determine several options
decoders    the one list of families, and the choice of the family that a model is written as
gpt2, gpt_neox, gptj, llama, smollm3, granite, olmo, gemma, phi3, starcoder2, stablelm, mixtures
            families: rows of values, of keys and of names. A new family is one such file and its line in the list
"""
