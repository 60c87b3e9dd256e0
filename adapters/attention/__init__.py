"""Attention backends by the name that `--attention` takes, loaded by name."""

BACKENDS: dict[str, str] = {
    "cpu": "adapters.attention.cpu:CpuAttention",
    "reference": "adapters.attention.reference:ReferenceAttention",
}
