"""Encodes conversations as tokens, with the chat template of a model. This package uses a tokenizer only to encode
texts.

messages        parsing of conversations from files and requests
templates       built-in templates, and templates in a model's folder
format          encoding of a conversation, and marks for the tokens to train on
turns           locations of the assistant's turns in a rendered conversation
jinja_process   rendering of other templates in a sandbox
"""
