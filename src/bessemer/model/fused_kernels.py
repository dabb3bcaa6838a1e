"""The loops of `fused`, compiled by numba at the first call and cached on disk; they run without the GIL.

Each loop takes the range of rows [first, last). Arrays are float32, or bf16 as uint16 bits (`Rows`: either). Conversions are LLVM
instructions, so that loops contain no calls and vectorise.

Shapes: see `fused`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

Rows = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

SUM_ROWS = 256  # rows whose share of a weight's gradient is summed in one block

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
# Coefficients of p, highest first, in e^f = 1 + f + f^2 p(f) for |f| <= ln(2) / 2 (Cephes, expf), with a relative error of 2e-7.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln(2); an integer times the first is exact


def _instructions(result: Any, argument: Any) -> Callable[[Callable[[Any, Any], Any]], Any]:
    """Return a decorator that makes a numba intrinsic of a function that emits the LLVM instructions for one argument."""

    def decorate(emit: Callable[[Any, Any], Any]) -> Any:
        def define(typing: Any, value: Any) -> Any:
            return result(argument), lambda context, builder, signature, arguments: emit(builder, arguments[0])

        define.__name__ = emit.__name__
        return intrinsic(define)

    return decorate


@intrinsic  # type: ignore[untyped-decorator]
def widen(typing: Any, value: Any) -> Any:
    """Convert the bits of a bf16 (uint16) to float32. A float32 stays as it is."""
    is_wide = value == types.float32
    return types.float32(value), lambda context, b, signature, given: given[0] if is_wide else _widened(b, given[0])


def _widened(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, _I32), _I32(16)), _F32)


@intrinsic  # type: ignore[untyped-decorator]
def narrow(typing: Any, value: Any, array: Any) -> Any:
    """Convert float32 to an element of the array: float32, or the bits of the nearest bf16, ties to even.

    Every NaN becomes the same quiet NaN of bf16.
    """
    is_wide = array.dtype == types.float32
    return array.dtype(
        value, array
    ), lambda context, b, signature, given: given[0] if is_wide else _narrowed(b, given[0])


def _narrowed(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _I32(0x7FFF))), _I32(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, _I32(0x7FC0), rounded), _I16)


@_instructions(types.int32, types.float32)
def ordered(builder: Any, value: Any) -> Any:
    """Map a float32 to an int32 with the same order, NaN last or first by its sign. `unordered` is the inverse."""
    signed = builder.bitcast(value, _I32)
    return builder.xor(signed, builder.and_(builder.ashr(signed, _I32(31)), _I32(0x7FFFFFFF)))


@_instructions(types.float32, types.int32)
def unordered(builder: Any, key: Any) -> Any:
    return builder.bitcast(builder.xor(key, builder.and_(builder.ashr(key, _I32(31)), _I32(0x7FFFFFFF))), _F32)


@_instructions(types.float32, types.float32)
def exp(builder: Any, x: Any) -> Any:
    """Compute e^x in float32, with x clamped to [-87, 88].

    A call of a mathematical library would prevent vectorisation.
    """

    def constant(number: float) -> Any:
        return ir.Constant(_F32, float(np.float32(number)))

    def fma(a: Any, b: Any, c: Any) -> Any:
        return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    low, high = constant(-87.0), constant(88.0)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    # A NaN has no integer; `rest` propagates it.
    known = builder.select(builder.fcmp_unordered("uno", x, x), low, x)
    turns = builder.fadd(builder.fmul(known, constant(1.4426950408889634)), constant(256.5))
    n = builder.sub(builder.fptosi(turns, _I32), _I32(256))  # `turns` is positive, so fptosi rounds down
    wide_n = builder.sitofp(n, _F32)
    rest = fma(wide_n, constant(-_LN2_LOW), fma(wide_n, constant(-_LN2_HIGH), x))
    polynomial = constant(_EXP[0])
    for coefficient in _EXP[1:]:
        polynomial = fma(polynomial, rest, constant(coefficient))
    near_one = fma(builder.fmul(rest, rest), polynomial, builder.fadd(rest, constant(1.0)))
    power = builder.bitcast(builder.shl(builder.add(n, _I32(127)), _I32(23)), _F32)
    return builder.fmul(near_one, power)


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a kernel with numba. Sums may be reordered, so that they vectorise; NaN and infinity keep their meaning."""
    fast = {"reassoc", "contract", "nsz"}
    try:
        return njit(nogil=True, cache=True, error_model="numpy", fastmath=fast)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # neither the source's folder nor the user's cache is writable
        return njit(nogil=True, error_model="numpy", fastmath=fast)(function)  # type: ignore[no-any-return]


