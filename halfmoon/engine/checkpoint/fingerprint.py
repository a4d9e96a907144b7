"""What workers must agree on: 128 bits in hex, equal for equal weights and configurations."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from halfmoon.errors import HalfmoonError

FINGERPRINT_FILE = "halfmoon_fingerprint"  # in place of the weights: `description.py`
_SAMPLE_BYTES = 4096  # read from each tensor


def fingerprint(path: Path, raw: dict[str, Any], files: tuple[Path, ...]) -> str:
    """Hash of the configuration `raw`, and of every tensor's name, dtype, shape and first bytes.

    Raises HalfmoonError for a broken file.
    """
    described = path / FINGERPRINT_FILE
    if described.is_file():
        return described.read_text(encoding="ascii")
    hasher = hashlib.blake2b(digest_size=16)
    volatile = ("_name_or_path", "transformers_version")
    hasher.update(json.dumps({k: v for k, v in raw.items() if k not in volatile}, sort_keys=True).encode())
    for file in files:
        try:
            _hash_tensors(hasher, file)
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise HalfmoonError(f"{file} is damaged or cut off ({error}): get it again") from error
    return hasher.hexdigest()


def _hash_tensors(hasher: hashlib.blake2b, file: Path) -> None:
    """Hashes a safetensors file: the header's length (u64 LE), a JSON header, then the tensors' bytes.

    Raises ValueError, KeyError, TypeError, AttributeError or struct.error for a broken one.
    """
    file_bytes = file.stat().st_size
    with file.open("rb") as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        if header_bytes > file_bytes:
            raise ValueError(f"a header of {header_bytes} bytes in a file of {file_bytes}")
        header = json.loads(stream.read(header_bytes))
        header.pop("__metadata__", None)
        for name in sorted(header):
            start, end = header[name]["data_offsets"]
            if 8 + header_bytes + end > file_bytes:
                raise ValueError(f"{name} ends behind the file's {file_bytes} bytes")
            hasher.update(f"{name} {header[name]['dtype']} {header[name]['shape']}".encode())
            stream.seek(8 + header_bytes + start)
            hasher.update(stream.read(min(end - start, _SAMPLE_BYTES)))
