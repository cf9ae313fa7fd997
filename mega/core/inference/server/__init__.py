"""The HTTP server. One process accepts requests, a thread of this process runs the engine, and the other ranks run the
engine's steps.

app             the routes, built with FastAPI: models, health, metrics, tokenizer, web page, and the APIs below
openai_api      /v1/completions and /v1/chat/completions         megatron_api   PUT /api of Megatron-LM
embeddings_api  /v1/embeddings                                    embedding_start  start the embedding engine
start, options  start the server on every rank; server options    gate            access checks and request counters
service         state shared by all routes: the model's name, tokenizer, chat template, limits and driver
session         the text of one sequence: stop strings, incomplete characters, disconnected clients
driver          the thread that calls the engine, and its bounded queue
connections     limits on connections: size of headers, slow clients, number of clients
fields          request bodies as pydantic models: checks, error messages, OpenAPI schemas
client_fields   fields that clients of vLLM and llama.cpp send, but that OpenAI's API does not have
tools           function calling: tools in prompts, calls and reasoning in answers
constrain       answers constrained to a JSON schema or a regular expression
limits, metrics limits on requests; Prometheus metrics
chat_client     client of /v1/chat/completions
client          client of PUT /api of mega or Megatron-LM
run             listening, signals, draining, shutdown
"""
