"""Conversations as tokens, by the template of a model. It knows tokenizers only as what encodes a text.

messages        conversations as files and requests have them
templates       the built-in ones, and where folders of models store theirs
format          a conversation as tokens, and which of them are trained on
turns           where the assistant's turns are in a rendered conversation
jinja_process   foreign templates, rendered in a sandbox
"""
