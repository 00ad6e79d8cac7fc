"""Signs and integers with a scale per block in NumPy alone. The kernels are compared with this definition."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from topkube import kernels

BLOCK = kernels.SIGN_BLOCK
LARGEST_CODES = {4: 7, 8: 127}
"""The largest integer of each width in bits."""
LEVELS = {4: 49, 8: 127}
"""What the largest integer stands for, in units of the scale: with 4 bits, integers stand for their squares."""
SQUARES = np.square(np.arange(8, dtype=np.float32))


def compute_mean_magnitude(block: Any) -> Any:
    """Return the mean |x| of a block: element i goes into running sum i % 16, then halves are added to halves."""
    sums = np.zeros(16, np.float32)
    for start in range(0, len(block), 16):
        part = np.abs(block[start : start + 16])
        sums[: len(part)] += part
    for half in (8, 4, 2, 1):
        sums[:half] += sums[half : 2 * half]
    return sums[0] / np.float32(len(block))


def pack_signs_by_definition(x: Any) -> tuple[Any, Any, Any]:
    """Return (scales, bits, remainder)."""
    blocks = [x[start : start + BLOCK] for start in range(0, len(x), BLOCK)]
    scales = np.array([compute_mean_magnitude(block) for block in blocks], np.float32).astype(ml_dtypes.bfloat16)
    bits = np.packbits(np.signbit(x), bitorder="little")
    return scales.view(np.uint16), bits, x - unpack_signs_by_definition(scales.view(np.uint16), bits, len(x))


def unpack_signs_by_definition(scales: Any, bits: Any, length: int, weight: float = 1.0) -> Any:
    weighted_scales = scales.view(ml_dtypes.bfloat16).astype(np.float32) * np.float32(weight)
    negative = np.unpackbits(bits, bitorder="little")[:length].astype(bool)
    magnitudes = np.repeat(weighted_scales, BLOCK)[:length]
    return np.where(negative, -magnitudes, magnitudes)


def pack_integers_by_definition(x: Any, bits: int) -> tuple[Any, Any]:
    """Return (message, the values that the message holds)."""
    if bits == 3:
        return pack_levels_by_definition(x)
    scales, codes, sent = [], [], np.zeros_like(x)
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        step = np.abs(block).max() / np.float32(LEVELS[bits])
        rounded_up = (step.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
        if rounded_up < np.uint32(0x00800000):
            rounded_up = np.uint32(0)
        scale = rounded_up.view(np.float32)
        units = block * (np.float32(1) / scale) if scale else np.zeros_like(block)
        integers = np.rint(units) if bits == 8 else np.copysign(find_nearest_roots(np.abs(units)), units)
        scales.append(int(rounded_up) >> 16)
        sent[start : start + BLOCK] = compute_units(integers, bits) * scale
        block_codes = integers.astype(np.int8).view(np.uint8)
        if bits == 4:
            pairs = np.pad(block_codes, (0, -len(block_codes) % 32)).reshape(-1, 2, 16)
            block_codes = ((pairs[:, 0] & 15) | (pairs[:, 1] << 4)).ravel()
        codes.append(block_codes)
    scale_bytes = np.array(scales, np.uint16).view(np.uint8)
    message = np.concatenate([np.pad(scale_bytes, (0, -len(scale_bytes) % 8)), *codes])
    return np.pad(message, (0, -len(message) % 8)), sent


GROUP = 32
"""Elements that share a unit with 3 bits."""
FRACTIONS = np.array(
    [np.float32(2.0 ** -(e // 2)) * np.float32(0.70710677 if e % 2 else 1) for e in range(16)], np.float32
)
"""The units of a group, as fractions of the scale of its block."""


def pack_levels_by_definition(x: Any) -> tuple[Any, Any]:
    """Return (message, the values that the message holds) with 3 bits: seven levels."""
    scales, codes, sent = [], [], np.zeros_like(x)
    for start in range(0, len(x), BLOCK):
        block = x[start : start + BLOCK]
        step = np.abs(block).max() / np.float32(16)
        rounded_up = (step.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
        if rounded_up < np.float32(2.0**-118).view(np.uint32):
            rounded_up = np.uint32(0)
        scales.append(int(rounded_up) >> 16)
        scale = rounded_up.view(np.float32)
        exponents, planes = [], []
        for first in range(0, len(block), GROUP):
            group = block[first : first + GROUP]
            units = scale * FRACTIONS
            enough = np.abs(group).max() <= units * np.float32(16)
            exponent = int(np.flatnonzero(enough).max()) if scale else 0
            exponents.append(exponent)
            level_codes = np.zeros(GROUP, np.uint8)
            if scale:
                level_codes[: len(group)] = choose_levels(group, units[exponent])
            sent[start + first : start + first + len(group)] = LEVEL_VALUES[level_codes[: len(group)]] * units[exponent]
            planes.append(
                np.packbits((level_codes[None] >> np.arange(3, dtype=np.uint8)[:, None]) & 1, bitorder="little")
            )
        halves = np.pad(np.array(exponents, np.uint8), (0, len(exponents) % 2)).reshape(-1, 2)
        codes += [halves[:, 0] | halves[:, 1] << 4, *planes]
    scale_bytes = np.array(scales, np.uint16).view(np.uint8)
    message = np.concatenate([np.pad(scale_bytes, (0, -len(scale_bytes) % 8)), *codes])
    return np.pad(message, (0, -len(message) % 8)).astype(np.uint8), sent


LEVEL_VALUES = np.array([0, 3, 8, 14, 0, -3, -8, -14], np.float32)
"""What the codes of 3 bits stand for, in units of their group."""


def choose_levels(group: Any, unit: Any) -> Any:
    """Return the codes of the levels nearest to the elements of a group; of two, that nearer to zero."""
    limits = np.array([1.5, 5.5, 11], np.float32) * unit
    above = (np.abs(group)[:, None] > limits).sum(axis=1)
    return np.where(above, above + 4 * np.signbit(group), 0).astype(np.uint8)


def find_nearest_roots(magnitudes: Any) -> Any:
    """Return the integers from 0 to 7 whose squares are nearest to `magnitudes`, the smaller one if two are."""
    return np.abs(magnitudes[:, None] - SQUARES).argmin(axis=1).astype(np.float32)


def compute_units(integers: Any, bits: int) -> Any:
    """Return the values, in units of the scale, that integers of `bits` bits stand for."""
    return integers if bits == 8 else integers * np.abs(integers)


def read_integer_scales(message: Any, length: int) -> Any:
    """Return the scale of every element, from the start of a message about `length` elements: bf16, one per block."""
    blocks = -(-length // BLOCK)
    block_scales = message[: 2 * blocks].view(ml_dtypes.bfloat16).astype(np.float32)
    return np.repeat(block_scales, BLOCK)[:length]


def weigh_integers(message: Any, sent: Any, bits: int, weight: float) -> Any:
    """Return what a message of the values `sent` adds with a weight: a scale is multiplied by the weight first."""
    scales = read_integer_scales(message, len(sent))
    weighted_scales, scales = scales * np.float32(weight), scales.copy()
    if bits == 3:
        fractions = read_level_fractions(message, len(sent))
        weighted_scales, scales = weighted_scales * fractions, scales * fractions
    return np.rint(sent / scales) * weighted_scales


def read_level_fractions(message: Any, length: int) -> Any:
    """Return the unit of every element as a fraction of the scale of its block, from a message with 3 bits."""
    fractions, place = [], -(-(-(-length // BLOCK) * 2) // 8) * 8
    for start in range(0, length, BLOCK):
        groups = -(-min(BLOCK, length - start) // GROUP)
        halves = message[place : place + (groups + 1) // 2]
        exponents = np.stack([halves & 15, halves >> 4], axis=1).ravel()[:groups]
        fractions.append(np.repeat(FRACTIONS[exponents], GROUP))
        place += (groups + 1) // 2 + 12 * groups
    return np.concatenate(fractions)[:length] if fractions else np.zeros(0, np.float32)


def build_ties(blocks: int) -> Any:
    """Return blocks whose mean magnitude is half-way between two bf16 numbers, or a little more. The order in which
    the block is summed decides: 257, 2^-16 and 2^-16 add up to 257 or to 257 + 2^-15."""
    rng = np.random.default_rng(blocks)
    x = np.zeros((blocks, BLOCK), np.float32)
    for block in x:
        large, *small = rng.choice(BLOCK, 3, replace=False)
        block[large], block[small] = -257, 2.0**-16
    return x.ravel()


@st.composite
def draw_floats(draw: Any) -> Any:
    """Draw finite values of very different sizes, with zeros of both signs, denormals and whole blocks of denormals or
    zeros."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = draw(st.integers(0, 800))
    exponents = rng.integers(draw(st.sampled_from([-149, -20])), 100, length)
    x = np.ldexp(rng.standard_normal(length), exponents).astype(np.float32)
    x[rng.random(length) < 0.1] = -0.0
    if draw(st.booleans()):
        x[:BLOCK] = np.ldexp(rng.standard_normal(len(x[:BLOCK])), draw(st.integers(-149, -120))).astype(np.float32)
        x[BLOCK : 2 * BLOCK] = 0
    return x


@st.composite
def draw_any_bits(draw: Any) -> Any:
    """Draw the values of `draw_floats`, also with NaNs of any payload and infinities, or values of any bits."""
    x = draw(draw_floats())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["floats", "some", "any"]))
    if kind == "any":
        return rng.integers(0, 2**32, len(x), dtype=np.uint32).view(np.float32)
    if kind == "some":
        for _ in range(draw(st.integers(1, 4)) if len(x) else 0):
            word = draw(st.sampled_from([0x7F800000, 0xFF800000, 0x7FC00000, 0xFF812345, 0x7FFFFFFF]))
            x.view(np.uint32)[rng.integers(0, len(x))] = word
    return x
