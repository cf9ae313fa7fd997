"""Encodes conversations as tokens, with the chat template of a model. This package uses a tokenizer only to encode
texts.

messages        parse conversations from files and requests
templates       built-in templates; find the template in a model's folder
format          encode a conversation, and mark the tokens that are trained on
turns           locate the assistant's turns in a rendered conversation
jinja_process   render foreign templates in a sandbox
"""
