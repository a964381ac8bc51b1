"""Where a token's keys and values lie in the paged cache, for the kernels of the CPU."""

from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def find(shape: Any, source: Any, position: int) -> tuple[int, int, int]:
    """Return where a token's key starts, how far on its value is, tokens to the end of the block.

    shape: of the cache, into which the first two lead when it is taken as flat; source: (layer, KV
    head, table). The key of the block's next token is D elements on.
    """
    layer, head, table = source
    _, layers, _, kv_heads, block_size, dim = shape
    block, offset = np.int64(table[position // block_size]), position % block_size
    record = ((block * layers + layer) * 2 * kv_heads + head) * block_size + offset
    return record * dim, kv_heads * block_size * dim, block_size - offset
