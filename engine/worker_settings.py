"""What a worker starts with, and what it reports after loading. Standard library only."""

from dataclasses import dataclass

from engine.lora import LoraReport, LoraSpec
from engine.pooling import PoolingReport


@dataclass(frozen=True, slots=True)
class Placement:
    """The part of a model that one worker holds: a pipeline stage (some layers) and a tensor
    parallel rank (a shard of each layer).

    The workers of one model connect at `rendezvous`, a "host:port" on which worker 0 listens. It
    listens on the inherited socket `listener`, a file descriptor that is valid in its own process
    only. The other workers reach this one at `address`. `num_local_workers` workers, this one
    included, run on its machine, and `local_index` is its number among them.
    """

    stage: int = 0
    num_stages: int = 1
    rank: int = 0
    num_ranks: int = 1
    rendezvous: str = ""
    listener: int | None = None
    address: str = "127.0.0.1"
    num_local_workers: int = 1
    local_index: int = 0

    @property
    def num_workers(self) -> int:
        return self.num_stages * self.num_ranks

    @property
    def index(self) -> int:
        """Number of this worker among all workers, ordered by stage, then by rank."""
        return self.stage * self.num_ranks + self.rank

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def returns_results(self) -> bool:
        """Whether this worker returns step results: rank 0 of the last stage."""
        return self.is_last_stage and self.rank == 0

    def __str__(self) -> str:
        return f"stage {self.stage} rank {self.rank}"


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker needs to load its part of a model.

    `dtype`, `weights` (of linear layers), `kv_dtype`, `device` and `attention` may be "auto".
    `activation_bits`, "auto", "8" or "14", is the width to which the int8 linears of a CPU quantize
    their inputs.
    `kv_slots` 0: as many as fit in `kv_bytes`, the total over all workers; both 0: the worker
    chooses from the free memory; so it does for `num_states` 0, the state slots of a model with
    recurrent layers. `host_kv_bytes`, also a total over all workers, is for KV that is
    swapped out. `disk_kv_bytes` bounds the disk tier in `disk_kv_dir`; "" disables it. `kv_store`
    is the URL of a store that servers share; "": none.
    `threads` 0: a fair share of the cores; `thread_wait`, "spin" or "sleep", is how threads wait
    between kernels. `max_model_len` 0: the checkpoint's own limit. With `traces` the
    worker reports the times of each step. With `lookahead`, a step may use tokens that only the
    workers know (`LAST_TOKEN`). With `cuda_graphs`, steps of decodes only are captured on a GPU.
    With `batch_invariant`, a GPU computes each request's tokens with the same bits whatever else is
    in the batch; otherwise the GEMM kernels that were fastest are kept in the directory
    `gemm_cache`. Packed weights are cached in the directory `packed_cache`, of which all files
    together have at most `packed_cache_bytes`. A cache named "" is disabled. The LoRA adapters
    `loras` are loaded with the model; no module of an adapter may have a higher rank than
    `max_lora_rank`. `task` is "generate", "embed", "score", or "auto": as the checkpoint is meant.
    `draft_model` is a smaller checkpoint with the same vocabulary, which proposes drafts; "": none.
    With `has_mtp` the checkpoint's own layer for multi-token prediction proposes them. With
    `logs_json` each line of the worker's log is a JSON object.
    """

    model: str
    dtype: str = "auto"
    weights: str = "auto"
    activation_bits: str = "auto"
    kv_dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    block_size: int = 16
    kv_slots: int = 0
    kv_bytes: int = 0
    num_states: int = 0
    host_kv_bytes: int = 0
    disk_kv_dir: str = ""
    disk_kv_bytes: int = 0
    kv_store: str = ""
    max_model_len: int = 0
    max_batch_tokens: int = 2048
    max_batch_size: int = 64
    threads: int = 0
    thread_wait: str = "spin"
    traces: bool = False
    lookahead: int = 0
    cuda_graphs: bool = True
    batch_invariant: bool = False
    gemm_cache: str = ""
    gpu_memory_utilization: float = 0.9
    packed_cache: str = ""
    packed_cache_bytes: int = 32 << 30
    loras: tuple[LoraSpec, ...] = ()
    max_lora_rank: int = 64
    task: str = "auto"
    draft_model: str = ""
    has_mtp: bool = False
    logs_json: bool = False
    placement: Placement = Placement()


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker reports after loading: facts about the model and the number of KV blocks.

    `num_parameters` is of the whole model; `bytes_per_block` and `threads` are this worker's own.
    `kernels` describes the kernels in use, for logs. `disk_hashes` are the contents of the disk
    tier's slots, `HASH_BYTES` each, zeros for an unused one; `disk_state_hashes` those of its slots
    for snapshots. `loras` answers the settings' adapters
    in their order. `windows` has the sliding window of each layer group, None for a group that
    keeps the KV of all tokens; `bytes_per_block` is the size of a block of one group. `pooling` is
    None if the model generates text. `num_draft_parameters` is the size of the draft model, or
    of the layer for multi-token prediction and the head; 0 without one. `kv_store_keys` names all
    that the contents of the shared store depend on.
    """

    architecture: str
    num_parameters: int
    dtype: str
    device: str
    attention: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    block_size: int
    bytes_per_block: int
    threads: int
    weights: str = "float32"
    kv_dtype: str = "float32"
    num_host_blocks: int = 0
    disk_hashes: bytes = b""
    kernels: str = "torch"
    loras: tuple[LoraReport, ...] = ()
    windows: tuple[int | None, ...] = (None,)
    num_states: int = 0
    num_host_states: int = 0
    bytes_per_state: int = 0
    pooling: PoolingReport | None = None
    num_draft_parameters: int = 0
    kv_store_keys: str = ""
    disk_state_hashes: bytes = b""
