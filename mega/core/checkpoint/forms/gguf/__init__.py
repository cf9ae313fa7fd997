"""GGUF, llama.cpp's form: one file of metadata, tokenizer, chat template and tensors, plain or in quantized blocks.

    families    which models llama.cpp has, their metadata as keys of a config.json and the reverse, names of tensors
    header      checks that a file contains what its header announces, before any object is made of it
    opening     a file as weights that are read in place; quantized blocks become fp32
    saving      a file in fp32, fp16, bf16 or blocks of 8 bits (Q8_0)
    vocabulary  its tokenizer as a tokenizer.json, and the reverse

The gguf package reads and writes the container and the blocks; it is imported when a file is opened.
"""
