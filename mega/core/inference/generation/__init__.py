"""`mega generate`: texts that continue prompts, by an engine that this process starts. It knows no HTTP.

prompts       prompts as given, from a file or as they are typed, and where the answers go
generate      texts of an engine
answer_file   answers that survive a kill
"""
