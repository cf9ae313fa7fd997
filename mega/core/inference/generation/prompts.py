"""Run one rank of `mega generate`, for a single prompt, a file of prompts, new documents, or prompts from the terminal.

Rank 0 reads prompts and writes texts; the other ranks run the steps of rank 0's engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from mega.core.inference.generation.answer_file import AnswerFile
from mega.core.inference.generation.generate import check_answered, generate
from mega.core.inference.loading.adapters import OpenedAdapter, open_adapters
from mega.core.inference.loading.identity import check_adapter_tokenizer, check_tokenizer_flags
from mega.core.inference.loading.load import (
    OpenedModel,
    check_tokenizer,
    compute_dtype,
    declared_ends,
    open_model,
    text_ends,
    trained_on_conversations,
)
from mega.core.inference.options import DecodingLayout, EngineOptions, GenerateOptions
from mega.core.inference.request import SEEDS, Beam, Citation, Engine, Request, RequestError, Sampling, flag_line
from mega.core.inference.retrieval import OpenRetriever, check_retrieval
from mega.core.inference.start import check_layout, decoding_mesh, start_engine
from mega.core.inference.text_stream import TextStream
from mega.core.processes.connect import connect
from mega.core.text.build import build
from mega.core.text.special import Spelled
from mega.core.text.tokenizer import Tokenizer
from mega.core.untrusted import Json, parse_json

BLOCK = 1024
"""Number of prompts whose rows are written to the output file together."""
ASK = "Context prompt (stop to exit) >>> "


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """The model, prompts and options of one call of `mega generate`."""

    texts: GenerateOptions
    layout: DecodingLayout = field(default_factory=DecodingLayout)
    engine: EngineOptions = field(default_factory=EngineOptions)
    interactive: bool = False
    """Whether to read prompts from the terminal."""
    retriever: OpenRetriever | None = None
    """Function that opens the retriever for the database `retro`."""
    retro: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    """Options of a tokenizer that replaces the model's tokenizer; empty to use the model's tokenizer."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Name of an adapter -> its directory. Prompts in the --input file that do not name an adapter use the first
    adapter."""

    @property
    def load(self) -> Path:
        """The model's directory."""
        assert self.texts.load is not None
        return self.texts.load

    @property
    def length_penalty(self) -> float:
        """The length penalty of beam search."""
        return 1.0 if self.texts.length_penalty is None else self.texts.length_penalty


class TextPrompt(NamedTuple):
    """A text to continue, and the name of its adapter."""

    text: str
    adapter: str | None


class GenerationInputs(NamedTuple):
    """All inputs, which are opened before any rank starts."""

    model: OpenedModel
    adapters: tuple[OpenedAdapter, ...]
    tokenizer: Tokenizer
    stop_ids: Mapping[str | None, frozenset[int]]  # adapter (None for the base model) -> ids that end an answer
    prompts: list[TextPrompt]  # Prompts from --input


def open_inputs(plan: GenerationPlan) -> GenerationInputs:
    """Open the model, its adapters and its tokenizer, and read the prompts of --input.

    Errors: ValueError naming flag, file or line.
    """
    model = open_model(plan.load)
    check_retrieval(model.model, plan.retro, plan.load)
    retrieves = plan.retriever is not None
    check_layout(model.model, plan.layout.tp, plan.layout.pp, plan.engine, plan.layout.ep, retrieves=retrieves)
    adapters = open_adapters(plan.adapters, model)
    tokenizer = build(**plan.tokenizer) if plan.tokenizer else model.tokenizer()
    if plan.tokenizer:
        for line in check_tokenizer_flags("generate", model, plan.load, tokenizer):
            print(f"mega: {line}", file=sys.stderr)
    check_tokenizer(model, tokenizer)
    trained = [str(plan.load)] if model.trained_on_conversations else []
    for each in adapters:
        for line in check_adapter_tokenizer("generate", model, tokenizer, each):
            print(f"mega: {line}", file=sys.stderr)
        if trained_on_conversations(each.source.meta):
            trained.append(each.flag)
    for place in trained:
        print(
            f"mega: {place}: was trained on conversations, and prompts are continued as plain text; mega serve "
            "answers by its chat template",
            file=sys.stderr,
        )
    prompts = [] if plan.texts.input is None else list(_prompts(plan.texts.input, tuple(plan.adapters)))
    for line in _prompt_notes(plan, model, tokenizer, prompts):
        print(f"mega: {line}", file=sys.stderr)
    return GenerationInputs(model, adapters, tokenizer, _ends(model, adapters, tokenizer), prompts)


