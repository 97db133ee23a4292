"""What ranks send each other beside tensors: JSON, as bytes of a tensor.

torch's own collectives of objects are pickles, which can run code where they are read. What goes
over the network between ranks is not sealed (docs/security.md).
"""

import json
from typing import Any

import torch
import torch.distributed as dist


def pack(value: Any) -> torch.Tensor:
    """Returns the bytes of a value.

    Raises:
        TypeError: it is, or has, something that JSON cannot hold: a path, an array, a number as a
            key.
    """
    text = json.dumps(value, default=_plain)
    # After json.dumps, which refuses what holds itself: this would walk round for ever.
    _check_keys(value)
    # A bytearray, which can be written: torch warns of a tensor on bytes.
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def unpack(packed: torch.Tensor) -> Any:
    """Returns the value of `pack`; a tuple has become a list."""
    return json.loads(packed.numpy().tobytes())


def as_json(value: Any) -> Any:
    """Returns a value as other ranks get it. Raises as `pack`."""
    return unpack(pack(value))


def broadcast(value: Any, source: int, group: Any) -> Any:
    """Returns one rank's value, on every rank. Others pass anything."""
    is_source = dist.get_rank() == source
    packed = torch.empty(0, dtype=torch.uint8)
    if is_source:
        packed = pack(value)
    # The size first: whoever receives needs a tensor of that size.
    size = torch.tensor([len(packed)])
    dist.broadcast(size, src=source, group=group)
    if not is_source:
        packed = torch.empty(int(size.item()), dtype=torch.uint8)
    dist.broadcast(packed, src=source, group=group)
    return unpack(packed)


def all_gather(value: Any, group: Any) -> list[Any]:
    """Returns every rank's value, by rank, on every rank."""
    padded, sizes = _padded(value, group)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return _unpadded(parts, sizes)


def gather(value: Any, group: Any) -> list[Any]:
    """Returns every rank's value, by rank, on the main rank; an empty list elsewhere."""
    padded, sizes = _padded(value, group)
    # torch takes a list from the receiver alone, and refuses one from the others.
    if dist.get_rank() != 0:
        dist.gather(padded, None, dst=0, group=group)
        return []
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.gather(padded, parts, dst=0, group=group)
    return _unpadded(parts, sizes)


def _padded(value: Any, group: Any) -> tuple[torch.Tensor, list[int]]:
    """Returns a value's bytes, as many as the longest of all ranks has; and how many each has."""
    packed = pack(value)
    own_size = torch.tensor([len(packed)])
    # Two collectives, one for the sizes: no rank knows the longest value otherwise.
    all_sizes = [torch.empty_like(own_size) for _ in range(dist.get_world_size())]
    dist.all_gather(all_sizes, own_size, group=group)
    sizes = [int(size.item()) for size in all_sizes]
    # gather and all_gather take tensors of one size alone.
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(packed)] = packed
    return padded, sizes


def _unpadded(parts: list[torch.Tensor], sizes: list[int]) -> list[Any]:
    pairs = zip(parts, sizes, strict=True)
    return [unpack(part[:size]) for part, size in pairs]


def _plain(value: Any) -> Any:
    """Returns numpy's numbers as Python's."""
    item = getattr(value, "item", None)
    if item is None or getattr(value, "ndim", None) != 0:
        raise TypeError(f"{type(value).__name__} cannot be sent to other ranks")
    return item()


def _check_keys(value: Any) -> None:
    """Raises TypeError for keys that JSON would make texts of: they would not be found again."""
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a key {key!r} cannot be sent to other ranks")
            _check_keys(each)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_keys(each)
