"""Build the database from which a Retro model reads neighbours, in stages of blocks that can be rebuilt separately.

stages     the database of chunks, their vectors, and the neighbours of a run's samples
embed      embed texts with a BERT
index      an approximate index of the vectors, made with faiss
search     exact search for the nearest vectors
retrieve   neighbours of texts during generation and evaluation
database   the subcommands: checks, and the sequence of stages
options    option sections of the subcommands
"""
