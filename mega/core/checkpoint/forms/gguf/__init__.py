"""GGUF, llama.cpp's form: one file of metadata, tokenizer, chat template and tensors, plain or in quantized blocks.

    families    models that llama.cpp supports: metadata to keys of a config.json and back, names of tensors
    header      checks that a file contains what its header announces, before any object is made of it
    opening     a file as weights that are read in place; quantized blocks are read as fp32
    saving      writes a file in fp32, fp16, bf16 or blocks of 8 bits (Q8_0)
    vocabulary  converts a file's tokenizer to a tokenizer.json and back

The gguf package, which is imported when a file is opened, reads and writes the container and the blocks.
"""
