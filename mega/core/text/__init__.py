"""Converts text to tokens with several types of tokenizers. This package does not depend on models or ranks.

tokenizer, build     the interface of a tokenizer, and the builders of all kinds
gpt2, llama3, huggingface, sentencepiece, wordpiece, fairseq, yuan, null   the kinds of tokenizers, one per file format
fast, words, sentencepiece_bpe, probes   faster engines, used if they encode probe texts to the same ids
sentencepiece_json   a SentencePiece model as a tokenizer.json for transformers
train, options       training of a tokenizer on the user's texts; options of mega train-tokenizer
special, neighbours  names of tokens in a text, and the small JSON files that describe tokens
identity             rules for a tokenizer that differs from that of the weights or the token files
normalization        what a tokenizer's normalization loses of a text
sentences, detokenize   splitting of texts into sentences, and removal of the spacing in published test sets
probe, protobuf      reading of a user's tokenizer files within limits

chat                 encoding of conversations with a model's template
"""
