"""Answer PUT /api like Megatron-LM's text generation server of 2023, with the same fields, limits, order of checks and
error texts.

Invalid values are rejected with status 400. Megatron-LM, and this server with `--legacy-status`, often respond with
status 200 and the error message as the answer instead. Fields that Megatron-LM would ignore are rejected. Every prompt
gets `tokens_to_generate` new tokens, even if other prompts in the request are longer.

Source: megatron/text_generation_server.py and megatron/text_generation/ of Megatron-LM 23.06.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from pydantic import Field

from mega.core.inference.request import MOST_LENGTH_PENALTY, Allowed, Request, RequestError, Sampling
from mega.core.inference.server.fields import BadField, Body
from mega.core.inference.server.limits import MOST_PROMPTS
from mega.core.inference.server.openai_api import cited
from mega.core.inference.server.service import Service
from mega.core.inference.server.session import Continuation, all_whole
from mega.core.text.tokenizer import Tokenizer
from mega.core.untrusted import Json


class MegatronRequest(Body):
    """The fields and their defaults (None for no default), from which the OpenAPI schema is derived. `check` checks the
    fields in the same order and with the same messages as Megatron-LM."""

    prompts: list[str] = Field(
        description=f"list of 1 to {MOST_PROMPTS} prompts", min_length=1, max_length=MOST_PROMPTS
    )
    tokens_to_generate: int = Field(64, ge=0, description="number of new tokens; 0 with logprobs scores the prompts")
    logprobs: bool = Field(False, description="return the log-probability of each token except the first")
    temperature: float | None = Field(None, gt=0, le=100, description="sampling temperature")
    top_k: int | None = Field(
        None, ge=0, le=1000, description="sample from the k most likely tokens; 1 is greedy; 0 is off"
    )
    top_p: float | None = Field(
        None, ge=0, le=1, description="sample from the most likely tokens with total probability p, a float; 0.0 is off"
    )
    top_p_decay: float | None = Field(None, ge=0, le=1, description="factor of top_p after each token, a float")
    top_p_bound: float | None = Field(None, gt=0, le=1, description="lower bound of the decayed top_p, a float")
    add_BOS: bool = Field(False, description="put the end-of-document token before each prompt")
    stop_on_double_eol: bool = Field(False, description="end the text at an empty line")
    stop_on_eol: bool = Field(False, description="end the text at the end of a line")
    prevent_newline_after_colon: bool = Field(False, description="do not generate a newline directly after a colon")
    random_seed: int | None = Field(None, ge=0, description="requests with the same seed get the same text")
    no_log: bool = Field(False, description="do not print this request under --log-prompts")
    beam_width: int | None = Field(None, ge=1, description="number of beams; beam search accepts one prompt")
    stop_token: int | None = Field(None, description="token that ends a beam; default: the end-of-document token")
    length_penalty: float = Field(
        1.0,
        ge=-MOST_LENGTH_PENALTY,
        le=MOST_LENGTH_PENALTY,
        description="exponent of the length in the score of a beam, a float",
    )


_SAMPLED = ("logprobs", "temperature", "top_k", "top_p", "top_p_decay", "top_p_bound", "random_seed")
_SAMPLED_STOPS = ("stop_on_double_eol", "stop_on_eol")
_BEAMS = ("stop_token", "length_penalty")


class Refused(ValueError):
    """Raised for an invalid request, with Megatron-LM's message. always: whether the status is 400 even with
    --legacy-status."""

    def __init__(self, text: str, always: bool = False) -> None:
        super().__init__(text)
        self.always = always


# --- the fields ---------------------------------------------------------------------------------------------------


def check(body: object, *, ignore_unknown: bool = False) -> MegatronRequest:
    """Check a body, and return its fields. Errors: Refused with the message of the first check that fails.

    >>> check({"prompts": []})
    Traceback (most recent call last):
    ...
    mega.core.inference.server.megatron_api.Refused: prompts is empty
    """
    if not isinstance(body, dict) or "prompts" not in body:
        raise Refused("prompts argument required", always=True)
    _prompts(body)
    for step in (_tokens, _temperature, _top_k, _top_p, _top_p_decay, _top_p_bound, _booleans, _seed, _beams):
        step(body)
    valid_fields = MegatronRequest.model_fields
    unknown = [name for name in body if name not in valid_fields]
    if unknown and not ignore_unknown:
        raise Refused(f"{unknown[0][:60]} is not a field; valid: {', '.join(valid_fields)}", always=True)
    if not ignore_unknown:
        _without_effect(body)
    return MegatronRequest.model_construct(**{name: value for name, value in body.items() if name in valid_fields})


def _refuse(wrong: bool, text: str, always: bool = False) -> None:
    if wrong:
        raise Refused(text, always)


def _prompts(body: Mapping[str, object]) -> None:
    _refuse("max_len" in body, "max_len is no longer used.  Replace with tokens_to_generate", True)
    _refuse("sentences" in body, "sentences is no longer used.  Replace with prompts", True)
    prompts = body["prompts"]
    if not isinstance(prompts, list):
        raise Refused("prompts is not a list of strings", always=True)
    _refuse(not prompts, "prompts is empty", True)
    _refuse(len(prompts) > MOST_PROMPTS, f"Maximum number of prompts is {MOST_PROMPTS}", True)
    _refuse(not all(isinstance(prompt, str) for prompt in prompts), "prompts is not a list of strings", True)


def _listed(body: Mapping[str, object]) -> list[object]:
    """Return the prompts, which `_prompts` has checked."""
    prompts = body["prompts"]
    return prompts if isinstance(prompts, list) else []


def _tokens(body: Mapping[str, object]) -> None:
    tokens, logprobs = body.get("tokens_to_generate", 64), body.get("logprobs", False)
    if type(tokens) is not int:
        raise Refused("tokens_to_generate must be an integer greater than 0")
    _refuse(tokens < 0, "tokens_to_generate must be an integer greater than or equal to 0")
    _refuse(type(logprobs) is not bool, "logprobs must be a boolean value")
    _refuse(tokens == 0 and not logprobs, "tokens_to_generate=0 implies logprobs should be True")


def _temperature(body: Mapping[str, object]) -> None:
    value = body.get("temperature", 1.0)
    if type(value) not in (int, float) or not isinstance(value, int | float) or not 0 < value <= 100:
        raise Refused("temperature must be a positive number less than or equal to 100.0")


def _top_k(body: Mapping[str, object]) -> None:
    value = body.get("top_k", 0)
    rule = "equal to or greater than 0 and less than or equal to 1000"
    if type(value) is not int:
        raise Refused(f"top_k must be an integer {rule}")
    _refuse(not 0 <= value <= 1000, f"top_k must be {rule}")


def _top_p(body: Mapping[str, object]) -> None:
    value = body.get("top_p", 0.0)
    if type(value) is not float:
        raise Refused("top_p must be a positive float less than or equal to 1.0")
    _refuse(value > 0 and body.get("top_k", 0) != 0, "cannot set both top-k and top-p samplings.")
    _refuse(not 0 <= value <= 1, "top_p must be less than or equal to 1.0")


def _top_p_decay(body: Mapping[str, object]) -> None:
    if "top_p_decay" not in body:
        return
    value = body["top_p_decay"]
    if type(value) is not float:
        raise Refused("top_p_decay must be a positive float less than or equal to 1.0")
    _refuse(body.get("top_p", 0.0) == 0, "top_p_decay cannot be set without top_p")
    _refuse(not 0 <= value <= 1, "top_p_decay must be less than or equal to 1.0")


def _top_p_bound(body: Mapping[str, object]) -> None:
    if "top_p_bound" not in body:
        return
    value, top_p = body["top_p_bound"], body.get("top_p", 0.0)
    if type(value) is not float or not isinstance(top_p, float):  # `top_p` was checked by _top_p
        raise Refused("top_p_bound must be a positive float less than or equal to top_p")
    _refuse(top_p == 0, "top_p_bound cannot be set without top_p")
    _refuse(not 0 < value <= top_p, "top_p_bound must be greater than 0 and less than top_p")


def _booleans(body: Mapping[str, object]) -> None:
    _refuse(type(body.get("add_BOS", False)) is not bool, "add_BOS must be a boolean value")
    empty = any(not prompt for prompt in _listed(body))
    _refuse(empty and not body.get("add_BOS", False), "Empty prompts require add_BOS=true")
    for name in ("stop_on_double_eol", "stop_on_eol", "prevent_newline_after_colon"):
        _refuse(type(body.get(name, False)) is not bool, f"{name} must be a boolean value")


def _seed(body: Mapping[str, object]) -> None:
    seed = body.get("random_seed", 0)
    if type(seed) is not int:
        raise Refused("random_seed must be integer")
    _refuse(seed < 0, "random_seed must be a positive integer")
    _refuse(type(body.get("no_log", False)) is not bool, "no_log must be a boolean value")


def _beams(body: Mapping[str, object]) -> None:
    if "beam_width" in body:
        width = body["beam_width"]
        if type(width) is not int:
            raise Refused("beam_width must be integer")
        _refuse(width < 1, "beam_width must be an integer > 1")
        _refuse(len(_listed(body)) > 1, "When doing beam_search, batch size must be 1")
    _refuse(type(body.get("stop_token", 0)) is not int, "stop_token must be an integer")
    _refuse(type(body.get("length_penalty", 1.0)) is not float, "length_penalty must be a float")


def _without_effect(body: Mapping[str, object]) -> None:
    """Reject fields that Megatron-LM would silently ignore."""
    beams = "beam_width" in body
    for name in (*_SAMPLED, *_SAMPLED_STOPS) if beams else _BEAMS:
        if name in body and body[name] is not False:
            raise Refused(f"{name} has no effect {'with' if beams else 'without'} beam_width", always=True)


# --- the answer ---------------------------------------------------------------------------------------------------


async def requests(service: Service, given: MegatronRequest) -> tuple[list[Request], int | None]:
    """Return the engine's requests, and the token that ends an answer if it occurs twice in succession. Errors:
    Refused."""
    tokenizer, tokens = service.tokenizer, given.tokens_to_generate
    service.check_queue(len(given.prompts))
    prompts = [await _ids(service, text, given.add_BOS) for text in given.prompts]
    longest = max(map(len, prompts))
    if given.beam_width and (longest >= service.longest or not tokens):
        raise Refused("context length + tokens_to_generate too large")
    if given.beam_width:
        tokens = min(tokens, service.longest - longest)
    if longest + tokens > service.longest:
        raise Refused("Length of prompt + tokens_to_generate longer than allowed")
    if (size := len(prompts) * (longest + tokens)) > service.options.max_tokens_to_oom:
        raise Refused(f"Too many tokens.  {size} is greater than {service.options.max_tokens_to_oom}")
    ends, pair = _ends(service, given)
    mask = _no_newline(tokenizer, service.driver.engine.limits.vocab) if given.prevent_newline_after_colon else None
    engine_requests = []
    try:
        for index, prompt in enumerate(prompts):
            sampling = Sampling() if given.beam_width else _sampling(service, given, index)
            scored = 0 if given.logprobs else None
            engine_requests.append(
                Request(
                    prompt=prompt,
                    tokens=tokens,
                    sampling=sampling,
                    stop_ids=ends,
                    logprobs=scored,
                    prompt_logprobs=given.logprobs,
                    beams=given.beam_width or 0,
                    length_penalty=given.length_penalty,
                    allowed=mask,
                )
            )
    except (RequestError, BadField) as error:
        raise Refused(str(error), always=True) from None
    return engine_requests, pair


async def answer(service: Service, given: MegatronRequest) -> dict[str, Json]:
    """Return the answer in Megatron-LM's format. Errors: Refused, QueueFull, EngineLost."""
    engine_requests, pair = await requests(service, given)
    try:
        running = await service.continuations(engine_requests, pair=pair)
    except BadField as error:
        raise Refused(str(error), always=True) from None
    await all_whole(running)
    if given.beam_width:
        return _beam_answer(service.tokenizer, running[0])
    piece, decode = service.tokenizer.piece, service.tokenizer.decode
    whole = [(*each.prompt, *each.ids) for each in running]
    return {
        "text": [decode(ids) for ids in whole],
        "segments": [[piece(token) for token in ids] for ids in whole],
        "logprobs": [_logprobs(each) for each in running] if given.logprobs else None,
        **(
            {"neighbours": [cited(each).get("neighbours", []) for each in running]}
            if any(each.cited for each in running)
            else {}
        ),
    }