def _prompt_notes(
    plan: GenerationPlan, opened: OpenedModel, tokenizer: Tokenizer, prompts: Sequence[TextPrompt]
) -> Iterator[str]:
    """Yield messages about prompts that contain names of special tokens, and about texts that exceed the model's
    maximum length."""
    texts = [each.text for each in prompts] or [plan.texts.prompt or ""]
    special_tokens = Spelled(tokenizer.special_tokens())
    name = next(filter(None, map(special_tokens.first_in, texts)), None)
    if name is not None:
        yield f"a prompt spells special tokens such as {name}, which are text; mega serve has parse_special_tokens"
    longest = opened.architecture.positions
    if plan.texts.prompt is not None and not plan.texts.beams and plan.texts.tokens > longest:
        yield (
            f"--tokens {plan.texts.tokens}: the model has {longest} positions; beyond these it sees the last ones alone"
        )


def _ends(
    opened: OpenedModel, adapters: Sequence[OpenedAdapter], tokenizer: Tokenizer
) -> dict[str | None, frozenset[int]]:
    """Return the ids that end a text, for the model and for each adapter. Errors: CheckpointError."""
    ends_of: dict[str | None, frozenset[int]] = {None: opened.ends(tokenizer)}
    for each in adapters:
        ends = declared_ends(each.source.attachments, opened.architecture.input.vocab)
        ends_of[each.name] = ends_of[None] if ends is None else text_ends(tokenizer, ends, tokenizer.vocab_size)
    return ends_of


def _prompts(path: Path, adapters: Sequence[str]) -> Iterator[TextPrompt]:
    """Read prompts from a file. Errors: ValueError naming file and line."""
    first = adapters[0] if adapters else None
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--input {path}: cannot be read as UTF-8 text ({error})") from None
    for number, line in enumerate(io.StringIO(text), start=1):  # str.splitlines would also split at U+2028
        line = line.removesuffix("\n")
        if path.suffix != ".jsonl":
            yield TextPrompt(line, first)
            continue
        if not line.strip():
            continue
        prompt = parse_json(line, f"--input {path}:{number}")
        adapter = prompt.get("adapter", first) if isinstance(prompt, dict) else first
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt", prompt.get("text"))
        if not isinstance(prompt, str):
            raise ValueError(f'--input {path}:{number}: must be a string, or an object with a string as "prompt"')
        if adapter is not None and adapter not in adapters:
            names = ", ".join(adapters) or "none, for lack of --adapter"
            raise ValueError(f"--input {path}:{number}: adapter {adapter!r} is not loaded; valid: {names}")
        yield TextPrompt(prompt, adapter)


def write_texts(plan: GenerationPlan) -> int:
    """Run this rank's share of the generation, and write the texts on rank 0. Errors: ValueError naming flag, file or
    tensor; LostRank."""
    model, adapters, tokenizer, stop_ids, prompts = open_inputs(plan)
    world, device, groups = connect(plan.layout.device)
    mesh = decoding_mesh(plan.layout, world.rank, groups)
    dtype = compute_dtype(model, device, plan.layout.dtype)
    options = replace(plan.engine, vocab=tokenizer.vocab_size)
    retriever = None if plan.retriever is None else plan.retriever(model.model, tokenizer, device.torch.type)
    engine = start_engine(model, mesh, device, options, dtype=dtype, adapters=adapters, retriever=retriever)
    # On other ranks, `start_engine` returns None after rank 0 has closed its engine.
    if engine is None:
        return 0
    for each in adapters:
        print(*(f"{note}\n" for note in each.notes), sep="", end="", file=sys.stderr)
    generator = TextGenerator(engine, tokenizer, plan, stop_ids, model.digest)
    if plan.interactive:
        generator.converse()
    elif plan.texts.input is not None or plan.texts.num_samples:
        generator.answer_all([TextPrompt("", generator.adapter)] * plan.texts.num_samples or prompts)
    else:
        if plan.texts.prompt is None:
            print("no terminal to ask at: one text from an empty prompt; see --prompt, --input", file=sys.stderr)
        try:
            generator.continue_one(plan.texts.prompt or "", sys.stdout)
        except RequestError as error:
            raise ValueError(flag_line(error)) from None
    engine.close()
    return 0


