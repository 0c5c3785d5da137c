"""How values lie in the ledger: arrays as little-endian blobs, the rest as JSON with sorted keys."""

import hashlib
import zlib
from typing import Any

import numpy as np
import orjson

from reef.types import Floats, Ids

BROKEN_BODY = (zlib.error, TypeError)  # what unpacking a body raises that nobody packed


def pack_ids(ids: Ids) -> bytes:
    """int32 [N] -> 4N bytes."""
    return ids.astype("<i4", copy=False).tobytes()


def unpack_ids(blob: bytes) -> Ids:
    """4N bytes -> int32 [N], read-only. Raises ValueError where the length is no multiple of 4."""
    return np.frombuffer(blob, dtype="<i4")


def pack_floats(values: Floats) -> bytes:
    """float32 [N] -> 4N bytes, bit for bit (so -inf and NaN survive)."""
    return values.astype("<f4", copy=False).tobytes()


def unpack_floats(blob: bytes) -> Floats:
    """4N bytes -> float32 [N], read-only, bit for bit. Raises ValueError where the length is no multiple of 4."""
    return np.frombuffer(blob, dtype="<f4")


def pack_body(body: bytes) -> bytes:
    """Compress a request's body (zlib, fastest level)."""
    return zlib.compress(body, level=1)


def unpack_body(blob: bytes) -> bytes:
    """The body that `pack_body` compressed, byte for byte. Raises one of BROKEN_BODY where the blob is broken."""
    return zlib.decompress(blob)


def to_json(value: Any) -> str:
    """Canonical JSON: sorted keys, no spaces, so that equal values have equal digests."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def from_json(text: str) -> Any:
    """The value of a JSON text. Raises orjson.JSONDecodeError where it is not JSON."""
    return orjson.loads(text)


def digest(*parts: bytes | str) -> str:
    """sha256 (hex) over the parts, each preceded by its length, so that no two lists of parts collide."""
    hasher = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()
