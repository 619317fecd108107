"""A product with a weight matrix, in its operands' dtype or in float8. Knows no block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

# Of NVIDIA GPUs, from which on tensor cores multiply float8: Ada, Hopper and later.
FLOAT8_CAPABILITY = (8, 9)

# What is smaller than this is scaled as if it were as large, so that neither a factor nor its
# inverse leaves float32; zeros have a factor too.
_LEAST = 1e-30


def linear(x: Tensor, weight: Tensor, fp8: bool) -> Tensor:
    """`x` times the transpose of `weight`; with `fp8`, of both as float8 holds them.

    `x`: floating (…, in); `weight`: (out, in), of the dtype of `x`. Returns (…, out), dtype of `x`.
    In float8 each operand has one factor, which brings its largest magnitude to the largest number
    of the format: e4m3 for `x` and `weight`, e5m2 for the gradient that comes back. Sums are
    float32. `in` and `out` must be multiples of 16, and the rows of `x` too where there is a
    backward pass; a CPU takes others. What is not finite stays so. Formats: Micikevicius et al.
    2022, "FP8 formats for deep learning".
    """
    if not fp8:
        return F.linear(x, weight)
    return cast(Callable[..., Tensor], _Float8Linear.apply)(x, weight)


def float8_fault(device: torch.device) -> str | None:
    """What keeps `device` from products in float8, as "…, which …"; None where nothing does.

    A CPU has them, far slower than its other products.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if torch.version.cuda is None:
        return f"{name}, which is not an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability >= FLOAT8_CAPABILITY:
        return None
    own, least = (".".join(map(str, pair)) for pair in (capability, FLOAT8_CAPABILITY))
    return f"{name}, which has compute capability {own}; float8 needs {least}"


class _Float8Linear(torch.autograd.Function):
    """The product and its two gradients, all three in float8. Keeps its operands in float8."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows, rows_back = _scaled(x.reshape(-1, x.shape[-1]), torch.float8_e4m3fn)
        matrix, matrix_back = _scaled(weight, torch.float8_e4m3fn)
        context.save_for_backward(rows, rows_back, matrix, matrix_back)
        context.shape, context.dtype = x.shape, x.dtype
        # Sums that tensor cores shorten now and then: as precise as e4m3 asks for, and faster.
        product = _product(rows, rows_back, matrix.t(), matrix_back, x.dtype, fast=True)
        return product.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, rows_back, matrix, matrix_back = context.saved_tensors
        own, own_back = _scaled(gradient.reshape(-1, gradient.shape[-1]), torch.float8_e5m2)
        of_x = _product(own, own_back, _by_column(matrix), matrix_back, context.dtype)
        of_weight = _product(
            own.t().contiguous(), own_back, _by_column(rows), rows_back, context.dtype
        )
        return of_x.view(context.shape), of_weight


def _scaled(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`x` in float8, row by row, and the float32 factor that brings all of it back."""
    largest = torch.finfo(dtype).max
    factor = largest / x.abs().amax().to(torch.float32).clamp(min=_LEAST)
    # Float8 does not saturate by itself: rounded up, the largest would be NaN or infinite.
    scaled = (x.to(torch.float32) * factor).clamp(-largest, largest)
    return scaled.to(dtype).contiguous(), factor.reciprocal()


def _by_column(matrix: Tensor) -> Tensor:
    """The same matrix laid out column by column, as a second operand has to be."""
    return matrix.t().contiguous().t()


def _product(
    first: Tensor,
    first_back: Tensor,
    second: Tensor,
    second_back: Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> Tensor:
    product: Tensor = torch._scaled_mm(
        first,
        second,
        scale_a=first_back,
        scale_b=second_back,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return product
