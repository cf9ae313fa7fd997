"""`mega eval --tasks`: run EleutherAI's lm-evaluation-harness in this process with mega's engine, in any layout.

Every rank runs the harness with the same requests, so that all ranks score each request together; rank 0 reports. The
harness provides task files and data; --include-path adds local task files. Answers are stored next to --json, as
FILE.partial, until the result is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mega import __version__
from mega.core.config.compose import GivenOptions
from mega.core.config.resolve import column_unit
from mega.core.config.run import Options
from mega.core.device import Device
from mega.core.files import whole_file
from mega.core.inference.loading.load import OpenedModel
from mega.core.inference.request import Sampling
from mega.core.parallel.collectives import all_reduce
from mega.core.parallel.mesh import Groups
from mega.core.tasks.chat import ChatTexts
from mega.core.tasks.continuation import AT_ONCE, continue_prompts
from mega.core.tasks.model import (
    CheckedModel,
    ModelHere,
    as_rank,
    check_model,
    layout_of,
    model_settings,
    open_here,
    tokenizer_of,
)
from mega.core.tasks.options import HarnessOptions
from mega.core.tasks.rows import JudgedRow, all_greedy, batch_of, nll_of
from mega.core.tasks.score import TokenScorer
from mega.core.tasks.stored_answers import StoredAnswers, check_result
from mega.core.tasks.task import shares
from mega.core.text.tokenizer import Tokenizer

MOST_NEW_TOKENS = 256
"""Maximum number of tokens in an answer if the task sets no limit, as in the harness."""
TURNS = 16
"""Number of pipeline calls on every rank between two writes of the answers."""


@dataclass(frozen=True)
class HarnessRun:
    """An evaluation that `prepare` has checked. json: path of the file for the result."""

    model: CheckedModel
    options: HarnessOptions
    json: str


def check_harness() -> None:
    """Check that lm-eval is installed. Errors: ValueError if lm-eval, or a package required by it, is missing."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--tasks: needs lm-eval (pip install '.[lm-eval]' in a clone): {' '.join(str(error).split())}"
        ) from None


def prepare(options: Options, given: GivenOptions, harness: HarnessOptions, out: str, world: int) -> HarnessRun:
    """Check an evaluation before any rank starts. Errors: ValueError naming flag or file, its value, and the rule."""
    check_harness()
    model, model_files = check_model(options, given, world)
    tokenizer = tokenizer_of(model.run, model_files, lambda line: print(line, file=sys.stderr))
    if tokenizer is None:
        raise ValueError("--tokenizer is missing: the model carries none; give its kind and files")
    if harness.apply_chat_template:
        _chat(model.load, model_files, tokenizer)
    _known_tasks(harness)
    check_result(
        Path(out), model_files.digest, model.load, "eval-lm-eval.json", lambda line: print(line, file=sys.stderr)
    )
    return HarnessRun(model, harness, out)


def _chat(load: str, opened: OpenedModel, tokenizer: Tokenizer) -> ChatTexts:
    """Return the formatter of conversations. Errors: ValueError if the model has no template, or the tokenizer lacks
    one of the template's tokens."""
    template = opened.chat_template()
    if template is None:
        raise ValueError(f"--apply-chat-template: nothing at {load} says what its conversations look like")
    return ChatTexts(template, tokenizer)


def _known_tasks(options: HarnessOptions) -> object:
    """Return the harness's list of tasks. Errors: ValueError naming an unknown task."""
    from lm_eval.tasks import TaskManager

    if options.include_path is not None and not Path(options.include_path).is_dir():
        raise ValueError(f"--include-path {options.include_path}: no such directory")
    if options.include_path is not None:  # first try without the built-in tasks, which take seconds to read
        local_tasks = TaskManager(include_path=options.include_path, include_defaults=False)
        if all(local_tasks.match_tasks([name]) for name in options.tasks):
            return local_tasks
    manager = TaskManager(include_path=options.include_path, include_defaults=True)
    for name in options.tasks:
        if not manager.match_tasks([name]) and not Path(name).is_file():
            raise ValueError(f"--tasks {name}: is not a task of lm-eval or of --include-path; `lm_eval ls tasks` lists")
    return manager


