"""Train a small model from scratch and generate text with it, as the first run of a new user.

tour              the steps, each a command line; corpus: texts from Python's documentation and source
unigram, verdict  the baseline, and the evaluation of the trained model
"""
