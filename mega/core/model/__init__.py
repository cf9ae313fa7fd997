"""The mathematics of the model families. Knows neither data nor disk.

layer, mixers, residual, embedding   one layer, what its branches compute, the stream, and what comes before
experts, router                      a mixture of experts, and how its tokens choose them
stack, stage, forward                layers as a pipeline stage, what it is built with, and facts about a microbatch
ahead                                layers in the head that predict tokens after the next one
neighbours                           how a text attends to neighbours of its chunks
decoder, bert, encoder_decoder       the families as stages; retriever: decoders that read neighbours
objective, auxiliary                 other targets than the next token, and losses of layers
decode, decode_neighbours            the same layers, one step of continuing text
"""
