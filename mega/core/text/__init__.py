"""Converts text to tokens with several kinds of tokenizers. This package does not depend on models or ranks.

tokenizer, build     the interface of a tokenizer, and the only place that constructs one
gpt2, llama3, huggingface, sentencepiece, wordpiece, fairseq, yuan, null   the kinds, by the file that they read
fast, words, sentencepiece_bpe, probes   faster engines, used if probe texts give the same ids
sentencepiece_json   a SentencePiece model as a tokenizer.json for transformers
train, options       train a vocabulary on the user's texts; options of mega train-tokenizer
special, neighbours  tokens that a text spells by name, and the small JSON files that describe tokens
identity             rules for a tokenizer that differs from that of the weights or the token files
sentences, detokenize   split texts into sentences, and undo the spacing of published test sets
probe, protobuf      read foreign tokenizer files within limits

chat                 conversations in the template of a model
"""
