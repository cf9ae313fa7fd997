"""Build the database from which a Retro model reads neighbours, in stages whose blocks can be rebuilt separately.

stages     the database of chunks, their vectors, and the neighbours of a run's samples
embed      embed texts with a BERT model
index      an approximate index of the vectors, made with faiss
search     exact search for the nearest vectors
retrieve   retrieve neighbours during generation and evaluation
database   the subcommands, with their checks and the sequence of stages
options    option sections of the subcommands
"""
