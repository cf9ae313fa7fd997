"""Flags of Megatron-LM (2019 to 2026) and of DeepSpeed's forks of it that are no options here: those that mean nothing
any more, and those refused.

A flag that *is* an option carries its Megatron-LM spelling in config/sections.py, those of 2019 too; what a program's
name stands for is in programs.py. The flags below are accepted with one line on why they change nothing, or
refused with one line on why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from mega.argv import Drops, Refuses


class Ignored(NamedTuple):
    """A flag that changes nothing: how many values follow it (-1: all), and why; families: those whose scripts alone
    have it; only: the values at which it changes nothing, () is any."""

    values: int
    reason: str
    families: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


def _ignored(reason: str, values: int, names: str, only: tuple[str, ...] = ()) -> dict[str, Ignored]:
    """A row for each of `names`, which are written without their dashes."""
    return {f"--{name}": Ignored(values, reason, only=only) for name in names.split()}


def _refused(reason: str, names: str) -> dict[str, str]:
    """As `_ignored`."""
    return {f"--{name}": reason for name in names.split()}


_FUSED = "operators are chosen by --ops, and `mega doctor` names them"
_ALWAYS_LOGGED = "it is logged always"
_NO_RANDOM_STATE = "dropout is a function of seed and sample, so there is no random state to save or load"
_ONE_BUFFER = "gradients always lie in contiguous buckets"
_NO_HISTORY = "fp8 scales are of the tensor at hand, without margin, interval or history"
_TIMED = "step times are logged always"
_ONE_FORM = "checkpoints are saved in one form, which any layout reads; see mega convert-llama for others"
_SERVICE = "there is no such service"
_STRAGGLERS = "ranks that others wait for are named at the end"
_READ_AT_ONCE = "token files are made before, by mega preprocess, and read where they lie"
_RESTARTS = "ranks that fail end the run; start it again with --resume auto"
_CHECKPOINTS = "a checkpoint states what it holds, and is read so"
_DEVICE = "kernels, buffers and streams are chosen where the device is known"
_SERVED = "it steers Megatron-core's engine; see mega serve"
_FP32_STATE = "masters, moments and reduced gradients are kept in fp32"

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
    **_ignored(
        _DEVICE,
        0,
        "disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs"
        " disable-tp-comm-split-ag disable-tp-comm-split-rs tp-comm-overlap-rs-dgrad disable-symmetric-registration"
        " use-nccl-ub use-sharp ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw"
        " ddp-reduce-scatter-with-fp32-accumulation no-align-grad-reduce"
        " no-align-param-gather delay-param-gather overlap-param-gather-with-optimizer-step"
        " overlap-p2p-communication-warmup-flush no-overlap-p2p-communication defer-embedding-wgrad-compute"
        " delay-wgrad-compute no-gradient-reduce-div-fusion"
        " no-clone-scatter-output-in-embedding create-all-gather-group fsdp-double-buffer fsdp-manual-registration"
        " fsdp-db-use-persist-buf-on-alloc-fail torch-fsdp2-no-reshard-after-forward use-tp-pp-dp-mapping"
        " disable-gloo-process-groups disable-jit-fuser"
        " disable-bf16-reduced-precision-matmul te-rng-tracker inference-rng-tracker gtp-remat-nccl-ub"
        " gtp-expert-remat-nccl-ub optimizer-cuda-graph external-cuda-graph use-te-activation-func"
        " use-fused-weighted-squared-relu no-pin-cpu-grads no-pin-cpu-params overlap-cpu-optimizer-d2h-h2d"
        " use-torch-optimizer-for-cpu-offload init-model-with-meta-device use-gpu-initialization"
        " gtp-remat-reduce-scatter-with-fp32-accumulation enable-full-sharding-in-hsdp keep-fp8-transpose-cache"
        " keep-fp8-transpose-cache-when-using-custom-fsdp reuse-grad-buf-for-mxfp8-param-ag"
        " fp8-param-gather no-use-layer-wise-param-layout"
        " nccl-all-reduce-for-prefill flash-decode",
    ),
    **_ignored(
        _DEVICE,
        1,
        "tp-comm-overlap-cfg tp-comm-bootstrap-backend nccl-communicator-config-path sharp-enabled-group"
        " ddp-num-buckets suggested-communication-unit-size wgrad-deferral-limit symmetric-ar-type"
        " microbatch-group-size-per-virtual-pipeline-stage cuda-graph-warmup-steps train-sync-interval"
        " min-offloaded-tensor-size mlp-chunks-for-prefill refit-method pipeline-model-parallel-comm-backend"
        " distributed-timeout-seconds-after-init outer-dp-sharding-strategy tile-factor",
    ),
    **_ignored(
        _DEVICE,
        -1,
        "ddp-param-name-patterns-for-fp32-local-accumulation high-priority-stream-groups cuda-graph-scope"
        " cuda-graph-modules",
    ),
    **_ignored(_FP32_STATE, 1, "exp-avg-dtype exp-avg-sq-dtype main-grads-dtype main-params-dtype", only=("fp32",)),
    "--use-precision-aware-optimizer": Ignored(0, _FP32_STATE),
    "--optimizer-offload-fraction": Ignored(1, "all of it is offloaded, or nothing", only=("1", "1.0")),
    "--num-distributed-optimizer-instances": Ignored(1, "the optimizer is shared over all data ranks", only=("1",)),
    "--recompute-modules": Ignored(-1, "--recompute selective repeats attention alone", only=("core_attn",)),
    "--softmax-type": Ignored(1, "attention's softmax has no sink", only=("vanilla",)),
    "--fp8-recipe": Ignored(1, _NO_HISTORY, only=("delayed", "tensorwise")),
    # of DeepSpeed's forks
    "--deepspeed": Ignored(0, "its file is read by --deepspeed-config, and --zero does the rest"),
    **_ignored(
        "it only chose how DeepSpeed did it",
        0,
        "scattered-embeddings split-transformers synchronize-each-layer contigious-checkpointing"
        " deepspeed-activation-checkpointing memory-centric-tiled-linear use-pin-memory profile-backward",
    ),
    "--checkpoint-in-cpu": Ignored(0, "saved activations stay on the device; --recompute is what makes them few"),
    "--encoder-attn-mask-type": Ignored(
        1, "attention is causal, and --reset-attention-mask parts documents with either", only=("padding", "causal")
    ),
    "--remote-device": Ignored(1, "parameters stay on the device; --zero 3 shares them out"),
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
    **_ignored(
        _CHECKPOINTS,
        0,
        "use-mp-args-from-checkpoint-args ckpt-drop-redundant-extra-state"
        " no-use-tokenizer-model-from-checkpoint-args use-persistent-ckpt-worker dist-ckpt-save-pre-mcore-014"
        " distrib-optim-fully-reshardable-mem-efficient load-main-params-from-ckpt no-strict-fsdp-dtensor-load"
        " ckpt-convert-update-legacy-dist-opt-format"
        " replication load-model-opt-format ",
    ),
    **_ignored(
        _CHECKPOINTS,
        1,
        "dist-ckpt-workers replication-jump replication-factor non-persistent-save-interval non-persistent-ckpt-type"
        " non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo"
        " persistent-save-interval",
    ),
    # preprocessing and samples
    **_ignored(
        _READ_AT_ONCE, 0, "lazy-loader resume-dataloader loose-json presplit-sentences shuffle use-npy-data-loader"
    ),
    **_ignored(_READ_AT_ONCE, 1, "cache-dir text-key eval-text-key delim input-data-sizes-file chunk-size"),
    **_ignored(
        "datasets are opened as they lie",
        0,
        "dataloader-fast-cache-load dataloader-defer-npy-index-mmap enable-msc disable-msc allow-ambiguous-pad-tokens",
    ),
    **_ignored(
        "datasets are opened as they lie",
        1,
        "mid-level-dataset-surplus num-dataset-builder-threads object-storage-cache-path s3-cache-path"
        " per-dataset-sequences-path",
    ),
    **_ignored(
        "a tokenizer is built from its files alone, and nothing in them is executed",
        0,
        "legacy-tokenizer trust-remote-code tokenizer-hf-use-fast tokenizer-hf-no-use-fast"
        " tokenizer-sentencepiece-legacy tokenizer-hf-no-include-special-tokens",
    ),
    "--tokenizer-metadata": Ignored(1, "a tokenizer is built from its files alone, and nothing in them is executed"),
    **_ignored("norms and type embeddings compute in at least fp32", 0, "fp32-layernorm fp32-tokentypes"),
    "--deep-init": Ignored(0, "output projections always begin with --init-std / sqrt(2 x layers)"),
    "--padded-vocab-size": Ignored(1, "--vocab-multiple pads the vocabulary"),
    "--no-create-attention-mask-in-dataloader": Ignored(0, "masks are made where attention is computed"),
    "--max-preds-per-seq": Ignored(1, "TFRecords hold how many words they mask", families=("bert",)),
    "--dataset-impl": Ignored(1, "token files are always written in the mmap format"),
    "--partitions": Ignored(1, "--workers share one input"),
    "--keep-sequential-samples": Ignored(0, "documents always keep the order of the input"),
    "--log-interval": Ignored(1, "progress is reported every few seconds"),
    # restarts, faults and services
    **_ignored(
        _RESTARTS,
        0,
        "inprocess-restart enable-ft-package calc-ft-timeouts run-workload-inspector-server test-mode"
        " inprocess-empty-cuda-cache",
    ),
    "--exit-signal": Ignored(1, "the signals that schedulers send are heeded"),
    "--rerun-mode": Ignored(1, "a step is not run twice; see --audit-interval"),
    "--result-rejected-tracker-filename": Ignored(1, "a step is not run twice; see --audit-interval"),
    **_ignored(
        _SERVED,
        0,
        "use-legacy-static-engine decode-only-cuda-graphs enable-chunked-prefill disable-chunked-prefill"
        " use-same-sampling-seed-across-dp-ranks initialize-socket-comms",
    ),
    "--num-speculative-tokens": Ignored(1, _SERVED),
    # logging
    **_ignored(
        _ALWAYS_LOGGED,
        0,
        "log-progress log-energy log-max-attention-logit check-for-spiky-loss check-for-large-grads",
    ),
    **_ignored(
        _SERVICE,
        1,
        "app-tag-run-name app-tag-run-version one-logger-entity otel-service-name otel-span-groups"
        " logging-level config-logger-dir",
    ),
    "--otel-enabled": Ignored(0, _SERVICE),
    **_ignored(_STRAGGLERS, 1, "straggler-ctrlr-port straggler-minmax-count"),
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

_SHAPED = "layers of other kinds than the decoder's own are not built yet"
_RULE = "this update rule is not built; valid --optimizer: adam, sgd, lamb, adafactor"
_LATENT = "multi-latent attention is not built yet"
_OFFLOAD = "saved activations stay on the device; use --recompute"
_UNEQUAL = "use --stage-layers, the blocks of each stage"
_FAMILIES_OF_FLAGS = {
    "--moe-": _MOE,
    "--expert-": _MOE,
    "--rl-": "reinforcement learning is not built; see mega finetune --task dpo",
    "--grpo-": "reinforcement learning is not built; see mega finetune --task dpo",
    "--langrl-": "reinforcement learning is not built; see mega finetune --task dpo",
    "--retro-": "belongs to Retro, which is not built yet",
    "--dino-": "belongs to vision models, which are not built",
    "--hybrid-": _SHAPED,
    "--mamba-": _SHAPED,
    "--linear-": _SHAPED,
    "--dsa-": _SHAPED,
    "--heterogeneous-": _SHAPED,
    "--mtp-": "prediction of several tokens is not built yet",
    "--yarn-": "YaRN's positions are not built; see --rope-scaling",
    "--no-yarn-": "YaRN's positions are not built; see --rope-scaling",
    "--mscale": "YaRN's positions are not built; see --rope-scaling",
    "--muon-": _RULE,
    "--lion-": _RULE,
    "--logits-": "distillation is not built yet",
    "--fp4-": "GEMMs in fp4 are not built; see --fp8",
    "--kitchen-": "other packages' GEMMs are not built; see --fp8",
    "--qk-clip": "clipped attention weights are not built yet",
    "--relative-attention-": "relative positions are not built; --position says which are",
    "--tiktoken-": "Llama 3's pattern is the only one; use --tokenizer Llama3Tokenizer, or HuggingFaceTokenizer",
    "--phase-transition-": "a run has one schedule; start another with --load and --override-schedule",
}

BEGINNINGS: Mapping[str, Ignored | str] = {
    **_FAMILIES_OF_FLAGS,
    "--inference-": Ignored(-1, _SERVED),
    "--inprocess-": Ignored(-1, _RESTARTS),
    "--ft-": Ignored(-1, _RESTARTS),
    "--error-injection-": "faults are not made on purpose",
    "--one-logger-": Ignored(-1, _SERVICE),
    "--megatron-fsdp-": Ignored(-1, "use --zero 3"),
    "--fault-injector-": "faults are not made on purpose",
}
"""How flags begin that have no row of their own -> what all of them come to."""

REFUSED: Mapping[str, str] = {
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
    **_refused(_PROFILE, "use-pytorch-profiler record-memory-history memory-snapshot-path"),
    "--decoupled-lr": "embedding and head have the rate of all; only --lr is built",
    "--decoupled-min-lr": "embedding and head have the rate of all; only --min-lr is built",
    "--embedding-init-method-std": "embeddings begin as the linears do, with --init-std",
    "--window-size": "names tokens to the left; use --window, which counts the token itself too",
    "--window-attn-skip-freq": "every layer has the same --window",
    "--rotary-interleaved": "pairs of rotary dimensions are half a head apart, as in Hugging Face's Llama",
    "--no-rope-freq": "every layer has positions",
    "--rotary-scaling-factor": "YaRN's positions are not built; see --rope-scaling",
    "--mrope-section": "positions have one dimension",
    **_refused(_LATENT, "multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim"),
    **_refused(_LATENT, "cache-mla-latents mla-down-proj-fusion"),
    **_refused(
        _SHAPED,
        "disable-mamba-mem-eff-path is-hybrid-model spec experimental-attention-variant attention-output-gate"
        " enable-experimental",
    ),
    **_refused("the feed-forward layer's activations are those of --activation", "quick-geglu glu-linear-offset"),
    "--activation-func-clamp-value": "the feed-forward layer's activations are those of --activation",
    "--qk-l2-norm": "queries and keys are normalised by --qk-norm, with weights",
    "--apply-wd-to-qk-layernorm": "one-dimensional weights do not decay",
    "--no-weight-decay-cond-type": "one-dimensional weights do not decay, and all others do",
    **_refused(_OFFLOAD, "cpu-offloading-num-layers fine-grained-activation-offloading offload-modules"),
    "--fp4-format": "GEMMs in fp4 are not built; see --fp8",
    **_refused("all blocks multiply alike", "first-last-layers-bf16 num-layers-at-start-in-bf16"),
    **_refused("all blocks multiply alike", "num-layers-at-end-in-bf16 te-precision-config-file fp8-quantizer-factory"),
    "--output-logit-dtype": "the loss always runs in at least fp32",
    **_refused(_UNEQUAL, "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers"),
    **_refused(_UNEQUAL, "pipeline-model-parallel-layout account-for-embedding-in-pipeline-split"),
    **_refused(_UNEQUAL, "account-for-loss-in-pipeline-split"),
    **_refused(
        "encoder and decoder share one --tp; see --split-rank",
        "encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size",
    ),
    **_refused("context ranks form one ring", "hierarchical-context-parallel-sizes hybrid-context-parallel"),
    "--max-seqlen-per-cp-rank": "context ranks form one ring",
    "--use-megatron-fsdp": "use --zero 3",
    "--use-custom-fsdp": "use --zero 3",
    "--batch-invariant-mode": "belongs to mega serve and mega generate as --batch-invariant; see --deterministic",
    "--ckpt-step": "give --load DIR/step-NNNNNNN, the step's own directory",
    "--ckpt-convert-format": "see mega reshard",
    "--ckpt-convert-save": "see mega reshard",
    "--override-ckpt-iteration": "a run resumes where its checkpoint is; --finetune starts at step 0",
    "--iterations-to-skip": "steps are trained in order; where a run blew up, --resume auto starts before",
    "--decrease-batch-size-if-needed": "the batch is what --global-batch says, or it is refused",
    "--data-args-path": "give the file's words after --data-path",
    "--per-split-data-args-path": "give the file's words after --train-data, --valid-data and --test-data",
    "--full-validation": "--eval-iters says how many batches are validated",
    "--multiple-validation-sets": "use --valid-sets, each as name=prefix",
    "--renormalize-blend-weights": "weights of a blend are shares, and always normalised",
    "--dataloader-inter-document-masking": "use --reset-attention",
    **_refused("a tokenizer's special tokens are its files'", "tokenizer-special-tokens"),
    **_refused("documents are encoded without special tokens", "tokenizer-hf-include-special-tokens"),
    "--fake-process-group": "see --dry-run, which needs no ranks",
    "--dump-param-to-param-group-map": "see mega checkpoint show --tensors",
    "--use-kitchen-attention": "other packages' GEMMs are not built; see --fp8",
    "--sft": "see mega finetune --chat-data",
    "--sft-tokenizer-prompt-format": "see mega finetune --chat-template",
    "--freeze-all-layers": "all weights are trained, or adapters alone: see --lora-rank",
    "--perform-rl-step": "reinforcement learning is not built; see mega finetune --task dpo",
    "--yaml-cfg": "give a TOML file by --config; --print-config shows one",
    **_refused(_MOE, " overlap-moe-expert-parallel-comm ep-overlap-early-attn-memory-release"),
    "--save-wgrads-interval": "gradients are not saved",
    "--save-dgrads-interval": "gradients are not saved",
    # of 2019
    "--pretrained-bert": "give the weights as --load with --finetune, where they lie",
    **_refused("belongs to scoring; see mega eval", "eval-batch-size eval-seq-length eval-max-preds-per-seq eval-hf"),
    "--load-openai": "give the weights in Hugging Face's form as --load, where they lie",
    "--model-spec": "layers are chosen by options, not by module names",
    **dict.fromkeys(_RETRO, "belongs to Retro, which is not built yet"),
    **dict.fromkeys(_RETRIEVAL, "belongs to retrieval models, which are not built yet"),
    **dict.fromkeys(_VISION, "belongs to vision models, which are not built"),
    **dict.fromkeys(_TASKS, "belongs to a task, not to pretraining; see mega finetune and mega eval"),
    **dict.fromkeys(_SERVER, "belongs to the server, not to training; see mega serve"),
}


def obsolete_flags() -> Mapping[str, Drops | Refuses]:
    """Every flag of the tables above, and what becomes of it; those of `BEGINNINGS` end in `*`."""
    beginnings = {f"{beginning}*": what for beginning, what in BEGINNINGS.items()}
    return {
        name: Drops(*what) if isinstance(what, Ignored) else Refuses(what)
        for name, what in {**IGNORED, **REFUSED, **beginnings}.items()
    }
