"""From nothing to a trained model and its text: the first thing that a newcomer runs.

tour              its steps, each a command line; corpus: text that every machine has
unigram, verdict  what a model must beat, and what the trained one is worth
"""
