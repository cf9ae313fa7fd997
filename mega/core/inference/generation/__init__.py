"""Implement `mega generate` and `mega chat`, with an engine in this process. This package does not depend on HTTP.

chat          a conversation at the terminal
open_chat     open a model for a conversation
prompts       read prompts from an option, from a file or from the terminal, and write answers
generate      generate tokens with an engine
answer_file   a file of answers that a killed run can resume
"""
