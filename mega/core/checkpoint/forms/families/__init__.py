"""Families of decoders in Hugging Face's format: one file per family, or for a few similar families.

family      the class for a family: keys of config.json, fixed option values, and tensor names (default: Llama's)
keys        classes for keys of config.json; rope, layers: keys that determine several options
decoders    the list of all families, and the choice of a family for exporting a model
gpt2, gpt_neox, gptj, llama, smollm3, granite, olmo, gemma, phi3, starcoder2, stablelm, mixtures
            the families, each with option values, keys and names. A new family is one new file and one line in the list
"""
