"""What workers must agree on: 128 bits in hex, equal for equal weights and configurations."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from halfmoon.errors import InvalidRequest

BLOCK_FILE = "model.blocks"  # safetensors, but by a name that other engines do not load
FINGERPRINT_FILE = "halfmoon_fingerprint"  # where weights are not there, or not as numbers: description, convert_gguf
SAMPLE_BYTES = 4096  # read from each tensor
_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}


class Sample(NamedTuple):
    """What counts of a tensor: `dtype` as safetensors names it, and the first SAMPLE_BYTES of its numbers."""

    name: str
    dtype: str
    shape: list[int]
    content: bytes


def fingerprint(path: Path, raw: dict[str, Any], files: tuple[Path, ...]) -> str:
    """Hash of the configuration `raw`, and of every tensor's name, dtype, shape and first bytes.

    Raises InvalidRequest for a broken file, also where the hash is written down.
    """
    described = path / FINGERPRINT_FILE
    if described.is_file():
        for file in filter(Path.is_file, (*files, path / BLOCK_FILE)):
            _samples(file, f"remove {path} and start again from the .gguf file")
        text = described.read_bytes()
        if not re.fullmatch(rb"[0-9a-f]{32}", text):
            raise InvalidRequest(f"{described} must be 32 hexadecimal digits: make the directory anew", param="model")
        return text.decode()
    return fingerprint_of(raw, chain.from_iterable(map(_samples, files)))


def fingerprint_of(raw: dict[str, Any], samples: Iterable[Sample]) -> str:
    """The fingerprint of a configuration and of tensors, which are sorted by name within a file."""
    hasher = hashlib.blake2b(digest_size=16)
    volatile = ("_name_or_path", "transformers_version")
    hasher.update(json.dumps({k: v for k, v in raw.items() if k not in volatile}, sort_keys=True).encode())
    for sample in samples:
        hasher.update(f"{sample.name} {sample.dtype} {sample.shape}".encode())
        hasher.update(sample.content)
    return hasher.hexdigest()


def _samples(file: Path, advice: str = "get it again") -> list[Sample]:
    """Reads a safetensors file: the header's length (u64 LE), a JSON header, then the tensors' bytes."""
    try:
        return _samples_of_whole(file)
    except FileNotFoundError as error:
        raise InvalidRequest(
            f"{file} is not there, and the model's weights are in it: get it", param="model"
        ) from error
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}", param="model") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise InvalidRequest(f"{file} is damaged or cut off ({error}): {advice}", param="model") from error


def _samples_of_whole(file: Path) -> list[Sample]:
    """Checks what the safetensors library does while it loads: tensors lie end to end, up to the file's end."""
    samples = []
    file_bytes = file.stat().st_size
    with file.open("rb") as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        if header_bytes > file_bytes:
            raise ValueError(f"a header of {header_bytes} bytes in a file of {file_bytes}")
        header = json.loads(stream.read(header_bytes))
        header.pop("__metadata__", None)
        here = 0
        for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
            start, end = header[name]["data_offsets"]
            if 8 + header_bytes + end > file_bytes:
                raise ValueError(f"{name} ends behind the file's {file_bytes} bytes")
            if start != here or end < start:
                raise ValueError(f"{name} begins at byte {start}, the tensors before it end at {here}")
            dtype, shape = header[name]["dtype"], header[name]["shape"]
            bits = _BITS.get(dtype)
            if not isinstance(dtype, str) or (bits is not None and math.prod(shape) * bits != 8 * (end - start)):
                raise ValueError(f"{name} of {dtype} {shape} has {end - start} bytes")
            here = end
        if 8 + header_bytes + here != file_bytes:
            raise ValueError(f"its tensors end at byte {8 + header_bytes + here}, the file at {file_bytes}")
        for name in sorted(header):
            start, end = header[name]["data_offsets"]
            stream.seek(8 + header_bytes + start)
            content = stream.read(min(end - start, SAMPLE_BYTES))
            samples.append(Sample(name, header[name]["dtype"], header[name]["shape"], content))
    return samples
