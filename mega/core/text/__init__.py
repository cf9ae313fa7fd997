"""Convert text to tokens with several kinds of tokenizers. This package does not depend on models or ranks.

tokenizer, build     the interface of tokenizers, and the builders of all kinds
gpt2, llama3, huggingface, sentencepiece, wordpiece, fairseq, yuan, null   the kinds of tokenizers, one per file format
fast, words, sentencepiece_bpe, probes   faster encoders, used if they produce the same ids on probe texts
sentencepiece_json   a SentencePiece model as a tokenizer.json for transformers
train, options       train a tokenizer on the user's texts; options of mega train-tokenizer
special, neighbours  token names in a text, and the small JSON files that describe tokens
kind                 the kind of a tokenizer that is given only by its files
identity             rules for tokenizers that differ from those of the weights or the token files
normalization        the information that a tokenizer's normalization loses
sentences, detokenize   split texts into sentences; undo the tokenization of published test sets
probe, protobuf      read a user's tokenizer files within limits

chat                 encode conversations with a model's template
"""
