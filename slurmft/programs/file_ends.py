"""Whether a file of weights was cut off: its format says where it ends.

Formats that do: zip (torch.save, numpy.savez), torch.save's older one, .npy and .safetensors.
"""

import ast
import math
import pickletools
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO

from slurmft.core.files import MOST_BYTES, open_regular, parse_json

WEIGHTS = {
    ".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".npz", ".npy", ".distcp", ".pkl", ".pickle",
    ".h5", ".hdf5", ".msgpack", ".joblib", ".gguf", ".onnx",
}  # fmt: skip
"""Suffixes of files of weights."""
_ZIP = b"PK\x03\x04"
_NUMPY = b"\x93NUMPY"
_OLDER_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of a file in the older format of torch, which is no zip archive."""
_FIRST_BYTES = 4096
_ELEMENT_BYTES = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1,
    "Byte": 1, "Bool": 1, "ComplexDouble": 16, "ComplexFloat": 8, "Untyped": 1,
}  # fmt: skip
"""Bytes of an element of torch's storages, by the beginning of their names."""


def is_weights(path: Path) -> bool:
    """Returns whether a file holds weights, by its suffix."""
    return path.suffix.lower() in WEIGHTS


def is_cut_off(path: Path) -> bool:
    """Returns whether a file ends too early, or is a file of weights of zeros alone, as a crash
    of the system may leave it."""
    try:
        with open_regular(path) as file:
            first = file.read(_FIRST_BYTES)
            if is_weights(path) and (not any(first) or _is_short_head(first)):
                return True
            if first.startswith(_ZIP):
                import zipfile  # a start alone needs it, not the commands

                # It looks for the table of contents, which is written last.
                return not zipfile.is_zipfile(path)
            file.seek(0)
            return path.stat().st_size < _least_bytes(path, first, file)
    # The header is cut off.
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return True
    except (SyntaxError, struct.error):
        return True


def _is_short_head(first: bytes) -> bool:
    """Returns whether a file ends within the bytes by which its format is known."""
    heads = (_ZIP, _NUMPY, _OLDER_TORCH)
    return any(head.startswith(first) and head != first for head in heads)


def _least_bytes(path: Path, first: bytes, file: BinaryIO) -> int:
    """Returns how long a file is at least, by its header; 0: its format does not say so.

    Raises:
        ValueError, LookupError, TypeError, AttributeError, SyntaxError, struct.error: the header
            itself is cut off.
    """
    if path.suffix.lower() == ".safetensors":
        return _safetensors_bytes(file)
    if first.startswith(_NUMPY):
        return _numpy_bytes(file)
    if first.startswith(_OLDER_TORCH):
        return _older_torch_bytes(file)
    return 0


def _safetensors_bytes(file: BinaryIO) -> int:
    (header_bytes,) = struct.unpack("<Q", file.read(8))
    header = parse_json(file.read(min(header_bytes, MOST_BYTES)))
    ends = [0]
    for name, tensor in header.items():
        if name != "__metadata__":
            ends.append(tensor["data_offsets"][1])
    return int(8 + header_bytes + max(ends))


def _numpy_bytes(file: BinaryIO) -> int:
    major, _ = file.read(len(_NUMPY) + 2)[-2:]
    # The length of the header has 2 bytes in version 1, 4 later.
    layout = "<I"
    if major == 1:
        layout = "<H"
    (header_bytes,) = struct.unpack(layout, file.read(struct.calcsize(layout)))
    header = ast.literal_eval(file.read(header_bytes).decode())
    description = header["descr"]
    match = re.fullmatch(r"[<>|=]?([a-zA-Z])(\d+)(\[.*\])?", str(description))
    # Of records; Python objects (`|O`) are pickled.
    if match is None or match[1] == "O":
        return file.tell()
    element_bytes = int(match[2])
    # Characters of four bytes.
    if match[1] == "U":
        element_bytes *= 4
    elements = int(math.prod(header["shape"]))
    return file.tell() + elements * element_bytes


def _older_torch_bytes(file: BinaryIO) -> int:
    """Reads five pickles, without executing them: the fourth names the storages that follow."""
    sizes: dict[str, int] = {}
    for _ in range(5):
        sizes |= _storages(file)
    # Each begins with the number of its elements.
    return file.tell() + sum(8 + size for size in sizes.values())


def _storages(file: BinaryIO) -> dict[str, int]:
    """Returns the storages that a pickle of torch.save names: key -> bytes.

    Raises:
        ValueError: the pickle is cut off.
    """
    sizes = {}
    memo: dict[Any, Any] = {}
    # What was put on the stack, without what was taken from it.
    values: list[Any] = [None]
    for operation, argument, _ in pickletools.genops(file):
        match operation.name:
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = values[-1]
            case "BINGET" | "LONG_BINGET":
                values.append(memo[argument])
            case "BINPERSID":
                # ("storage", type, key, device, elements, view, the tuple of these)
                kind, key, _, elements, _ = values[-6:-1]
                name = re.fullmatch(r"torch(?:\.storage)? (\w+)Storage", kind)
                if name is not None:
                    sizes[key] = elements * _ELEMENT_BYTES.get(name[1], 1)
            case "MARK" | "STOP" | "PROTO":
                pass
            case _:
                values.append(argument)
                del values[:-16]
    return sizes
