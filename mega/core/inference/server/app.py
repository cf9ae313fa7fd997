"""Define the server's routes with FastAPI. Each route reads a body, queries the engine and returns the answer in the
route's format.

The fields of each route are in openai_api.py, embeddings_api.py and megatron_api.py; gate.py checks access.
"""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field

from mega import __version__
from mega.core.inference.server import embeddings_api, megatron_api, openai_api
from mega.core.inference.server.driver import EngineLost, QueueFull
from mega.core.inference.server.fields import BadField, Body, read, schema
from mega.core.inference.server.gate import FAILED, Gate, failure_body
from mega.core.inference.server.service import Service
from mega.core.inference.server.session import AnswerFailed, ClientGone, Continuation, TooLong, until_gone
from mega.core.untrusted import Json, below

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

T = TypeVar("T")

PAGE = Path(__file__).with_name("page") / "index.html"


class Tokenize(Body):
    """The body of /tokenize."""

    prompt: str = Field(description="a text; the name of a single control token is encoded as that token")
    add_special_tokens: bool = Field(True, description="add the tokens that the model expects around a text")


class Detokenize(Body):
    """The body of /detokenize."""

    tokens: list[int] = Field(description="token ids", json_schema_extra={"items": {"type": "integer", "minimum": 0}})


_GENERATING = {"/v1/completions": "POST", "/v1/chat/completions": "POST", "/api": "PUT"}
_EMBEDDING = {"/v1/embeddings": "POST"}
"""Route -> HTTP method, for text-generation models and for embedding models."""
_GONE = 499
"""Status recorded in the counters when a client disconnects before the answer."""