@_compiled
def norm(first: int, last: int, x: Rows, weight: Floats, eps: Any, out: Rows, scale: Floats) -> None:
    width = x.shape[1]
    for row in range(first, last):
        total = np.float32(0)
        for j in range(width):
            value = widen(x[row, j])
            total += value * value
        factor = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        scale[row] = factor
        for j in range(width):
            out[row, j] = narrow(widen(x[row, j]) * factor * weight[j], out)


@_compiled
def norm_backward(
    first: int, last: int, gradient: Rows, x: Rows, weight: Floats, scale: Floats, x_grad: Rows, sums: Floats
) -> None:
    # With s = scale, g = gradient * weight: dx = s g - x s^3 / D * sum(g x); dweight = sum of gradient * x * s.
    width = x.shape[1]
    for row in range(first, last):
        factor, dot, block = scale[row], np.float32(0), row // SUM_ROWS
        for j in range(width):
            dot += widen(gradient[row, j]) * weight[j] * widen(x[row, j])
        shrink = factor * factor * factor * dot / np.float32(width)
        for j in range(width):
            slope, value = widen(gradient[row, j]), widen(x[row, j])
            sums[block, j] += slope * value * factor
            x_grad[row, j] = narrow(slope * weight[j] * factor - value * shrink, x_grad)


@_compiled
def gate(first: int, last: int, gate_up: Rows, out: Rows) -> None:
    width = out.shape[1]
    for row in range(first, last):
        for j in range(width):
            gate = widen(gate_up[row, j])
            out[row, j] = narrow(gate / (np.float32(1) + exp(-gate)) * widen(gate_up[row, width + j]), out)


@_compiled
def gate_backward(first: int, last: int, gradient: Rows, gate_up: Rows, gate_up_grad: Rows) -> None:
    # With s = sigmoid(gate): silu(gate) = gate s, and its derivative s + gate s (1 - s).
    one, width = np.float32(1), gradient.shape[1]
    for row in range(first, last):
        for j in range(width):
            gate, up, slope = widen(gate_up[row, j]), widen(gate_up[row, width + j]), widen(gradient[row, j])
            share = one / (one + exp(-gate))
            silu = gate * share
            gate_up_grad[row, width + j] = narrow(slope * silu, gate_up_grad)
            gate_up_grad[row, j] = narrow(slope * up * (share + silu * (one - share)), gate_up_grad)


