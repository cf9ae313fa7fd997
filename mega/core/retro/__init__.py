"""From a corpus to a model that reads neighbours (Retro): its stages, each of blocks that can be built again alone.

stages     the database of chunks, their vectors, and the neighbours of a run's samples
embed      texts as vectors, by a BERT
index      an approximate index of the vectors, by faiss
search     the nearest of many vectors, exactly
retrieve   neighbours of texts that are continued or judged
database   the verbs: what is checked first, and which stages follow
options    what the verbs are given
"""
