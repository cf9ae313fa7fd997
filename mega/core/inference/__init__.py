"""Generation in any layout. The engine takes and gives token ids; generation and server put text around it.

start, capacity           an engine of a model on ranks, and what fits along with its weights
request, engine           what may be asked, and who answers
schedule, chunks, cache   which tokens a step computes, and which block of the cache holds which
step, relay, worker       a step as integers, on its way to all ranks, and a rank's share of it
paged_cache, graphs       keys and values in blocks, and recorded CUDA graphs
sampling, beam            from logits to tokens (temperature, top-k, top-p) and to beams
speculate, drafts         speculative decoding: tokens guessed ahead
embedding                 texts as vectors, by a BERT
retrieval                 neighbours that a model reads, looked for as chunks end
text_stream               tokens as text while they come, never half a character
options                   the sections of verbs that decode

loading                   weights, tokenizer, template and adapters of a model of any form
generation                `mega generate`: prompts, and the texts that continue them
server                    answers over HTTP
"""
