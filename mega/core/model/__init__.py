"""The computation of the model families. This package reads neither data nor files.

layer, mixers, residual, embedding   a layer, mixers (attention, feed-forward), the residual stream, embeddings
experts, router                      mixtures of experts, and their routers
stack, stage, forward                a pipeline stage, the options of a stage, and the context of a microbatch
ahead                                layers in the head that predict tokens after the next one
neighbours                           attention of a text to the neighbours retrieved for its chunks
decoder, bert, encoder_decoder       stages of the model families; retriever: decoders with attention to neighbours
objective, auxiliary                 objectives other than next-token prediction, and losses of layers
decode, decode_neighbours            one step of text generation with the layers above; decode_ahead: guess tokens
"""
