"""Checks the model of an evaluation in the process that the user started, and then loads the model on every rank.

check_model    opens the model that --load names and checks layout and flags, before any rank starts
as_rank        runs a function as one rank of the job
open_here      opens one rank's shard of the model, in any layout
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

from mega.core.activity import ACTIVITY
from mega.core.architecture import architecture
from mega.core.checkpoint.forms.huggingface import scales_dynamically
from mega.core.config.check import check
from mega.core.config.check_mixture import inference_ranks
from mega.core.config.compose import GivenOptions
from mega.core.config.presets import FAMILY_DEFAULTS, PRESETS
from mega.core.config.resolve import resolve, variant
from mega.core.config.run import Options, RunConfig, entries, flag_of, options_with, updated, value_of
from mega.core.config.sections import LABELLED, TOKENIZER_FILES, ModelConfig
from mega.core.device import DTYPE_NAMES, DTYPES, Device, restored_settings
from mega.core.family import ModelStage, family
from mega.core.inference.loading.identity import check_tokenizer_flags
from mega.core.inference.loading.load import OpenedModel, check_tokenizer, compute_dtype, load_stages, open_model
from mega.core.inference.loading.same import check_same_model
from mega.core.inference.relay import Relay, relay_of
from mega.core.inference.retrieval import Retriever, check_retrieval, read_by
from mega.core.ops.suite import Ops
from mega.core.parallel.mesh import Groups, Mesh
from mega.core.processes.connect import connect, connected, disconnect
from mega.core.tasks.labels import check_head
from mega.core.tasks.score import RowScorer, TokenScorer
from mega.core.text.build import build
from mega.core.text.kind import kind_of_files
from mega.core.text.tokenizer import Tokenizer
from mega.core.training.start.equal import flags
from mega.core.training.wire import build_mesh, chosen_ops
from mega.core.untrusted import numbers_below

Answer = TypeVar("Answer")

MICRO_BATCH = 4
"""Number of rows in a microbatch if --micro-batch is not given, as in Megatron-LM's early evaluations."""
LONGEST = 4096
"""Upper limit of the default --seq-length, because some models have positions for many more tokens."""


@dataclass(frozen=True)
class CheckedModel:
    """A model that `check_model` has accepted. run: resolved layout and other options. typed_dtype: whether --dtype was
    given. load: the path or name given by --load."""

    run: RunConfig
    typed_dtype: bool
    load: str

    @property
    def length(self) -> int:
        return self.run.batch.seq_length

    @property
    def micro_batch(self) -> int:
        return self.run.batch.micro_batch


@dataclass(frozen=True)
class ModelHere:
    """One rank's shard of a model. run: the resolved options, with the dtype of the computation."""

    run: RunConfig
    opened: OpenedModel
    mesh: Mesh
    device: Device

    def scorer(self, *, greedy: bool, retriever: Retriever | None = None) -> TokenScorer:
        """Load the weights of this rank's stages, and return a scorer that runs them. retriever: finds neighbours for a
        model with a retriever. Errors: CheckpointError naming file or tensor."""
        model = self.run.model
        reads = None if retriever is None else partial(read_by, retriever, model)
        return TokenScorer(model, self.stages, self.mesh, self.device, self._ops, greedy=greedy, reads=reads)

    def row_scorer(self) -> RowScorer:
        """Return a scorer as `scorer` does, for a model that classifies rows."""
        return RowScorer(self.stages, self.mesh, self.device)

    @property
    def _ops(self) -> Ops:
        return chosen_ops(self.run, self.device.torch)

    @cached_property
    def stages(self) -> list[ModelStage]:
        """This rank's stages, whose weights are loaded on first use. Errors: CheckpointError naming file or tensor."""
        parallel = self.run.parallel
        return self._load(parallel.sequence_parallel, bool(parallel.tp_overlap))

    @cached_property
    def decoding_stage(self) -> object:
        """This rank's stage for an engine: the stage in `stages`, unless the layout splits the tokens of a row over the
        tensor ranks, which decoding does not support. In that case, a second copy is loaded."""
        parallel = self.run.parallel
        shared = parallel.sequence_parallel or parallel.tp_overlap
        return (self._load(False, False) if shared else self.stages)[0]

    @cached_property
    def relay(self) -> Relay | None:
        """The connection between the ranks of the model; all engines of the model share this connection."""
        return relay_of(self.mesh)

    def _load(self, sequence: bool, overlap: bool) -> list[ModelStage]:
        run = self.run
        return load_stages(
            self.opened,
            self.mesh,
            self.device,
            dtype=DTYPES[run.precision.dtype],
            ops=self._ops,
            sequence=sequence,
            overlap=overlap,
            stage_layers=run.parallel.stage_layers,
        )