def evaluate(asked: HarnessRun) -> int:
    """Run the evaluation as one rank of the job described by the environment, and return 0."""
    as_rank(asked.model.run, partial(run_here, asked))
    return 0


def run_here(
    asked: HarnessRun, rank: int, world: int, device: Device, groups: Groups | None = None
) -> Mapping[str, object] | None:
    """Run one rank's share of the evaluation. Return the harness's results on the first rank of each host; None on
    other ranks."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.utils import make_table

    logging.getLogger("lm_eval").setLevel(logging.WARNING if rank == 0 else logging.ERROR)
    model, options = open_here(asked.model, rank, world, device, groups), asked.options
    tokenizer = tokenizer_of(model.run, model.opened)
    assert tokenizer is not None
    native = _native(asked, model, tokenizer)
    # Every rank runs the harness, because all ranks must score each request together.
    results: dict[str, object] | None = simple_evaluate(
        model=language_model(native),
        tasks=list(options.tasks),
        num_fewshot=options.num_fewshot,
        task_manager=_known_tasks(options),
        limit=options.limit,
        apply_chat_template=options.apply_chat_template,
        log_samples=True,
        bootstrap_iters=1000,
        random_seed=model.run.runtime.seed,
        numpy_random_seed=model.run.runtime.seed,
        torch_random_seed=model.run.runtime.seed,
        fewshot_random_seed=model.run.runtime.seed,
    )
    if rank == 0 and results is not None:
        reported = {name: value for name, value in results.items() if name != "samples" or options.log_samples}
        settings = {**_decides(asked, model, tokenizer), **layout_of(model.run)}
        header = {"tasks": options.tasks, "settings": settings, "version": __version__, "torch": torch.__version__}
        with whole_file(Path(asked.json)) as file:
            file.write((json.dumps({**header, **reported}, indent=1, default=str) + "\n").encode())
        print(make_table(results))
        if results.get("groups"):
            print(make_table(results, "groups"))
    native.answers.close()
    return results


def _decides(asked: HarnessRun, here: ModelHere, tokenizer: Tokenizer) -> dict[str, object]:
    """Return the settings on which every answer depends."""
    return {
        "model": model_settings(asked.model, here),
        "tokenizer": tokenizer.identity()._asdict(),
        "seq_length": asked.model.length,
        "dtype": here.run.precision.dtype,
        "seed": here.run.runtime.seed,
        "chat": asked.options.apply_chat_template,
    }


def _native(asked: HarnessRun, here: ModelHere, tokenizer: Tokenizer) -> NativeModel:
    """Open one rank's shard of the model, with the stored answers of an interrupted run."""
    settings = _decides(asked, here, tokenizer)
    settings["model"] = {**model_settings(asked.model, here), "path": None}
    return NativeModel(
        here,
        here.scorer(greedy=True),
        tokenizer,
        StoredAnswers(Path(f"{asked.json}.partial"), settings, here.mesh, here.device.torch),
        _chat(asked.model.load, here.opened, tokenizer) if asked.options.apply_chat_template else None,
        asked.model.length,
        asked.model.micro_batch,
    )