def _beam_answer(tokenizer: Tokenizer, done: Continuation) -> dict[str, Json]:
    """Return all beams, best first."""
    whole = [(*done.prompt, *beam.ids) for beam in done.beams]
    return {
        "text": [tokenizer.decode(ids) for ids in whole],
        "segments": [[tokenizer.piece(token) for token in ids] for ids in whole],
        "scores": [beam.score for beam in done.beams],
    }


def _logprobs(done: Continuation) -> list[float]:
    """Return the log-probabilities of all tokens except the first."""
    logprobs = (*done.prompt_logprobs[1:], *(each.logprob for each in done.scored))
    return [-9999.0 if value is None else max(value, -9999.0) for value in logprobs]


async def _ids(service: Service, text: str, add_bos: bool) -> tuple[int, ...]:
    """Return the ids of a prompt, preceded by the end-of-document token if `add_bos`. Errors: Refused."""
    try:
        ids = await service.encode("prompts", text) if text else ()
    except BadField as error:
        if service.context_message() in str(error):
            raise Refused("Length of prompt + tokens_to_generate longer than allowed") from None
        raise Refused(str(error), always=True) from None
    if not add_bos:
        return ids
    if service.tokenizer.eod is None:
        raise Refused("add_BOS: this model's tokenizer has no token that ends a document", always=True)
    return (service.tokenizer.eod, *ids)


