"""GGUF, llama.cpp's form: one file of metadata, tokenizer, chat template and tensors, plain or in blocks of few bits.

    families    which models have a name there, their metadata as keys of a config.json and back, names of tensors
    header      what a file announces must be in it, before anything is made of it
    opening     a file as weights that are read in place; blocks of few bits become fp32
    saving      a file in fp32, fp16, bf16 or blocks of 8 bits (Q8_0)
    vocabulary  its tokenizer as a tokenizer.json, and back

The gguf package reads and writes the container and the blocks; it is imported when a file is opened.
"""
