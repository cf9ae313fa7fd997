"""Train a small model from scratch and let it write text: the first run of a new user.

tour              the steps, each a command line; corpus: text that every machine has
unigram, verdict  the baseline, and the evaluation of the trained model
"""
