"""Attention backends by the name that `--attention` takes, loaded by name."""

BACKENDS: dict[str, str] = {
    "cpu": "engine.worker.cpu.attention.backend:CpuAttention",
    "flashinfer": "adapters.attention.flashinfer.backend:FlashInferAttention",
    "reference": "adapters.attention.reference:ReferenceAttention",
}
