"""Conversion to fp8 (e4m3) inside kernels."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def to_fp8(x):
    """Finite float32 in [-448, 448] to the nearest e4m3 value, ties to even.

    Rounding is done here in float32, so that the conversion itself is exact on every device:
    Triton's interpreter does not carry from the mantissa to the exponent.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # 3 bits of mantissa
    normal = bits.to(tl.float32, bitcast=True)
    small = (x + 24576.0) - 24576.0  # below 2**-6 the step is 2**-9; 24576 = 1.5 * 2**14
    return tl.where(tl.abs(x) < 0.015625, small, normal).to(tl.float8e4nv)
