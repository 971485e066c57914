"""Philox4x32-10, a counter-based generator: output = f(key, counter), with no state.

Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11, section 3.3 and figure 2; the known
answers of their Random123 distribution are among the tests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_32 = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)

U32 = NDArray[np.uint32]


def philox4x32(counter: U32, key: U32) -> U32:
    """counter u32[n, 4], key u32[n, 2] -> u32[n, 4]."""
    c0, c1, c2, c3 = (counter[:, i].astype(np.uint64) for i in range(4))
    k0, k1 = key[:, 0].copy(), key[:, 1].copy()
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = k0 + _W0, k1 + _W1  # modulo 2**32
    return np.stack([c0, c1, c2, c3], axis=1).astype(np.uint32)


def uniform(seed: NDArray[np.uint64], sample: NDArray[np.int32], position: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number of [0, 1) with 53 random bits for each (seed, sample, position)."""
    counter = np.zeros((len(seed), 4), np.uint32)
    counter[:, 0] = sample.astype(np.uint32)
    counter[:, 1] = position.astype(np.uint32)
    key = np.stack([seed & _LOW, seed >> _32], axis=1).astype(np.uint32)
    words = philox4x32(counter, key).astype(np.uint64)
    bits = ((words[:, 0] >> np.uint64(5)) << np.uint64(26)) | (words[:, 1] >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
