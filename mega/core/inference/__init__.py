"""A model that answers: opened in any layout and asked by ids. It knows no HTTP, which is in server/.

load, opening, capacity   a model's weights on ranks, an engine of them, and what fits beside them
identity, adapters        its tokenizer and template, and low-rank adapters by request
request, engine           what may be asked, and who answers
schedule, chunks, cache   which tokens a step computes, and which block of the cache holds which
step, relay, worker       a step as integers, on its way to all ranks, and a rank's share of it
paged_cache, graphs       keys and values in blocks, and steps that a device plays again
sampling, beam            from logits to tokens and to beams
speculate, drafts         tokens guessed ahead
options                   the sections of verbs that decode
generate, speak           texts of an engine, and `mega generate`; text_stream, answer_file beside it
"""
