"""Random numbers as a pure function of (seed, position): a replayed sequence draws the same tokens.

Owns: nothing; pure functions. Runs in: the worker; devices that draw compute the same themselves.
Source: SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014) with the
finalizer that paper takes from Stafford (variant 13).

The generator is a counter hashed with the seed, so it has no state to keep, to preempt or to replay.
Bit for bit, in unsigned 64-bit arithmetic that wraps (for a kernel):

    mix(z)   = { z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
                 z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
                 return z ^ (z >> 31); }
    stream   = mix(seed + 0x9E3779B97F4A7C15)                      once per sequence
    word     = mix(stream + (position + 1) * 0x9E3779B97F4A7C15)   one per drawn token
    uniform  = (word >> 11) * 2^-53                                in [0, 1), exact in float64

For one seed the words are SplitMix64's own sequence started at `stream`; hashing the seed first keeps
neighbouring seeds (the n choices of one request) from being shifted copies of each other.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

GOLDEN: Final = 0x9E3779B97F4A7C15
MIX_A: Final = 0xBF58476D1CE4E5B9
MIX_B: Final = 0x94D049BB133111EB
_MASK: Final = 0xFFFFFFFFFFFFFFFF


def stream_of(seed: int) -> int:
    """The hashed seed (u64) that `uniforms` takes; computed once when a sequence gets its seat."""
    z = (seed + GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * MIX_A) & _MASK
    z = ((z ^ (z >> 27)) * MIX_B) & _MASK
    return z ^ (z >> 31)


def uniforms(streams: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.float64]:
    """One number in [0, 1) per row. streams [n] from `stream_of`, positions [n] >= 0 -> [n] float64."""
    z = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN) + streams
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_A)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_B)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)
