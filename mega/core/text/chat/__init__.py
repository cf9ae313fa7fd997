"""Encode conversations as tokens, with the chat template of a model. This package uses tokenizers only to encode texts.

messages        parse conversations from files and requests
templates       built-in templates, and templates in a model's folder
format          encode a conversation, and mark the tokens to train on
turns           locate the assistant's turns in a rendered conversation
jinja_process   render other templates in a sandbox
"""
