"""Generate text in any parallel layout. The engine's inputs and outputs are token ids; `generation` and `server`
convert between ids and text.

start, capacity           start an engine on ranks; compute how many tokens fit into memory next to the weights
request, engine           the requests and events of an engine, and the engine itself
schedule, chunks, cache   choose the tokens that a step computes, and assign cache blocks to these tokens
step, relay, worker       a step encoded as integers, its transfer to all ranks, and each rank's share of it
paged_cache, graphs       keys and values in blocks, and captured CUDA graphs
sampling, beam            choose tokens from logits (temperature, top-k, top-p); beam search
speculate, drafts         speculative decoding: propose tokens from the text, or with a small model
ahead_drafts              speculative decoding with the model's own layers, which draft_worker runs on each rank
embedding                 embed texts with a BERT model
retrieval                 find the neighbours that a model with a retriever reads when a chunk ends
text_stream               convert tokens to text as they arrive, in complete characters
options                   option sections of the subcommands that generate text

loading                   load weights, tokenizer, template and adapters of a model in any format
generation                `mega generate` and `mega chat`
server                    answer requests over HTTP
"""
