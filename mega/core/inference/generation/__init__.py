"""`mega generate` and `mega chat`: texts by an engine that this process starts. It knows no HTTP.

chat          a conversation at the terminal
open_chat     a model opened to converse
prompts       prompts as given, from a file or as they are typed, and where the answers go
generate      texts of an engine
answer_file   answers that survive a kill
"""