@_compiled
def split_heads(
    first: int, last: int, by_token: Rows, head: int, count: int, each: int, by_head: Rows, length: int, cos: Floats,
    sin: Floats, weight: Floats, eps: Any,
) -> None:  # fmt: skip
    """Normalise and rotate some heads of the rows first, ..., last - 1 of `by_token`, and write them to `by_head`.

    Indices are unsigned: for signed ones numba checks for negative indexing, which prevents vectorisation.

    Args:
        first: First row (token) to compute.
        last: End of the rows.
        by_token: (B T, all heads of a token): groups of `each` heads.
        head: Index within a group of the first head to write.
        count: Number of heads of a group to write.
        each: Heads of a group.
        by_head: Result, (B H T, K), for the H = groups x `count` heads.
        length: Tokens of a sequence, T.
        cos: Cosines, (T or B T, P/2); without columns (P = 0) nothing is rotated.
        sin: Sines, like `cos`.
        weight: Weight of the RMSNorm, (K,); empty for no norm.
        eps: Epsilon of the RMSNorm.
    """
    width, half = np.uint64(by_head.shape[1]), np.uint64(cos.shape[1])
    heads = by_token.shape[1] // (each * by_head.shape[1]) * count
    tokens_1, heads_1, cos_1, sin_1 = by_token.reshape(-1), by_head.reshape(-1), cos.reshape(-1), sin.reshape(-1)
    values = np.empty(width, np.float32)
    for row in range(first, last):
        batch, token = row // length, row % length
        angle = np.uint64((row if len(cos) > length else token) * half)
        for number in range(heads):
            at = np.uint64(
                row * by_token.shape[1] + (number // count * each + head + number % count) * by_head.shape[1]
            )
            to = np.uint64(((batch * heads + number) * length + token) * by_head.shape[1])
            for j in range(width):
                values[j] = widen(tokens_1[at + j])
            if len(weight):
                total = np.float32(0)
                for j in range(width):
                    total += values[j] * values[j]
                factor = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
                for j in range(width):
                    values[j] *= factor * weight[j]
            for j in range(half):
                a, b, c, s = values[j], values[half + j], cos_1[angle + j], sin_1[angle + j]
                heads_1[to + j] = narrow(a * c - b * s, heads_1)
                heads_1[to + half + j] = narrow(b * c + a * s, heads_1)
            for j in range(half + half, width):
                heads_1[to + j] = narrow(values[j], heads_1)


@_compiled
def join_heads(
    first: int, last: int, by_token: Rows, head: int, count: int, each: int, by_head: Rows, length: int, cos: Floats,
    sin: Floats, weight: Floats, eps: Any, x: Rows, sums: Floats,
) -> None:  # fmt: skip
    """Compute the backward pass of `split_heads`, whose arguments it takes with `by_head` as the gradient of the result.

    Writes the gradient of the input to `by_token`, and adds that of the norm's weight to the rows of
    `sums`, one for each SUM_ROWS rows of tokens. `x` is the input of `split_heads`.
    """
    width, half = np.uint64(by_head.shape[1]), np.uint64(cos.shape[1])
    heads = by_token.shape[1] // (each * by_head.shape[1]) * count
    tokens_1, heads_1, cos_1, sin_1 = by_token.reshape(-1), by_head.reshape(-1), cos.reshape(-1), sin.reshape(-1)
    x_1, slopes = x.reshape(-1), np.empty(width, np.float32)
    for row in range(first, last):
        batch, token, block = row // length, row % length, row // SUM_ROWS
        angle = np.uint64((row if len(cos) > length else token) * half)
        for number in range(heads):
            to = np.uint64(
                row * by_token.shape[1] + (number // count * each + head + number % count) * by_head.shape[1]
            )
            at = np.uint64(((batch * heads + number) * length + token) * by_head.shape[1])
            for j in range(half):
                a, b, c, s = widen(heads_1[at + j]), widen(heads_1[at + half + j]), cos_1[angle + j], sin_1[angle + j]
                slopes[j] = a * c + b * s
                slopes[half + j] = b * c - a * s
            for j in range(half + half, width):
                slopes[j] = widen(heads_1[at + j])
            if len(weight):
                total = dot = np.float32(0)
                for j in range(width):
                    value = widen(x_1[to + j])
                    total += value * value
                    dot += slopes[j] * weight[j] * value
                factor = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
                shrink = factor * factor * factor * dot / np.float32(width)
                for j in range(width):
                    value = widen(x_1[to + j])
                    sums[block, j] += slopes[j] * value * factor
                    slopes[j] = slopes[j] * weight[j] * factor - value * shrink
            for j in range(width):
                tokens_1[to + j] = narrow(slopes[j], tokens_1)


@_compiled
def softmax_backward(
    first: int, last: int, scores: Rows, rests: Rows, slopes: Rows, gradient: Rows, out: Rows, log_sums: Floats, scale: Any,
    queries: int, first_query: int, seen: int, causal: bool,
) -> None:  # fmt: skip
    """Replace scores by softmax weights, and gradients of weights (`slopes`) by gradients of unscaled scores, in place.

    See Dao et al. 2022, "FlashAttention", appendix B.2. Indices are unsigned as in `split_heads`.

    Args:
        first: First row (query) to compute.
        last: End of the rows.
        scores: Scores before the scale, rounded to bf16, (rows, keys).
        rests: What that rounding removed, which the exponential would amplify, (rows, keys).
        slopes: Gradients of the softmax weights, (rows, keys).
        gradient: Gradient of the attention's output, (rows, K).
        out: The attention's output, (rows, K).
        log_sums: Logarithm of the softmax denominator of each row.
        scale: Factor on the scores.
        queries: Rows of each head.
        first_query: Position in the document of the first row of each head.
        seen: Number of keys without padding.
        causal: True if a query sees only its own and earlier positions.
    """
    keys, width = np.uint64(scores.shape[1]), np.uint64(out.shape[1])
    scores_1, rests_1, slopes_1 = scores.reshape(-1), rests.reshape(-1), slopes.reshape(-1)
    gradient_1, out_1 = gradient.reshape(-1), out.reshape(-1)
    for row in range(np.uint64(first), np.uint64(last)):
        log_sum, delta, at = log_sums[row], np.float32(0), row * width
        for j in range(width):
            delta += widen(gradient_1[at + j]) * widen(out_1[at + j])
        at, end = row * keys, np.uint64(seen)
        if causal:
            end = min(np.uint64(first_query) + row % np.uint64(queries) + np.uint64(1), end)
        for t in range(end):
            weight = exp((widen(scores_1[at + t]) + widen(rests_1[at + t])) * scale - log_sum)
            scores_1[at + t] = narrow(weight, scores_1)
            slopes_1[at + t] = narrow(weight * (widen(slopes_1[at + t]) - delta) * scale, slopes_1)
        for t in range(end, keys):
            scores_1[at + t] = narrow(np.float32(0), scores_1)
            slopes_1[at + t] = narrow(np.float32(0), slopes_1)


@_compiled
def combine(first: int, last: int, x: Rows, place: Any, weights: Floats, out: Rows) -> None:
    """Write the weighted sum of rows place[n] of x to row n of out."""
    width = out.shape[1]
    total = np.empty(width, np.float32)
    for n in range(first, last):
        total[:] = np.float32(0)
        for k in range(place.shape[1]):
            row, weight = place[n, k], weights[n, k]
            for j in range(width):
                total[j] += weight * widen(x[row, j])
        for j in range(width):
            out[n, j] = narrow(total[j], out)


@_compiled
def combine_backward(
    first: int, last: int, x: Rows, place: Any, weights: Floats, gradient: Rows, x_grad: Rows, weight_grad: Floats
) -> None:
    for n in range(first, last):
        for k in range(place.shape[1]):
            row, weight, dot = place[n, k], weights[n, k], np.float32(0)
            for j in range(x.shape[1]):
                dot += widen(gradient[n, j]) * widen(x[row, j])
                x_grad[row, j] = narrow(weight * widen(gradient[n, j]), x_grad)
            weight_grad[n, k] = dot


@_compiled
def add(first: int, last: int, total: Floats, summand: Rows, factor: Any) -> None:
    for i in range(np.uint64(first), np.uint64(last)):
        total[i] += widen(summand[i]) * factor


@_compiled
def cross_entropy(
    first: int, last: int, logits: Rows, targets: Any, z_loss: Any, needs_gradient: bool, nats: Floats, extra: Floats
) -> None:
    one, vocabulary = np.float32(1), logits.shape[1]
    weights = np.empty(vocabulary, np.float32)
    for row in range(first, last):
        target = targets[row]
        if target < 0:
            nats[row] = extra[row] = np.float32(0)
            logits[row] = narrow(np.float32(0), logits)
            continue
        target_logit, total, key = widen(logits[row, target]), np.float32(0), ordered(widen(logits[row, 0]))
        for j in range(vocabulary):
            key = max(key, ordered(widen(logits[row, j])))
        largest = unordered(key)
        for j in range(vocabulary):
            weight = exp(widen(logits[row, j]) - largest)
            weights[j] = weight
            total += weight
        log_sum = largest + np.log(total)
        nats[row] = log_sum - target_logit
        extra[row] = z_loss * log_sum * log_sum
        if not needs_gradient:
            continue
        factor = one + np.float32(2) * z_loss * log_sum
        share = factor / total
        for j in range(vocabulary):
            logits[row, j] = narrow(weights[j] * share, logits)
        logits[row, target] = narrow(weights[target] * share - one, logits)