def check_model(
    options: Options, given: GivenOptions, world: int, task: str | None = None, *, retrieves: bool = False
) -> tuple[CheckedModel, OpenedModel]:
    """Open the model that --load names, and check that the layout and the flags are valid for this model.

    task: name of the task. For a task with labels, the model must have the task's head; otherwise the model must
    generate text. retrieves: whether a model with a retriever may use the database of --retro. Errors: ValueError
    naming flag or file, its value, and the rule.
    """
    load = options.checkpoint.load
    if load is None:
        raise ValueError("--load is missing: give a run's directory, one step in it, or a directory of others' weights")
    files = [getattr(options.tokenizer, name) for name in TOKENIZER_FILES]
    if any(files) and options.tokenizer.tokenizer is None:
        options = updated(options, {"tokenizer": kind_of_files(*files)})
    model_files = open_model(load)
    if task in LABELLED:
        check_head(model_files.path, model_files.model, task)
    elif retrieves:
        check_retrieval(model_files.model, options.data.retro, load)
    if (
        task not in LABELLED
        and family(model_files.model).prompt is None
        and not (retrieves and model_files.model.retriever)
    ):
        kind = "with --retriever" if model_files.model.retriever else f"of --family {model_files.model.family}"
        raise ValueError(f"--load {load}: is a model {kind}, which does not continue text")
    model = _model(model_files, given)
    values = {name: value_of(options, name) for name in options_with(evaluated=True)}
    values["sample_kind"] = FAMILY_DEFAULTS[model.family].values.get("sample_kind", "gpt")
    # By default, labelled rows are as long as in finetuning, and texts use all positions of the model, up to LONGEST.
    usual = model_files.trained_length if task in LABELLED else None
    room = min(architecture(model).positions, LONGEST)
    values["seq_length"] = options.batch.seq_length or usual or room - room % row_unit(model)
    # Prepared files contain no neighbours for these samples, so neighbours are searched for during scoring.
    values["retro"] = None
    values["micro_batch"] = options.batch.micro_batch or MICRO_BATCH
    evaluated = updated(Options(model=model), {**values, "load": None, "mock_data": True, "skip_train": True})
    check(evaluated, world)
    run = resolve(evaluated, world)
    if problems := list(inference_ranks(run)):
        raise ValueError("\n".join(problems))
    return CheckedModel(run, "dtype" in given.values, load), model_files


def row_unit(model: ModelConfig) -> int:
    """Return the number that must divide a row's number of columns: the chunk size if the model has a retriever, else
    1."""
    return model.retro_chunk_length if model.retriever else 1


def _model(opened: OpenedModel, given: GivenOptions) -> ModelConfig:
    """Return the configuration stored with the model. Errors: ValueError if a flag or a preset contradicts it."""
    model, problems = opened.model, []
    options = {**(PRESETS[given.preset] if given.preset is not None else {}), **given.values}
    if not architecture(model).input.learned_positions and options.get("positions"):
        positions = int(numbers_below(options)["positions"])
        if not (positions > model.positions and scales_dynamically(opened.attachments)):
            model = dataclasses.replace(model, positions=positions)
            del options["positions"]
    for name in (*options_with(on_resume="must match"), "positions"):
        if entries()[name].section == "model" and options.get(name) not in (None, getattr(model, name)):
            problems.append(f"{flag_of(name)} {options[name]}: the model at {opened.path} has {getattr(model, name)}")
    if problems:
        raise ValueError("\n".join(problems))
    return model


def open_here(checked: CheckedModel, rank: int, world: int, device: Device, groups: Groups | None) -> ModelHere:
    """Open one rank's shard. Without --dtype, the computation uses the weights' dtype, but at least fp32 on a CPU.
    Errors: ValueError on every rank if ranks differ in code, flags or weights."""
    model, run = open_model(checked.load), checked.run
    if not checked.typed_dtype:
        run = variant(run, {"dtype": DTYPE_NAMES[compute_dtype(model, device)], "grad_dtype": None})
    mesh = build_mesh(run, rank, world, groups)
    check_same_model(model, mesh, device, flags(run))
    return ModelHere(run, model, mesh, device)


def as_rank(run: RunConfig, job: Callable[[int, int, Device, Groups], Answer]) -> Answer:
    """Join the process group that the environment describes, run `job`, and return the result of `job`. Errors: those
    of `job`."""
    runtime, was_connected = run.runtime, connected()
    with restored_settings():
        world, device, groups = connect(runtime.device, runtime.backend, runtime.timeout_minutes)
        if runtime.deterministic:
            device.deterministic()
        ACTIVITY.phase = "scoring"
        answer = job(world.rank, world.size, device, groups)
    if not was_connected:
        disconnect()
    return answer


def tokenizer_of(
    run: RunConfig, opened: OpenedModel, report: Callable[[str], None] = lambda line: None
) -> Tokenizer | None:
    """Return the tokenizer given by flags, otherwise the one stored with the model; None if neither exists. If both
    exist, they must be identical.

    report: function that receives messages for the user. Errors: ValueError.
    """
    if run.tokenizer.tokenizer is not None:
        tokenizer = build(**dataclasses.asdict(run.tokenizer))
        allowed = run.data.allow_tokenizer_mismatch
        for line in check_tokenizer_flags("eval", opened, opened.path, tokenizer, allowed=allowed):
            report(line)
    elif opened.tokenizer_section() is None:
        return None
    else:
        tokenizer = opened.tokenizer()
    check_tokenizer(opened, tokenizer)
    return tokenizer


def model_settings(checked: CheckedModel, here: ModelHere) -> dict[str, object]:
    """Return the settings that identify the model in the record of a score."""
    return {
        "path": checked.load,
        "digest": here.opened.digest,
        "step": here.opened.step,
        "config": dataclasses.asdict(here.run.model),
    }


def layout_of(run: RunConfig) -> dict[str, object]:
    """Return the settings that affect a score only through rounding."""
    return {name: value_of(run, name) for name in ("tp", "cp", "pp", "sequence_parallel", "micro_batch")}
