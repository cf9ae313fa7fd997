"""The computation of the model families. This package reads neither data nor files.

layer, mixers, residual, embedding   one layer, its mixers (attention, feed-forward), the residual stream, embeddings
experts, router                      a mixture of experts, and its router
stack, stage, forward                layers as a pipeline stage, options of a stage, and the context of a microbatch
ahead                                layers in the head that predict tokens after the next one
neighbours                           attention of a text to the neighbours retrieved for its chunks
decoder, bert, encoder_decoder       the families as stages; retriever: decoders that read neighbours
objective, auxiliary                 training objectives other than the next token, and losses of layers
decode, decode_neighbours            the same layers for one step of text generation
"""
