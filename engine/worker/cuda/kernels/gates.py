"""The activations of gated MLPs inside kernels."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import triton
import triton.language as tl

SILU, GELU, GELU_TANH = 1, 2, 3
GATES = {  # by Hugging Face's names
    "silu": SILU,
    "swish": SILU,
    "gelu": GELU,
    "gelu_new": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
}


@triton.jit
def activated(x, GATE: tl.constexpr):
    """The activation of float32 numbers."""
    if GATE == 1:
        return x / (1.0 + tl.exp(-x))
    elif GATE == 2:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))  # 0.5 * (1 + tanh(y)) = sigmoid(2 y)
