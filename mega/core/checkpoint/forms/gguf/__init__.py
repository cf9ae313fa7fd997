"""Read and write GGUF, llama.cpp's format: one file of metadata, tokenizer, chat template and tensors, which may be
quantized in blocks.

    families    models that llama.cpp supports: metadata to keys of config.json and back, tensor names
    header      checks that a file contains the items that its header lists, before objects are created
    opening reads a file's weights in place; converts quantized blocks to fp32
    saving      writes a file in fp32, fp16, bf16 or blocks of 8 bits (Q8_0)
    vocabulary  converts a file's tokenizer to a tokenizer.json and back

The `gguf` library, which is imported when a file is opened, reads and writes the container and the blocks.
"""