@dataclass(frozen=True)
class NativeModel:
    """The operations of a model that the harness needs. All ranks must call each method with the same arguments, and
    all ranks receive identical answers."""

    here: ModelHere
    scorer: TokenScorer
    tokenizer: Tokenizer
    answers: StoredAnswers  # answers of an interrupted run and of this run
    chat: ChatTexts | None  # formats conversations; None if there is no --apply-chat-template
    length: int  # maximum number of columns in a row
    micro_batch: int  # number of rows in a microbatch

    @property
    def turn(self) -> int:
        """Number of rows that all ranks together score in one call."""
        return self.micro_batch * self.scorer.mesh.dp.size * self.scorer.together

    @property
    def begin(self) -> int:
        """The id that precedes a text at the beginning of the input. Errors: ValueError if the tokenizer has no such
        id."""
        if self.tokenizer.start is None:
            raise ValueError(f"--tasks: {self.tokenizer.kind} has no token that begins a text")
        return self.tokenizer.start

    def encode(self, text: str, special: bool | None = None) -> list[int]:
        """Encode a text. special: whether to prepend the ids that the tokenizer adds to each text. If None, these ids
        are prepended unless a conversation's text already begins with these ids."""
        lead = self.tokenizer.encode("")
        if self.chat is None:
            ids = self.tokenizer.encode(text)
            return ids[len(lead) :] if special is False else ids
        ids = self.chat.encode(text, lead)
        return ids if special is False or ids[: len(lead)] == lead else [*lead, *ids]

    def log_likelihoods(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return, for each pair of context and continuation, the natural log-probability of the continuation, and
        whether greedy decoding would generate the continuation.

        A long context is truncated on the left. Errors: ValueError if a continuation without context is too long.
        """
        answers = self.answers.each(
            "loglikelihood", pairs, self._scored, TURNS * self.turn, lambda pair: len(pair[0]) + len(pair[1])
        )
        return [(value, greedy) for value, greedy in answers]

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        rows = []
        for context, continuation in pairs:
            if len(continuation) > self.length:
                raise ValueError(
                    f"--seq-length {self.length}: a continuation of {len(continuation)} tokens does not fit"
                )
            ids = [*context, *continuation][-(self.length + 1) :]
            rows.append(JudgedRow(ids, len(ids) - len(continuation)))
        mesh, unit = self.scorer.mesh, column_unit(self.here.run.parallel)
        likelihoods = torch.zeros(len(rows), 2, dtype=torch.float64, device=self.scorer.device.torch)
        for first in range(0, len(rows), self.turn):
            turn = range(first, min(first + self.turn, len(rows)))
            groups = shares(turn, self.micro_batch, mesh.dp.index, mesh.dp.size)
            batches = [batch_of([rows[number] for number in group], unit) for group, _ in groups]
            for (group, counts), batch, scores in zip(groups, batches, self.scorer.score(batches), strict=False):
                if counts and mesh.cp.first:
                    batch_here = batch.to(self.scorer.device.torch)
                    row_scores = [-nll_of(batch_here, scores).total, all_greedy(batch_here, scores).total]
                    likelihoods[torch.tensor(list(group), device=likelihoods.device)] = torch.stack(row_scores, 1)
        all_reduce(likelihoods, mesh.loss_group)
        return [(value, bool(greedy)) for value, greedy in likelihoods.tolist()]

    def continuations(
        self, prompts: Sequence[str], until: Sequence[str], tokens: int, how: Sequence[Sampling]
    ) -> list[str]:
        """Generate text after each prompt, up to one of the strings `until`, the end of the document or the end of the
        assistant's turn."""
        most, decode = self.length - tokens, self.tokenizer.decode
        if most < 1:
            raise ValueError(f"--seq-length {self.length}: must be more than the {tokens} tokens that a task generates")
        ends = self.here.opened.ends(self.tokenizer).union(() if self.chat is None else self.chat.ends)
        # Each byte of a stop string (up to 4 per character) may be a token, and earlier tokens may contain the string's
        # beginning.
        last = 4 * max((len(stop) for stop in until), default=0) + 8

        def stopped(ids: list[int]) -> bool:
            text = decode(ids[-last:]) if until else ""
            return any(stop in text for stop in until)

        answers = continue_prompts(
            self.here.decoding_stage,
            self.scorer.mesh,
            self.scorer.device,
            [(self.encode(prompt) or [self.begin])[-most:] for prompt in prompts],
            tokens,
            how,
            ends=ends,
            stop=stopped,
            known=self.tokenizer.vocab_size,
            relay=self.here.relay,
        )
        return [decode(ids[:-1] if ids and ids[-1] in ends else ids) for ids in answers]


def language_model(native: NativeModel) -> object:
    """Return a model wrapped in lm-eval's interface."""
    from lm_eval.api.model import TemplateLM

    class MegaLM(TemplateLM):  # type: ignore[misc]
        @property
        def eot_token_id(self) -> int:
            return native.tokenizer.eod if native.tokenizer.eod is not None else native.begin

        @property
        def prefix_token_id(self) -> int:
            return native.begin

        @property
        def tokenizer_name(self) -> str:
            return native.tokenizer.fingerprint()

        def chat_template(self, chat_template: bool | str = False) -> str:
            return native.chat.template if chat_template and native.chat is not None else ""

        def apply_chat_template(
            self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
        ) -> str:
            assert native.chat is not None
            return native.chat.text(chat_history, add_generation_prompt)

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
            return native.encode(string, add_special_tokens)

        def _loglikelihood_tokens(self, requests: Any, **_: object) -> list[tuple[float, bool]]:
            answers = native.log_likelihoods([(context, continuation) for _, context, continuation in requests])
            for (key, _, _), answer in zip(requests, answers, strict=True):
                self.cache_hook.add_partial("loglikelihood", key, answer)
            return answers

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            return rolling(native, [request.args[0] for request in requests])

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return generated(native, [request.args for request in requests])

    return MegaLM()


def rolling(native: NativeModel, texts: Sequence[str]) -> list[float]:
    """Return the log-probability of each text, summed over consecutive windows that the harness cuts. The
    beginning-of-text token precedes the first window and is not scored."""
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    windows, owners = [], []
    for number, text in enumerate(texts):
        for window in get_rolling_token_windows(native.encode(text, special=False), native.begin, native.length, 1):
            windows.append(make_disjoint_window(window))
            owners.append(number)
    sums = [0.0] * len(texts)
    for number, (value, _) in zip(owners, native.log_likelihoods(windows), strict=True):
        sums[number] += value
    return sums


def generated(native: NativeModel, requests: Sequence[tuple[str, Mapping[str, object]]]) -> list[str]:
    """Return the answer to each prompt. Prompts with identical generation options are processed together."""
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

    answers: dict[int, str] = {}
    groups: dict[str, list[int]] = {}
    for number, (_, arguments) in enumerate(requests):
        groups.setdefault(json.dumps(arguments, sort_keys=True, default=str), []).append(number)
    at_once = 4 * AT_ONCE * native.scorer.mesh.dp.size
    for key, numbers in groups.items():
        generation = normalize_gen_kwargs(dict(requests[numbers[0]][1]), MOST_NEW_TOKENS)
        until = [each for each in generation["until"] if each]

        def answer(
            asked: list[tuple[str, int]], how: Mapping[str, Any] = generation, until: Sequence[str] = until
        ) -> list[str]:
            sampling = [_sampling(how, native.here.run.runtime.seed, each) for each in asked]
            prompts = [prompt for prompt, _ in asked]
            texts = native.continuations(prompts, until, int(how["max_gen_toks"]), sampling)
            return [postprocess_generated_text(text, until, None) for text in texts]

        prompts, occurrences = [requests[number][0] for number in numbers], Counter[str]()
        # A repeated prompt is numbered, so that each repetition is sampled with another seed.
        numbered_prompts: list[tuple[str, int]] = []
        for prompt in prompts:
            numbered_prompts.append((prompt, occurrences[prompt]))
            occurrences[prompt] += 1
        texts = native.answers.each(f"generate {key}", numbered_prompts, answer, at_once, lambda each: len(each[0]))
        answers |= dict(zip(numbers, texts, strict=True))
    return [answers[number] for number in range(len(requests))]


def _sampling(how: Mapping[str, Any], seed: int, asked: tuple[str, int]) -> Sampling:
    """Return the sampling parameters given by the task's options. The seed depends only on the request. Errors:
    ValueError if the options are invalid."""
    if not how.get("do_sample"):
        return Sampling(temperature=0.0)
    digest = hashlib.sha256(json.dumps([seed, asked]).encode()).digest()
    return Sampling(
        temperature=float(how.get("temperature") or 0.0),
        top_k=int(how.get("top_k") or 0),
        top_p=float(how.get("top_p") or 1.0),
        seed=int.from_bytes(digest[:7], "big"),
    )