def _sampling(service: Service, given: MegatronRequest, index: int) -> Sampling:
    """Return the sampling options for one prompt. A top_p of 0 disables top-p, even if top_k is given."""
    settings: dict[str, Json] = {"temperature": given.temperature, "seed": given.random_seed}
    if given.top_k is not None or given.top_p is not None:
        settings |= {"top_k": given.top_k or 0, "top_p": given.top_p or 1.0}
    settings |= {"top_p_decay": given.top_p_decay, "top_p_bound": given.top_p_bound if given.top_p else None}
    return service.sampling(settings, index)


def _ends(service: Service, given: MegatronRequest) -> tuple[frozenset[int], int | None]:
    """Return the tokens that end an answer, and the token that ends the answer if it occurs twice in succession.
    stop_on_double_eol takes precedence over stop_on_eol."""
    tokenizer = service.tokenizer
    if given.beam_width and given.stop_token is not None:
        return frozenset([given.stop_token]), None
    newline, double = _last(tokenizer, "\n"), _last(tokenizer, "\n\n")
    if given.stop_on_double_eol:
        return frozenset(token for token in (double,) if token is not None), newline
    if given.stop_on_eol:
        return frozenset(token for token in (newline, double) if token is not None), None
    return service.ends(), None


def _last(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the single token that encodes `text` after a letter; None if several tokens encode it."""
    try:
        ids = tokenizer.encode("a" + text)
    except ValueError:  # a tokenizer that cannot encode text, such as NullTokenizer
        return None
    return ids[-1] if ids and tokenizer.token_bytes(ids[-1]).decode(errors="replace") == text else None


def _no_newline(tokenizer: Tokenizer, vocab: int) -> Allowed | None:
    """Return a mask function that forbids a newline directly after a colon."""
    colon, newline = _last(tokenizer, ":"), _last(tokenizer, "\n")
    if colon is None or newline is None:
        return None
    mask = torch.ones(vocab, dtype=torch.bool)
    mask[newline] = False
    return lambda ids: mask if ids[-1] == colon else None
