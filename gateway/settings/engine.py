"""Settings of the engine: which model is served, in which format, with how much memory, and how
requests are scheduled over which workers."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize
from pydantic_settings import BaseSettings, NoDecode

from gateway.settings.flags import duration
from gateway.settings.generation_config import check_override
from gateway.settings.options import option as _option
from gateway.settings.options import split
from gateway.settings.speculative_config import check_speculative_config

BUILTIN_MODEL = "builtin"


def _distinct_names(names: tuple[str, ...]) -> tuple[str, ...]:
    if not all(names) or len(set(names)) < len(names):
        raise ValueError("--served-model-name must be different names, separated by commas")
    return names


def _known_device(name: str) -> str:
    kind, _, number = name.partition(":")
    if name not in ("auto", "cpu", "cuda") and not (kind == "cuda" and number.isdecimal()):
        raise ValueError(f"--device must be auto, cpu, cuda or cuda:N, not {name!r}")
    return name


def _factor_above_1(factor: float) -> float:
    if 0.0 < factor <= 1.0:
        raise ValueError(f"--prefill-slowdown must be above 1, or 0 for no limit, not {factor:g}")
    return factor


class EngineSettings(BaseSettings):
    """The fields under `model`, `memory`, `scheduling` and `workers` of `podway serve --help`."""

    model: str = _option(
        BUILTIN_MODEL,
        "model",
        "a directory, a GGUF file, a Hugging Face model id, builtin (the model that comes with "
        "Podway), or random:SHAPE for benchmarks",
        "MODEL",
    )
    served_model_name: Annotated[
        tuple[str, ...], NoDecode, BeforeValidator(split), AfterValidator(_distinct_names)
    ] = _option(
        (),
        "model",
        "model names that clients use, separated by commas; default: the directory's name or the "
        "model id",
        "NAMES",
    )
    override_generation_config: Annotated[str, BeforeValidator(check_override)] = _option(
        "{}",
        "model",
        "a JSON object with defaults of sampling parameters, instead of those in the checkpoint's "
        "generation_config.json",
        "JSON",
    )
    task: Literal["auto", "generate", "embed", "score"] = _option(
        "auto",
        "model",
        "what the model is served for; auto: as its checkpoint says; embed: embeddings of texts; "
        "score: relevance of a document to a query (reranking)",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "auto", "model", "dtype of weights and activations; auto: the fastest that the device has"
    )
    weights: Literal["auto", "float32", "int8", "int4", "fp8"] = _option(
        "auto",
        "model",
        "format of the linear layers' weights; auto: as --dtype; int4: only on CPUs; "
        "fp8: only on Hopper GPUs",
    )
    activation_bits: Literal["auto", "8", "14"] = _option(
        "auto",
        "model",
        "bits to which int8 linears quantize their inputs on a CPU; auto: 8 if the CPU has VNNI, "
        "else 14; 14 keeps logits nearer to float32 and is slower on a CPU with VNNI",
    )
    device: Annotated[str, AfterValidator(_known_device)] = _option(
        "auto",
        "model",
        "cpu, cuda, or cuda:N for the GPU of the first worker; auto: a GPU if there is one",
        "DEVICE",
    )
    attention: str = _option("auto", "model", "name of the attention backend", "NAME")
    threads: int = _option(
        0,
        "model",
        "compute threads of each worker; 0: an equal share of the cores",
        "N",
        ge=0,
        le=1024,
    )
    thread_wait: Literal["spin", "sleep"] = _option(
        "spin",
        "model",
        "what compute threads do between kernels; spin: poll for 0.1 ms before they sleep; "
        "sleep: sleep almost at once, if other processes need the cores",
    )
    max_model_len: int = _option(
        0,
        "model",
        "maximum length of a prompt and its output; 0: the checkpoint's context length",
        "TOKENS",
        ge=0,
    )
    chat_template: Path | None = _option(
        None, "model", "a Jinja file to use instead of the checkpoint's chat template", "FILE"
    )
    trust_request_chat_template: bool = _option(
        False,
        "model",
        "accept the field chat_template in requests; such templates are rendered in a process of "
        "their own, with limits on time and memory",
    )
    tool_dialect: str = _option(
        "auto",
        "model",
        "format of the model's tool calls: auto (detected in the chat template), none, hermes, "
        "llama3, mistral, mistral-args, harmony, granite, phi4, gemma",
        "NAME",
    )
    reasoning_dialect: str = _option(
        "auto",
        "model",
        "format of the model's reasoning: auto, none, think (<think>), mistral, harmony",
        "NAME",
    )

    packed_cache: str = _option(
        "",
        "memory",
        "directory for weights that are packed for this CPU, which later starts map and workers "
        "share; default: packed in --cache-dir; off: pack at every start",
        "DIR",
    )
    packed_cache_size: ByteSize = _option(
        ByteSize(32 << 30),
        "memory",
        "maximum size of all files in --packed-cache, each as large as the weights of one model; "
        "the least recently used are removed",
        "SIZE",
    )
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"] = _option(
        "auto",
        "memory",
        "dtype of the KV cache; auto: float16 on a CPU, as --dtype on a GPU. float32 is for exact "
        "comparisons of logits on a CPU; int8 holds nearly twice as many tokens as float16",
    )
    kv_slots: int | None = _option(
        None,
        "memory",
        "size of the KV cache in tokens; default: what fits into memory",
        "N",
        ge=1,
    )
    kv_memory: ByteSize | None = _option(
        None,
        "memory",
        "size of the KV cache in bytes, for instance 2GiB; excludes --kv-slots",
        "SIZE",
        ge=1,
    )
    host_kv_memory: ByteSize = _option(
        ByteSize(0),
        "memory",
        "size of the host tier, which holds the KV cache of requests that are swapped out, and "
        "prefixes that the KV cache has no room for; 0: none",
        "SIZE",
        ge=0,
    )
    disk_kv: Path | None = _option(
        None,
        "memory",
        "directory of the disk tier, which keeps KV blocks of prefixes, also after the server has "
        "ended; for a CPU and a single worker. The files contain what prompts were about, and are "
        "readable by their owner only",
        "DIR",
    )
    disk_kv_memory: ByteSize = _option(
        ByteSize(10 << 30), "memory", "size of the disk tier of one model", "SIZE", ge=1
    )
    kv_store: str = _option(
        "",
        "memory",
        "store of KV blocks that servers of one model share, as mooncake://HOST:PORT (the address "
        "of mooncake_master; options: protocol, metadata, devices, host, segment); for a CPU and "
        "a single worker. The store gets what prompts were about",
        "URL",
    )
    disk_kv_read_ahead: bool = _option(
        True,
        "memory",
        "read what a waiting request will load from the disk tier into host memory while it waits",
    )
    gpu_memory_utilization: float = _option(
        0.9,
        "memory",
        "fraction of a GPU's memory that a worker may use for weights, workspace and KV cache",
        "FRACTION",
        gt=0,
        le=1,
    )
    swap: Literal["proactive", "reactive", "off"] = _option(
        "proactive",
        "memory",
        "when requests are swapped to the host tier (--host-kv-memory); proactive: before blocks "
        "run out, under policies that preempt; reactive: when blocks run out; off: never",
    )
    block_size: int = _option(16, "memory", "KV slots in a block", "N", ge=1, le=4096)
    prefix_cache: bool = _option(
        True,
        "memory",
        "keep the KV blocks of finished requests while there is room, for prompts with the same "
        "prefix",
    )

    admission: Literal["grow", "reserve", "request"] = _option(
        "grow",
        "scheduling",
        "grow: allocate KV blocks as needed, preempt when they run out; reserve: allocate for "
        "prompt + max_tokens on admission; request: static batches, one after the other "
        "(a baseline)",
    )
    max_batch_size: int = _option(
        64, "scheduling", "maximum requests in an iteration", "N", ge=1, le=65536
    )
    max_batch_tokens: int = _option(
        512,
        "scheduling",
        "maximum tokens in an iteration; longer prompts are computed in chunks",
        "TOKENS",
        ge=1,
    )
    max_step_seconds: float = _option(
        0.5,
        "scheduling",
        "target for the duration of an iteration that contains a prompt chunk, which bounds the "
        "ITL of running requests; 0: no target",
        "SECONDS",
        ge=0,
    )
    itl_goal: Annotated[float, BeforeValidator(duration)] = _option(
        0.0,
        "scheduling",
        "goal for the time between two tokens, such as 50ms: it bounds the prompt tokens beside "
        "decodes, and keeps requests waiting beyond what the goal allows; 0: no goal",
        "DURATION",
        ge=0,
    )
    prefill_slowdown: Annotated[float, AfterValidator(_factor_above_1)] = _option(
        2.0,
        "scheduling",
        "how much longer an iteration with running requests may take because of prompts, as a "
        "factor (more while few decode and many have a prompt to compute, and up to twice "
        "the factor once prompts have waited while seats are free); a prompt takes F / (F - 1) "
        "times as long; 0: no limit but --max-step-seconds. With --itl-goal the goal alone counts",
        "FACTOR",
        ge=0,
    )
    background_slowdown: float = _option(
        1.5,
        "scheduling",
        "how much longer an iteration with other requests may take because of batch lines, as a "
        "factor; 1: batch lines run only while there are no other requests",
        "FACTOR",
        ge=1,
    )
    cost_model: Literal["auto", "measure", "none"] = _option(
        "auto",
        "scheduling",
        "where the cost model of iterations comes from; auto: saved for this model and machine, "
        "else measured; measure: measured again; none: fitted while serving",
    )
    cache_dir: Path | None = _option(
        None,
        "scheduling",
        "directory for saved cost models; default: the user's cache directory",
        "DIR",
    )
    max_queue_requests: int = _option(
        2048, "scheduling", "maximum waiting requests; further ones get a 503", "N", ge=1
    )
    max_queue_tokens: int = _option(
        1 << 20,
        "scheduling",
        "maximum tokens (prompt + max_tokens) of the waiting requests; further ones get a 503",
        "TOKENS",
        ge=1,
    )

    speculative_config: Annotated[str, BeforeValidator(check_speculative_config)] = _option(
        "",
        "scheduling",
        "propose several next tokens and compute them in one step, without changing any output; "
        'a JSON object as in vLLM, such as {"method": "ngram", "num_speculative_tokens": 4}',
        "JSON",
    )

    pipeline_stages: int = _option(
        1,
        "workers",
        "pipeline-parallel stages; each computes a share of the layers",
        "S",
        ge=1,
        le=64,
    )
    tensor_ranks: int = _option(
        1,
        "workers",
        "tensor-parallel ranks of each stage; there are S × R worker processes",
        "R",
        ge=1,
        le=64,
    )
    batch_invariant: bool = _option(
        False,
        "workers",
        "on a GPU, compute each request's tokens with the same bits whatever else is in the batch: "
        "one tiling for all matrix products, no split keys; slower",
    )
    cuda_graphs: bool = _option(
        True,
        "workers",
        "on a GPU, capture decode steps as CUDA graphs at the start",
    )
    lookahead: Annotated[Literal["auto", "0", "1"], BeforeValidator(str)] = _option(
        "auto",
        "workers",
        "1: plan an iteration before the previous one's tokens are known, so that workers do not "
        "wait for the event loop; a request that ends may then compute one token too many; "
        "auto: on a GPU, and on CPUs with short steps and an idle core",
    )
    max_restarts: int = _option(
        5,
        "workers",
        "maximum worker restarts in a row without a completed iteration; then the server ends",
        "N",
        ge=0,
    )
    step_seconds: float = _option(
        120.0,
        "workers",
        "timeout of an iteration; a worker that takes longer is restarted",
        "SECONDS",
        gt=0,
    )
    launcher: Literal["local", "ray"] = _option(
        "local", "workers", "local: worker processes on this machine; ray: actors on a Ray cluster"
    )
    ray_address: str = _option(
        "auto", "workers", "address of the Ray cluster; auto: this machine's cluster", "ADDRESS"
    )
    trace: Path | None = _option(
        None,
        "workers",
        "write a Chrome trace of each worker's steps to this file (see ui.perfetto.dev)",
        "FILE",
    )
