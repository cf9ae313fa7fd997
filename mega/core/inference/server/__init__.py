"""Answers over HTTP: one process hears, one thread of it drives the engine, and other ranks follow the engine.

app             the routes and their order of checks, as FastAPI puts them together; models, health, metrics, the page
openai_api      /v1/completions and /v1/chat/completions         megatron_api   PUT /api, Megatron-LM's
embeddings_api  /v1/embeddings                                    embedding_start  its engine and flags
start, options  a server on every rank, and its sections; gate: who may ask, and what is counted
service         what every route needs: the model's name, its tokenizer, template, limits and driver
session         text above the engine: stop strings, half characters, who has left
driver          the thread that calls the engine, and the bounded queue in front of it
connections     limits of connections: headers, slow clients, how many at a time
fields          the fields of a request as models: their checks, their refusals, their OpenAPI
tools           functions that a model may call: from a request to a prompt, from a text to calls; reasoning
constrain       answers that match a JSON schema or a regular expression
limits, metrics figures: what is accepted, what happened
chat_client     asks for the next turn of a conversation
client          asks such a server, or Megatron-LM's, from a command line
run             listening, signals, draining, how it ends
"""
