"""Attention backends by the name that `--attention` takes, loaded by name."""

BACKENDS: dict[str, str] = {
    "cpu": "engine.worker.cpu.attention.backend:CpuAttention",
    "flashinfer": "adapters.attention.flashinfer.backend:FlashInferAttention",
    "flashinfer-fa2": "adapters.attention.flashinfer.backend:Fa2FlashInferAttention",
    "flashinfer-xqa": "adapters.attention.flashinfer.backend:XqaFlashInferAttention",
    "reference": "adapters.attention.reference:ReferenceAttention",
}
