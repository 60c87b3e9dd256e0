"""Attention backends by the name that `--attention` takes, loaded by name."""

BACKENDS: dict[str, str] = {
    "cpu": "adapters.attention.cpu:CpuAttention",
    "flashinfer": "adapters.attention.flashinfer:FlashInferAttention",
    "flashinfer-split": "adapters.attention.flashinfer:SplitFlashInferAttention",
    "reference": "adapters.attention.reference:ReferenceAttention",
}