@dataclass(frozen=True)
class TextGenerator:
    """Generates texts on rank 0, with an engine and a tokenizer."""

    engine: Engine
    tokenizer: Tokenizer
    plan: GenerationPlan
    stop_ids: Mapping[str | None, frozenset[int]]
    digest: str = ""
    """Digest of the model's weights."""

    def ids(self, prompt: str) -> list[int]:
        """Encode a prompt; an empty prompt is replaced with the token that begins a document."""
        start = self.tokenizer.start
        return self.tokenizer.encode(prompt) or ([start] if start is not None else [])

    @property
    def adapter(self) -> str | None:
        """The adapter for prompts that do not name an adapter."""
        return next(iter(self.plan.adapters), None)

    def text(self, prompt: TextPrompt, ids: Sequence[int], new: Sequence[int]) -> str:
        """Return the text that the ids `new` add to a prompt."""
        stream, ends = TextStream(self.tokenizer, ids if prompt.text else []), self.stop_ids[prompt.adapter]
        pieces = [stream.push(token) for token in new if token not in ends]
        return "".join(pieces) + stream.finish()

    def continue_one(self, prompt: str, out: TextIO, stopped: Callable[[], bool] = lambda: False) -> int:
        """Print a prompt and, as tokens arrive, its continuation, until `stopped()` returns True. Return the number of
        new tokens."""
        plan, ids, count = self.plan, self.ids(prompt), 0
        print(prompt, end="", flush=True, file=out)
        if plan.texts.beams:
            (best, *_), _ = self._beams(ids)
            print(self.text(TextPrompt(prompt, self.adapter), ids, best.ids), file=out)
            return len(best.ids)
        # Decoders drop the space before the first token of a text, so the stream needs the ids of a non-empty prompt as
        # context.
        stream = TextStream(self.tokenizer, ids if prompt else [])
        ends = self.stop_ids[self.adapter]
        citations: list[Citation] = []
        token_ids = generate(
            *(self.engine, ids, plan.texts.tokens, plan.sampling),
            stop_ids=ends,
            adapter=self.adapter,
            cite=citations.extend,
        )
        for token in token_ids:
            count += 1
            if token not in ends:
                print(stream.push(token), end="", flush=True, file=out)
            if stopped():
                token_ids.close()
        print(stream.finish(), file=out)
        for each in citations:
            source = f"{each.corpus}, document {each.document}, chunk {each.number}"
            print(f"chunk {each.chunk} read {source}: {each.text!r}", file=sys.stderr)
        return count

    def _beams(self, ids: Sequence[int]) -> tuple[tuple[Beam, ...], str]:
        self.engine.add(self._request(ids, 0, self.adapter))
        while not self.engine.idle:
            for event in self.engine.step():
                if event.finish is not None:
                    check_answered(event)
                    return event.beams, event.finish
        raise AssertionError("a request has an end")

    def _request(self, ids: Sequence[int], number: int, adapter: str | None) -> Request:
        """Return the request for prompt `number`, with its own seed. The number of new tokens is limited so that prompt
        and answer fit into the model's maximum length.

        Errors: RequestError.
        """
        plan, seed, longest = self.plan, self.plan.sampling.seed, self.engine.limits.longest
        if len(ids) >= longest:
            raise RequestError(
                "prompt", f"of {len(ids)} tokens", f"must be shorter than the model's {longest} positions"
            )
        sampling = plan.sampling if seed is None else replace(plan.sampling, seed=_wrapped(seed + number))
        return Request(
            prompt=tuple(ids),
            tokens=min(plan.texts.tokens, longest - len(ids)),
            sampling=sampling,
            stop_ids=self.stop_ids[adapter],
            beams=plan.texts.beams,
            length_penalty=plan.length_penalty,
            adapter=adapter,
        )

    def answers(self, prompts: Sequence[TextPrompt]) -> list[dict[str, Json]]:
        """Continue prompts concurrently, and return one row per prompt with "prompt", "text", "finish" and "tokens".
        Errors: ValueError naming the prompt that cannot be continued."""
        return self._rows(prompts, list(self._requests(prompts)), 0)

    def answer_all(self, prompts: Sequence[TextPrompt]) -> None:
        """Continue all prompts concurrently, and write one JSON line per prompt, in order. An output file is written in
        blocks, so that a later call can resume after the last complete block."""
        requests = list(self._requests(prompts))
        if self.plan.texts.output is None:
            for begin in range(0, len(prompts), BLOCK):
                for row in self._rows(prompts[begin : begin + BLOCK], requests[begin : begin + BLOCK], begin):
                    print(json.dumps(row, ensure_ascii=False))
            return
        file = AnswerFile(self.plan.texts.output, self._about(prompts))
        for begin in range(file.done, len(prompts), BLOCK):
            file.add(self._rows(prompts[begin : begin + BLOCK], requests[begin : begin + BLOCK], begin))
        file.close()

    def _about(self, prompts: Sequence[TextPrompt]) -> dict[str, Json]:
        """Return the settings that change the rows by more than rounding errors."""
        plan, texts = self.plan, hashlib.sha256()
        for prompt in prompts:
            texts.update(json.dumps(prompt).encode())
        settings = {name: getattr(plan, name) for name in ("sampling", "length_penalty", "tokenizer", "adapters")}
        settings |= {name: getattr(plan.texts, name) for name in ("tokens", "beams", "unconditional")}
        settings |= {} if plan.retro is None else {"retro": plan.retro}
        return settings | {"model": self.digest, "prompts": texts.hexdigest()}

    def _requests(self, prompts: Sequence[TextPrompt]) -> Iterator[Request]:
        """Yield the requests for prompts. Errors: ValueError naming the line of a prompt that cannot be continued."""
        for number, prompt in enumerate(prompts):
            try:
                yield self._request(self.ids(prompt.text), number, prompt.adapter)
            except RequestError as error:
                location = (
                    f"--input {self.plan.texts.input}:{number + 1}: " if self.plan.texts.input is not None else ""
                )
                raise ValueError(f"{location}{flag_line(error)}") from None

    def _rows(self, prompts: Sequence[TextPrompt], requests: Sequence[Request], begin: int) -> list[dict[str, Json]]:
        """Return the rows for `prompts`. begin: index of the first prompt."""
        numbers = {self.engine.add(request): number for number, request in enumerate(requests)}
        new: list[list[int]] = [[] for _ in prompts]
        ends: list[str] = [""] * len(prompts)
        citations: list[tuple[Citation, ...]] = [()] * len(prompts)
        while not self.engine.idle:
            for event in self.engine.step():
                number = numbers[event.request]
                check_answered(event)
                if event.token is not None:
                    new[number].append(event.token)
                citations[number] += event.cited
                if event.finish is not None:
                    ends[number] = event.finish
                    # A beam search reports its tokens only in its last event.
                    new[number] = list(event.beams[0].ids) if event.beams else new[number]
        rows: list[dict[str, Any]] = []
        for number, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            text = self.text(prompt, request.prompt, new[number])
            row = {"prompt": prompt.text, "text": text, "finish": ends[number], "tokens": len(new[number])}
            if self.plan.adapters:
                row["adapter"] = prompt.adapter
            if self.plan.retriever is not None:
                row["neighbours"] = [each._asdict() for each in citations[number]]
            if self.plan.texts.unconditional:
                row |= {"all_text": prompt.text + text, "id": begin + number}
            rows.append(row)
        return rows

    def converse(self) -> None:
        """Read prompts from the terminal until `stop` or the end of the input. With one rank, Ctrl-C during an answer
        ends the answer, and Ctrl-C at a prompt ends the program. The terminal is opened directly, because with several
        ranks no rank has a standard input."""
        from rich.console import Console

        console = Console(highlight=False)
        with open("/dev/tty", encoding="utf-8", errors="replace") as terminal:
            while True:
                console.print(f"[bold]{ASK}[/]", end="")
                prompt = terminal.readline()
                if not prompt or prompt.strip() == "stop":
                    console.print()
                    return
                prompt = prompt.rstrip("\n")
                if not prompt:
                    console.print("Prompt should not be empty!")
                    continue
                began = time.monotonic()
                try:
                    with ctrl_c_flag(self.plan.layout.tp * self.plan.layout.pp == 1) as stopped:
                        count = self.continue_one(prompt, console.file, stopped)  # type: ignore[arg-type]
                except RequestError as error:
                    console.print(f"\n{flag_line(error)}", markup=False)
                    continue
                speed = count / max(time.monotonic() - began, 1e-9)
                console.print(f"[dim]{count} tokens, {speed:.1f} a second[/]")


@contextlib.contextmanager
def ctrl_c_flag(heeded: bool) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed, and disable the usual effect of Ctrl-C. If `heeded` is
    False, Ctrl-C keeps its usual effect, and the function returns False."""
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number)) if heeded else None
    try:
        yield lambda: bool(pressed)
    finally:
        if heeded:
            signal.signal(signal.SIGINT, before)


def _wrapped(seed: int) -> int:
    return seed if seed <= SEEDS[1] else seed - SEEDS[1] - 1
