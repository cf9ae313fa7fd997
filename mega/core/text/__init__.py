"""Text as tokens: the kinds of tokenizer. It knows no model and no ranks.

tokenizer, build     what a tokenizer is, and the one place where a kind becomes an object
gpt2, llama3, huggingface, sentencepiece, wordpiece, fairseq, yuan, null   the kinds, by the file that they read
fast, words, sentencepiece_bpe, probes   the same ids faster, where texts prove it; sentencepiece_json: for transformers
train, options       a vocabulary from one's own texts, and its section
special, neighbours  tokens that stand by name, and what small files say of them
identity             what becomes of a tokenizer other than the one that belongs to weights
sentences, detokenize   texts cut and mended before they are tokens
probe, protobuf      files of others, read within limits

chat                 conversations by the template of a model, in a room of its own
"""