def make_app(service: Service) -> Gate:
    """Return the ASGI application of the server."""
    from fastapi import FastAPI

    app = FastAPI(title="mega", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    _add_errors(app)
    _add_pages(app, service)
    _add_models(app, service)
    if service.options.vector_width:
        _add_embeddings(app, service)
        _refuse(app, _GENERATING, f"{service.options.name} is a BERT, which gives embeddings: POST /v1/embeddings")
    else:
        _add_openai(app, service)
        _add_megatron(app, service)
        _refuse(app, _EMBEDDING, f"{service.options.name} continues text; embeddings need a server of a BERT")
    _add_tokenizer(app, service)
    return Gate(app, service, frozenset(route.path for route in app.routes if hasattr(route, "path")))


def _body(
    kind: type[Body], *statuses: int, streams: bool = False, valid: Mapping[str, Sequence[Json]] | None = None
) -> dict[str, Json]:
    """Return the OpenAPI description of a route's request body and status codes. streams: whether the route can answer
    with server-sent events. valid: field -> valid values, for fields whose valid values depend on this server."""
    responses: dict[str, Json] = {}
    if streams:
        content_types: dict[str, Json] = {
            "application/json": {"schema": {}},
            "text/event-stream": {"schema": {}},
        }
        responses["200"] = {"description": "the answer, complete or as server-sent events", "content": content_types}
    errors = {
        str(status): {"description": _STATUS[status]} for status in (400, 408, 413, 415, 429, 500, 503, *statuses)
    }
    body_schema = schema(kind)
    for field, values in (valid or {}).items():
        below(body_schema, "properties", field)["enum"] = [*values, None]
    content = {"application/json": {"schema": body_schema}}
    return {"requestBody": {"required": True, "content": content}, "responses": responses | errors}


_STATUS = {
    400: "a field is invalid, or the request does not fit",
    401: "the token is missing or wrong",
    404: "the model is not served",
    408: "the body arrived too slowly",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "the queue is full; try later",
    500: "the model gives no finite logits, or the server has a fault",
    503: "the server is shutting down, or the answer took too long",
}


# --- errors -------------------------------------------------------------------------------------------------------


def status_of(error: Exception) -> tuple[int, str]:
    """Return the HTTP status of an error, and the type of the error in OpenAI's API."""
    if isinstance(error, BadField):
        return error.status, "invalid_request_error"
    if isinstance(error, AnswerFailed):
        return (400, "invalid_request_error") if error.by_request else (500, "server_error")
    if isinstance(error, QueueFull):
        return 429, "rate_limit_error"
    if isinstance(error, ClientGone):
        return _GONE, "client_gone"
    if isinstance(error, (EngineLost, TooLong)):
        return 503, "server_error"
    raise error


def error_body(error: Exception) -> dict[str, Json]:
    """Return the body of an error response in OpenAI's format."""
    kind = status_of(error)[1]
    code = "model_not_found" if isinstance(error, BadField) and error.status == 404 else None
    return {"error": {"message": str(error), "type": kind, "param": getattr(error, "field", None), "code": code}}


def _add_errors(app: FastAPI) -> None:
    from fastapi.responses import JSONResponse

    async def handle(request: Request, error: Exception) -> Response:
        headers = {"retry-after": "1"} if isinstance(error, QueueFull) else None
        return JSONResponse(error_body(error), status_of(error)[0], headers=headers)

    for kind in (BadField, QueueFull, EngineLost, TooLong, ClientGone, AnswerFailed):
        app.add_exception_handler(kind, handle)

    async def failed(request: Request, error: Exception) -> Response:  # the error is printed by gate.py
        return JSONResponse(failure_body(500, FAILED), 500)

    app.add_exception_handler(Exception, failed)


async def _until_gone(service: Service, request: Request, work: Awaitable[T]) -> T:
    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    try:
        return await until_gone(work, gone, service.options.limits.request_timeout)
    except (ClientGone, TooLong):
        service.metrics.cancelled.inc()
        raise


def _log(service: Service, request: Request, body: object) -> None:
    """If --log-prompts is set, print the three lines that Megatron-LM prints for a request."""
    if service.options.log_prompts:
        print(f"request IP: {request.client.host if request.client else '-'}")
        print(json.dumps(body))
        print("start time: ", datetime.datetime.now(), flush=True)


# --- OpenAI's routes ----------------------------------------------------------------------------------------------


def _add_openai(app: FastAPI, service: Service) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse, StreamingResponse

    async def answer(request: Request, asked: openai_api.ParsedRequest) -> Response:
        if not asked.fields.stream:
            return JSONResponse(await _until_gone(service, request, openai_api.answer(service, asked)))
        running = await openai_api.start(service, asked)  # an invalid request must get an error status, not a stream
        return StreamingResponse(_stream(service, asked, running), media_type="text/event-stream")

    async def completions(request: Request) -> Any:
        body = await service.body(request)
        parsed = await openai_api.read_completion(service, body)
        _log(service, request, body)
        return await answer(request, parsed)

    async def chat(request: Request) -> Any:
        body = await service.body(request)
        parsed = await openai_api.read_chat(service, body)
        _log(service, request, body)
        return await answer(request, parsed)

    for path, handler, kind in (
        ("/v1/completions", completions, openai_api.Completion),
        ("/v1/chat/completions", chat, openai_api.Chat),
    ):
        handler.__annotations__["request"] = (
            Request  # FastAPI resolves annotations outside this function, where Request is not defined
        )
        description = _body(kind, 404, streams=True, valid={"model": service.names})
        app.add_api_route(path, handler, methods=["POST"], openapi_extra=description)


def _add_embeddings(app: FastAPI, service: Service) -> None:
    from fastapi import Request, Response

    async def embeddings(request: Request) -> object:
        body = await service.body(request)
        _log(service, request, body)
        answer = await _until_gone(service, request, embeddings_api.answer(service, body))
        return Response(answer, media_type="application/json")

    embeddings.__annotations__["request"] = Request
    valid: dict[str, Sequence[Json]] = {"model": service.names, "dimensions": [service.options.vector_width]}
    description = _body(embeddings_api.EmbeddingFields, 404, valid=valid)
    app.add_api_route("/v1/embeddings", embeddings, methods=["POST"], openapi_extra=description)


def _refuse(app: FastAPI, routes: Mapping[str, str], reason: str) -> None:
    """Define the routes that the model cannot serve. They return the error `reason` in the route's error format."""
    from fastapi.responses import JSONResponse

    async def refused() -> object:
        return JSONResponse(error_body(BadField("model", reason)), 400)

    async def refused_as_megatron() -> object:
        return JSONResponse(reason, 400)

    for path, method in routes.items():
        handler = refused_as_megatron if method == "PUT" else refused
        app.add_api_route(path, handler, methods=[method], include_in_schema=False)


def _add_models(app: FastAPI, service: Service) -> None:
    def described(name: str) -> dict[str, object]:
        common = {"object": "model", "created": int(service.started), "owned_by": "mega"}
        return {"id": name, **common, "max_model_len": service.longest}

    async def models() -> Any:
        return {"object": "list", "data": [described(name) for name in service.names]}

    async def one_model(name: str) -> Any:
        service.adapter(name)
        return described(name)

    app.add_api_route("/v1/models", models, methods=["GET"])
    unknown: dict[int | str, dict[str, object]] = {404: {"description": _STATUS[404]}}
    app.add_api_route("/v1/models/{name:path}", one_model, methods=["GET"], responses=unknown)


async def _stream(
    service: Service, asked: openai_api.ParsedRequest, running: Sequence[Continuation]
) -> AsyncIterator[bytes]:
    """Yield server-sent events; an error is sent as the last event. If the client disconnects, the sequences are
    cancelled."""
    finished = False
    try:
        async with (
            asyncio.timeout(service.options.limits.request_timeout),
            aclosing(openai_api.events(service, asked, running)) as events,
        ):
            async for event in events:
                yield b"data: " + json.dumps(event).encode() + b"\n\n"
        finished = True
    except TimeoutError:
        finished = True
        service.metrics.cancelled.inc()
        yield _last_event(TooLong(f"no whole answer within {service.options.limits.request_timeout:g} s"))
    except (EngineLost, AnswerFailed) as error:
        finished = True
        yield _last_event(error)
    finally:
        if not finished:
            service.metrics.cancelled.inc()
        for each in running:
            each.ticket.cancel()
    yield b"data: [DONE]\n\n"


def _last_event(error: Exception) -> bytes:
    return b"data: " + json.dumps(error_body(error)).encode() + b"\n\n"


# --- Megatron-LM's route ------------------------------------------------------------------------------------------


def _add_megatron(app: FastAPI, service: Service) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    async def api(request: Request) -> Any:
        legacy = service.options.legacy_status
        try:
            body = await service.body(request)
            fields = megatron_api.check(body, ignore_unknown=legacy)
            if not fields.no_log:
                _log(service, request, body)
            return JSONResponse(await _until_gone(service, request, megatron_api.answer(service, fields)))
        except megatron_api.Refused as error:
            return JSONResponse(str(error), 200 if legacy and not error.always else 400)
        except (BadField, QueueFull, EngineLost, TooLong, ClientGone, AnswerFailed) as error:
            return JSONResponse(str(error), status_of(error)[0])

    api.__annotations__["request"] = Request
    app.add_api_route("/api", api, methods=["PUT"], openapi_extra=_body(megatron_api.MegatronRequest))


# --- tokenizer, health, page --------------------------------------------------------------------------------------


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    from fastapi import Request

    tokenizer = service.tokenizer

    async def tokenize(request: Request) -> Any:
        fields = read(await service.body(request), Tokenize)
        ids: Sequence[int]
        if (control := tokenizer.control(fields.prompt)) is not None:
            ids = [control]
        elif service.options.vector_width:
            text = await service.ids_of("prompt", fields.prompt)
            ids = service.framed(text) if fields.add_special_tokens else text
        else:
            ids = tokenizer.encode("")
            if fields.prompt:
                ids = await service.encode("prompt", fields.prompt)
            ids = ids if fields.add_special_tokens else ids[len(tokenizer.encode("")) :]
        return {"tokens": ids, "count": len(ids), "max_model_len": service.longest}

    async def detokenize(request: Request) -> Any:
        fields = read(await service.body(request), Detokenize)
        ids = service.checked("tokens", fields.tokens)
        return {"prompt": await service.off_loop(tokenizer.decode, ids)}

    async def tokenizer_info() -> Any:
        special_tokens = {"eos_token": tokenizer.eod, "bos_token": tokenizer.bos, "pad_token": tokenizer.pad}
        names = {name: None if token is None else tokenizer.piece(token) for name, token in special_tokens.items()}
        ids = {f"{name}_id": token for name, token in special_tokens.items()}
        return {"tokenizer_class": tokenizer.kind, "vocab_size": tokenizer.vocab_size, **names, **ids}

    for route in (tokenize, detokenize):
        route.__annotations__["request"] = Request
    app.add_api_route("/tokenize", tokenize, methods=["POST"], openapi_extra=_body(Tokenize))
    app.add_api_route("/detokenize", detokenize, methods=["POST"], openapi_extra=_body(Detokenize))
    app.add_api_route("/tokenizer_info", tokenizer_info, methods=["GET"])


def _add_pages(app: FastAPI, service: Service) -> None:
    from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

    page = PAGE.read_text(encoding="utf-8")

    async def index() -> Any:
        return HTMLResponse(page)

    talks = {name: service.manner(name).chat is not None for name in service.options.adapters}

    async def health() -> Any:
        reason = service.driver.unhealthy
        status = "failed" if reason is not None else "draining" if service.draining else "ok"
        return JSONResponse(
            {
                "status": status,
                "ready": service.ready,
                "model": service.options.name,
                "chat": service.chat is not None,
                "embeddings": service.options.vector_width,
                "adapters": talks,
                **({} if reason is None else {"reason": reason}),
            },
            200 if status == "ok" else 503,
        )

    async def metrics() -> Any:
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for path in ("/", "/index.html"):
        app.add_api_route(path, index, methods=["GET"], include_in_schema=False)
    for path in ("/health", "/v1/health"):
        app.add_api_route(path, health, methods=["GET"])
    app.add_api_route("/metrics", metrics, methods=["GET"], response_class=PlainTextResponse)
