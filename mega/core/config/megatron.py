"""Flags of Megatron-LM (2023, and today's core) that are no options here: those that mean nothing any more, and those
refused.

A flag that *is* an option carries its Megatron-LM spelling in config/sections.py. The flags below are
accepted with one line on why they change nothing, or refused with one line on why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Ignored(NamedTuple):
    """A flag that changes nothing: how many values follow it, and why; families: those whose scripts alone have it."""

    values: int
    reason: str
    families: tuple[str, ...] = ()


_FUSED = "operators are chosen by --ops, and `mega doctor` names them"
_ALWAYS_LOGGED = "it is logged always"
_NO_RANDOM_STATE = "dropout is a function of seed and sample, so there is no random state to save or load"
_ONE_BUFFER = "gradients always lie in contiguous buckets"
_NO_HISTORY = "fp8 scales are of the tensor at hand, without margin, interval or history"
_TIMED = "step times are logged always"
_ONE_FORM = "checkpoints are saved in one form, which any layout reads; see mega convert-llama for others"
_SERVICE = "there is no such service"
_STRAGGLERS = "ranks that others wait for are named at the end"

IGNORED: Mapping[str, Ignored] = {
    # fusions and kernels
    "--use-flash-attn": Ignored(0, _FUSED),
    "--attention-backend": Ignored(1, _FUSED),
    "--transformer-impl": Ignored(1, _FUSED),
    "--no-masked-softmax-fusion": Ignored(0, _FUSED),
    "--no-bias-dropout-fusion": Ignored(0, _FUSED),
    "--no-bias-swiglu-fusion": Ignored(0, _FUSED),
    "--no-rope-fusion": Ignored(0, _FUSED),
    "--no-persist-layer-norm": Ignored(0, _FUSED),
    "--no-gradient-accumulation-fusion": Ignored(0, _FUSED),
    "--cross-entropy-loss-fusion": Ignored(0, _FUSED),
    "--cross-entropy-fusion-impl": Ignored(1, _FUSED),
    "--use-mcore-models": Ignored(0, "there is one implementation of each model"),
    "--use-legacy-models": Ignored(0, "there is one implementation of each model"),
    "--onnx-safe": Ignored(1, "there is no exporter to be safe for"),
    # numerics
    "--no-query-key-layer-scaling": Ignored(0, "query-key layer scaling is never applied"),
    "--apply-query-key-layer-scaling": Ignored(0, "softmax runs in fp32, where the scaling cancels out"),
    "--attention-softmax-in-fp32": Ignored(0, "softmax always runs in at least fp32"),
    "--fp16-lm-cross-entropy": Ignored(0, "the loss always runs in at least fp32"),
    "--no-check-for-nan-in-loss-and-grad": Ignored(0, "the gradient norm is looked at anyway"),
    "--fp8-margin": Ignored(1, _NO_HISTORY),
    "--fp8-interval": Ignored(1, _NO_HISTORY),
    "--fp8-amax-history-len": Ignored(1, _NO_HISTORY),
    "--fp8-amax-compute-algo": Ignored(1, _NO_HISTORY),
    # ranks and communication
    "--no-async-tensor-model-parallel-allreduce": Ignored(0, "overlap is decided by the layers themselves"),
    "--no-scatter-gather-tensors-in-pipeline": Ignored(0, "it only chooses how stages exchange tensors"),
    "--overlap-p2p-communication": Ignored(0, "stages always overlap their exchanges"),
    "--use-ring-exchange-p2p": Ignored(0, "it only chooses how stages exchange tensors"),
    "--delay-grad-reduce": Ignored(0, "gradients leave when their bucket is complete"),
    "--no-delay-grad-reduce": Ignored(0, "gradients leave when their bucket is complete"),
    "--DDP-impl": Ignored(1, _ONE_BUFFER),
    "--no-contiguous-buffers-in-local-ddp": Ignored(0, _ONE_BUFFER),
    "--use-contiguous-buffers-in-local-ddp": Ignored(0, _ONE_BUFFER),
    "--local_rank": Ignored(1, "the rank is read from the environment"),
    "--lazy-mpu-init": Ignored(1, "the mesh is built at once"),
    "--use-mpi": Ignored(0, "ranks are read from the environment, mpirun's too"),
    "--deepspeed": Ignored(0, "its file is read by --deepspeed-config, and --zero does the rest"),
    "--zero-allgather-bucket-size": Ignored(1, "weights are gathered bucket by bucket; see --bucket-size"),
    "--zero-contigious-gradients": Ignored(0, _ONE_BUFFER),
    "--zero-reduce-scatter": Ignored(0, "what is shared out is always reduced so"),
    "--adlr-autoresume": Ignored(0, "it belongs to one vendor's cluster; see --resume auto"),
    "--adlr-autoresume-interval": Ignored(1, "it belongs to one vendor's cluster; see --resume auto"),
    # start, memory, files
    "--use-cpu-initialization": Ignored(0, "initial weights are the same on every device and layout"),
    "--no-initialization": Ignored(0, "initial weights cost next to nothing"),
    "--empty-unused-memory-level": Ignored(1, "memory is left to torch"),
    "--no-load-rng": Ignored(0, _NO_RANDOM_STATE),
    "--no-save-rng": Ignored(0, _NO_RANDOM_STATE),
    "--data-impl": Ignored(1, "token files are always memory-mapped"),
    "--mmap-warmup": Ignored(0, "token files are read when they are needed"),
    "--no-data-sharding": Ignored(0, "every sample order is global"),
    "--inference-batch-times-seqlen-threshold": Ignored(1, "it means nothing in training"),
    "--max-tokens-to-oom": Ignored(1, "it means nothing in training"),
    "--ckpt-format": Ignored(1, _ONE_FORM),
    "--dist-ckpt-format": Ignored(1, _ONE_FORM),
    "--use-dist-ckpt": Ignored(0, _ONE_FORM),
    "--auto-detect-ckpt-format": Ignored(0, _ONE_FORM),
    "--dist-ckpt-strictness": Ignored(1, "a checkpoint that lacks a tensor is refused"),
    "--dist-ckpt-optim-fully-reshardable": Ignored(0, _ONE_FORM),
    "--ckpt-fully-parallel-save": Ignored(0, "every rank always writes its part"),
    "--no-ckpt-fully-parallel-save": Ignored(0, "every rank always writes its part"),
    "--ckpt-fully-parallel-load": Ignored(0, "every rank reads what it holds"),
    "--ckpt-assume-constant-structure": Ignored(0, _ONE_FORM),
    "--manual-gc": Ignored(0, "Python's garbage is left to Python"),
    "--manual-gc-interval": Ignored(1, "Python's garbage is left to Python"),
    "--no-manual-gc-eval": Ignored(0, "Python's garbage is left to Python"),
    # preprocessing and samples
    "--no-create-attention-mask-in-dataloader": Ignored(0, "masks are made where attention is computed"),
    "--max-preds-per-seq": Ignored(1, "TFRecords hold how many words they mask", families=("bert",)),
    "--dataset-impl": Ignored(1, "token files are always written in the mmap format"),
    "--partitions": Ignored(1, "--workers share one input"),
    "--keep-sequential-samples": Ignored(0, "documents always keep the order of the input"),
    "--log-interval": Ignored(1, "progress is reported every few seconds"),
    # logging
    "--no-one-logger": Ignored(0, _SERVICE),
    "--enable-one-logger": Ignored(0, _SERVICE),
    "--one-logger-project": Ignored(1, _SERVICE),
    "--one-logger-run-name": Ignored(1, _SERVICE),
    "--one-logger-async": Ignored(0, _SERVICE),
    "--log-straggler": Ignored(0, _STRAGGLERS),
    "--disable-straggler-on-startup": Ignored(0, _STRAGGLERS),
    "--timing-log-level": Ignored(1, _TIMED),
    "--timing-log-option": Ignored(1, _TIMED),
    "--no-barrier-with-level-1-timing": Ignored(0, _TIMED),
    "--log-throughput": Ignored(0, _ALWAYS_LOGGED),
    "--tensorboard-queue-size": Ignored(1, "the writer flushes at every log interval"),
    "--log-timers-to-tensorboard": Ignored(0, _ALWAYS_LOGGED),
    "--log-batch-size-to-tensorboard": Ignored(0, _ALWAYS_LOGGED),
    "--no-log-learnig-rate-to-tensorboard": Ignored(0, _ALWAYS_LOGGED),
    "--no-log-learning-rate-to-tensorboard": Ignored(0, _ALWAYS_LOGGED),
    "--no-log-loss-scale-to-tensorboard": Ignored(0, _ALWAYS_LOGGED),
    "--log-validation-ppl-to-tensorboard": Ignored(0, _ALWAYS_LOGGED),
    "--log-memory-to-tensorboard": Ignored(0, _ALWAYS_LOGGED),
    "--log-world-size-to-tensorboard": Ignored(0, _ALWAYS_LOGGED),
}

_EMBEDDINGS = "embeddings of texts are not built yet"
_MOE = "mixtures of experts are not built yet"
_HYBRID = "gradients in fp8 are e5m2; use --fp8-hybrid, which is --fp8"
_WGRAD = "under --fp8 weight gradients are GEMMs in fp8 too; leave the flag out"
_PROFILE = "marking steps for a profiler is not built yet"

_RETRO = (
    "--retro-add-retriever",
    "--retro-workdir",
    "--retro-cyclic-train-iters",
    "--retro-encoder-layers",
    "--retro-encoder-hidden-dropout",
    "--retro-encoder-attention-dropout",
    "--retro-num-neighbors",
    "--retro-num-retrieved-chunks",
    "--retro-return-doc-ids",
)
_RETRIEVAL = (
    "--ict-head-size",
    "--ict-load",
    "--bert-load",
    "--biencoder-projection-dim",
    "--biencoder-shared-query-context-model",
    "--titles-data-path",
    "--evidence-data-path",
    "--block-data-path",
    "--embedding-path",
    "--query-in-block-prob",
    "--use-one-sent-docs",
    "--retriever-seq-length",
    "--retriever-report-topk-accuracies",
    "--retriever-score-scaling",
    "--indexer-batch-size",
    "--indexer-log-interval",
    "--sample-rate",
)
_VISION = (
    "--vision-pretraining",
    "--vision-pretraining-type",
    "--vision-backbone-type",
    "--swin-backbone-type",
    "--num-classes",
    "--img-h",
    "--img-w",
    "--num-channels",
    "--patch-dim",
    "--classes-fraction",
    "--data-per-class-fraction",
    "--head-lr-mult",
    "--mask-type",
    "--mask-factor",
    "--iter-per-epoch",
)
_TASKS = (
    "--overlapping-eval",
    "--strict-lambada",
)
_SERVER = ("--port", "--temperature", "--top_p", "--out-seq-length")

REFUSED: Mapping[str, str] = {
    # spellings that Megatron-LM itself gave up, with their successors
    "--batch-size": "was split in two; use --micro-batch and --global-batch",
    "--warmup": "was renamed; use --lr-warmup-fraction",
    "--model-parallel-size": "was renamed; use --tp",
    "--checkpoint-activations": "was renamed; use --recompute full",
    "--distribute-checkpointed-activations": "was renamed; use --distribute-saved",
    "--activations-checkpoint-method": "was renamed; use --recompute-method",
    "--activations-checkpoint-num-layers": "was renamed; use --recompute-layers",
    # not built
    "--output-bert-embeddings": _EMBEDDINGS,
    "--bert-embedder-type": _EMBEDDINGS,
    "--num-experts": _MOE,
    "--expert-parallel": _MOE,
    "--expert-model-parallel-size": _MOE,
    "--fp8-e4m3": _HYBRID,
    "--no-fp8-wgrad": _WGRAD,
    "--profile": _PROFILE,
    "--profile-step-start": _PROFILE,
    "--profile-step-end": _PROFILE,
    "--profile-ranks": _PROFILE,
    "--data-parallel-random-init": "weights that differ between replicas are not built yet",
    "--init-method-xavier-uniform": "only normal initial weights are built; use --init-std",
    "--standalone-embedding-stage": "a stage for the embedding alone is not built yet",
    "--model-spec": "layers are chosen by options, not by module names",
    **dict.fromkeys(_RETRO, "belongs to Retro, which is not built yet"),
    **dict.fromkeys(_RETRIEVAL, "belongs to retrieval models, which are not built yet"),
    **dict.fromkeys(_VISION, "belongs to vision models, which are not built"),
    **dict.fromkeys(_TASKS, "belongs to a task, not to pretraining; see mega finetune and mega eval"),
    **dict.fromkeys(_SERVER, "belongs to the server, not to training; see mega serve"),
}
