"""A trained model in this process, on one device: it generates, chats and scores.

    model = mega.load("runs/first")
    model.generate("Once upon a time", tokens=50)

The engine, that of `mega generate` and `mega serve`, is created when it is first needed. Scoring uses the same weights.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Literal, overload

import torch

from mega.api.ids import checked_ids
from mega.core.device import DTYPE_NAMES, Device
from mega.core.hub.folders import local_place
from mega.core.inference.engine import BatchingEngine
from mega.core.inference.generation.chat import LocalAnswers
from mega.core.inference.generation.generate import logits, losses
from mega.core.inference.generation.open_chat import template
from mega.core.inference.generation.prompts import GenerationPlan, TextGenerator, TextPrompt
from mega.core.inference.loading.load import OpenedModel, check_tokenizer, compute_dtype, load_stages, open_model
from mega.core.inference.options import EngineOptions, GenerateOptions
from mega.core.inference.request import Sampling, sampling_of
from mega.core.inference.start import check_layout, engine_on
from mega.core.parallel.mesh import Mesh
from mega.core.processes.world import world_from_env
from mega.core.text.chat.format import ChatFormat
from mega.core.text.chat.messages import Message
from mega.core.text.tokenizer import Tokenizer

AT_ONCE = 16
"""Maximum number of texts that are continued together; other texts wait. The cache has room for this many texts of full
length, if the memory suffices."""


def load(
    path: str | Path,
    *,
    dtype: Literal["fp32", "bf16", "fp16"] | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> Model:
    """Open the model at `path`, without converting it: a run's directory (its newest step), one step in it, or weights
    in the format of Hugging Face, Meta, Megatron-LM or another one that `mega convert-llama` reads; or a name of the
    Hugging Face Hub, OWNER/NAME, which is downloaded.

    dtype: dtype of the computation [fp32 on a CPU, else that of the weights]. The model uses one device, even in a
    process that is one of several ranks. Errors: ValueError naming the file, key or tensor, or the model's family.
    """
    if dtype not in (None, "fp32", "bf16", "fp16"):
        raise ValueError(f"dtype {dtype}: must be fp32, bf16 or fp16")
    opened_model = open_model(local_place("path", os.fspath(path)))
    check_layout(opened_model.model, 1, 1)
    chosen_device = Device.choose(device, world_from_env().local_rank)
    return Model(opened_model, chosen_device, compute_dtype(opened_model, chosen_device, dtype))


class Model:
    """A model in this process, returned by `load`."""

    def __init__(self, opened: OpenedModel, device: Device, dtype: torch.dtype):
        self.path: Path = opened.path
        """Path of the weights."""
        self.dtype: str = DTYPE_NAMES[dtype]
        """Dtype of the computation."""
        self._opened, self._device = opened, device
        self._mesh = Mesh(0)
        (self._stage,) = load_stages(opened, self._mesh, device, dtype=dtype)

    # -- text

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the weights. Errors: ValueError if the weights have no tokenizer, or one that does not
        belong to the model."""
        tokenizer = self._opened.tokenizer()
        check_tokenizer(self._opened, tokenizer)
        return tokenizer

    @overload
    def generate(self, prompt: str, tokens: int = 100, **sampling: float | None) -> str: ...
    @overload
    def generate(self, prompt: list[str], tokens: int = 100, **sampling: float | None) -> list[str]: ...
    def generate(self, prompt: str | list[str], tokens: int = 100, **sampling: float | None) -> str | list[str]:
        """Continue a prompt, or each of several, by up to `tokens` tokens or to the end of the text; the prompt is not
        returned.

        sampling: options of `mega generate`: temperature [1; 0 takes the most likely token], top_k, top_p, min_p,
        repetition_penalty and others; seed [0]: the same seed gives the same text.

        Errors: ValueError naming the option, its value and the rule, or a prompt that is too long.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        if type(tokens) is not int or tokens < 1:
            raise ValueError(f"tokens {tokens}: must be a whole number of at least 1")
        plan = GenerationPlan(texts=GenerateOptions(tokens=tokens), sampling=_sampling(sampling))
        generator = TextGenerator(self._engine, self.tokenizer, plan, {None: self._opened.ends(self.tokenizer)})
        texts = [str(row["text"]) for row in generator.answers([TextPrompt(each, None) for each in prompts])]
        return texts[0] if isinstance(prompt, str) else texts

    def chat(self, messages: str | Sequence[Message], tokens: int = 512, **sampling: float | None) -> str:
        """Answer in a conversation, with the model's chat template. messages: a text of the user, or turns such as
        `{"role": "user", "content": "Hello"}`. sampling: as in `generate`.

        Errors: ValueError if the model has no chat template, or the messages are invalid.
        """
        if self._chat is None:
            raise ValueError(f"{self.path}: has no chat template, so it is a base model; `generate` continues text")
        turns: Sequence[Message] = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        ends = self._opened.ends(self.tokenizer) | self._chat.ends
        answers = LocalAnswers(self._engine, self.tokenizer, self._chat, ends)
        return "".join(answers.answer(turns, _sampling(sampling), tokens))

    @cached_property
    def _chat(self) -> ChatFormat | None:
        return template(self._opened, self.tokenizer)

    @cached_property
    def _engine(self) -> BatchingEngine:
        options = EngineOptions(vocab=self.tokenizer.vocab_size, max_requests=AT_ONCE)
        engine = engine_on(self._stage, self._mesh, self._device, options)
        assert engine is not None, "one rank has the engine"
        return engine

    # -- numbers

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Logits [b, s, vocab] of token ids int64 [b, s], on the model's device; the logits at position i predict the
        token at i + 1. Ids of one sequence [s] give [s, vocab]. Errors: ValueError for ids outside the vocabulary, or
        for more ids than the model has positions.
        """
        model = self._opened.architecture
        ids = checked_ids("tokens", tokens, model.input.vocab).to(self._device.torch)
        if ids.dim() not in (1, 2) or not 1 <= ids.shape[-1] <= model.positions:
            raise ValueError(
                f"tokens: has shape {list(ids.shape)}; must be [b, s] or [s], s from 1 to {model.positions}"
            )
        values = logits(self._stage, ids.view(-1, ids.shape[-1]))
        return values.view(*ids.shape, -1)

    @torch.no_grad()
    def score(self, text: str | Sequence[int]) -> list[float]:
        """The log-probability, in nats, of every token of a text except the first, given the tokens before it. A text
        with more tokens than the model has positions is cut into windows, which are scored independently.

        Errors: ValueError for fewer than two tokens, or for ids outside the vocabulary.
        """
        sequence = self.tokenizer.encode(text) if isinstance(text, str) else text
        ids = checked_ids("text", sequence, self._opened.architecture.input.vocab)
        if ids.dim() != 1 or len(ids) < 2:
            raise ValueError(
                f"text: has {ids.numel()} tokens; must have at least 2, of which all but the first are scored"
            )
        return [-each for each in losses(self._stage, ids.tolist()).tolist()]


def _sampling(given: Mapping[str, float | None]) -> Sampling:
    """Sampling options, with the defaults of `mega generate`. Errors: ValueError naming the option."""
    defaults = asdict(Sampling())
    for name in given:
        if name not in defaults:
            raise ValueError(f"{name}: is not an option of sampling; valid: tokens, {', '.join(defaults)}")
    return sampling_of(**{"seed": 0, **{name: value for name, value in given.items() if value is not None}})
