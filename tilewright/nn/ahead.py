"""Launches on a second stream, of higher priority: products that take whole SMs, beside what only moves data.

A persistent product leaves SMs idle where its tiles do not fill the last round, and what moves data takes few SMs' time but all
of them while it runs alone. Beside each other the first keeps its SMs, the second has what is left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


@functools.cache
def second_stream(device: int, stream: int) -> torch.cuda.Stream:
    """One for each stream that asks: shared, it would make them wait for each other, and a capture of one take in the other's."""
    return torch.cuda.Stream(device, priority=-1)


def launch_ahead(like: Tensor, launch: Callable[[], None]) -> Callable[[], None]:
    """Launch beside what the current stream is given from now on, if `like` is on a GPU; what is returned joins both.

    Nothing may be allocated inside, for memory belongs to a stream, and all that is read or written must live until both are
    joined."""
    if not like.is_cuda:
        launch()
        return lambda: None
    main = torch.cuda.current_stream(like.device)
    side = second_stream(like.device.index, main.cuda_stream)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        launch()
    return lambda: main.wait_stream(side)
