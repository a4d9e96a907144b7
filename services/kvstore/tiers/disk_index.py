"""The disk tier's index: the location of each record, in SQLite. Blocking calls, all from one thread.

A row is committed after its record is on the device, and a file is removed after no row names it. So whenever the
process is killed, every row names a whole record. A row is not sealed: what it says is checked against the record.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, LargeBinary, create_engine, delete, event, select, text, update
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from halfmoon.catalog.block_identity import ID_BYTES, BlockMeta
from halfmoon.errors import HalfmoonError
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.owner import KVOwner
from services.kvstore.tiers.segments import Location

log = logging.getLogger(__name__)

_BATCH = 500
_OUTSIDE = (  # failures of SQLite that say nothing of what the file holds
    sqlite3.SQLITE_PERM, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_PROTOCOL,
)  # fmt: skip
_FORMAT_OF_WRITERS = 18  # its place in SQLite's header; 2 at most, or SQLite calls the file read-only
_NUMBERS = ("depth", "num_layers", "num_kv_heads", "head_dim", "block_tokens", "segment", "offset", "num_bytes")
_OLD_TABLES = ("blocks_v1",)  # their records had no seal


class _Tables(DeclarativeBase):
    """Metadata of this index."""


class BlockRow(_Tables):
    """One record."""

    __tablename__ = "blocks_v2"

    id: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)
    parent: Mapped[bytes | None] = mapped_column(LargeBinary)
    depth: Mapped[int]
    num_layers: Mapped[int]
    num_kv_heads: Mapped[int]
    head_dim: Mapped[int]
    dtype: Mapped[str]
    block_tokens: Mapped[int]
    recompute_s: Mapped[float]
    expires_at_s: Mapped[float | None]  # NULL: never expires
    pinned: Mapped[bool]
    segment: Mapped[int] = mapped_column(index=True)
    offset: Mapped[int]
    num_bytes: Mapped[int]
    tenant: Mapped[str]
    key_id: Mapped[bytes] = mapped_column(LargeBinary)  # of the record's seal


@dataclass(frozen=True, slots=True)
class IndexedBlock:
    """One row."""

    meta: BlockMeta
    place: Location
    pinned: bool


class _Damaged(OSError):
    """The file is not an index."""


class DiskIndex:
    """Owns the SQLite file. Raises OSError for every failure of SQLite, above all a full disk.

    A damaged file is begun anew when it is opened: its blocks are a cache.
    """

    def __init__(self, path: Path, key_id: bytes) -> None:
        """key_id: of the seal of records. Rows of other keys and of older versions are deleted, see `num_foreign`."""
        self._key_id = key_id
        self._path = path
        self._found: list[IndexedBlock] = []
        _make(path)
        self._engine: Engine = create_engine(f"sqlite:///{path}")
        event.listen(self._engine, "connect", _on_connect)
        try:
            self.num_foreign = self._prepare()
        except (_Damaged, UnicodeDecodeError) as err:  # names that are not UTF-8
            log.warning("disk.index_damaged", extra={"reason": str(err)})
            self._engine.dispose()
            for file in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
                file.unlink(missing_ok=True)
            _make(path)
            self.num_foreign = self._prepare()
        except OSError:
            self._engine.dispose()
            raise
        self._inode = path.stat().st_ino

    def is_here(self) -> bool:
        """Whether the file is still the one that was opened. Raises OSError if that cannot be told."""
        try:
            return self._path.stat().st_ino == self._inode
        except FileNotFoundError:
            return False

    def take_found(self) -> list[IndexedBlock]:
        """All rows when it was opened, each after its parent's; they are given away once."""
        found, self._found = self._found, []
        return found

    def in_segment(self, segment: int) -> list[IndexedBlock]:
        """Rows whose records lie in one file, in file order."""
        return self._rows(select(BlockRow.__table__).where(BlockRow.segment == segment).order_by(BlockRow.offset))

    def apply(
        self,
        stored: Iterable[tuple[BlockMeta, Location]] = (),
        removed: Iterable[bytes] = (),
        moved: Iterable[tuple[bytes, Location]] = (),
        pinned: Iterable[tuple[bytes, bool]] = (),
    ) -> None:
        """Applies everything or nothing: first the removals, then the rest."""
        ids = list(removed)
        with self._begin() as connection:
            for start in range(0, len(ids), _BATCH):
                connection.execute(delete(BlockRow).where(BlockRow.id.in_(ids[start : start + _BATCH])))
            rows = [{**_written(meta, place), "key_id": self._key_id} for meta, place in stored]
            for start in range(0, len(rows), _BATCH):
                statement = insert(BlockRow)
                renewed = {name: statement.excluded[name] for name in rows[0] if name not in ("id", "pinned")}
                connection.execute(
                    statement.on_conflict_do_update(index_elements=["id"], set_=renewed), rows[start : start + _BATCH]
                )
            for block, place in moved:
                where = {"segment": place.segment, "offset": place.offset, "num_bytes": place.num_bytes}
                connection.execute(update(BlockRow).where(BlockRow.id == block).values(**where))
            for block, is_pinned in pinned:
                connection.execute(update(BlockRow).where(BlockRow.id == block).values(pinned=is_pinned))

    def close(self) -> None:
        """Closes the file."""
        self._engine.dispose()

    def _prepare(self) -> int:
        """Makes the table and reads it; returns how many rows of other keys were deleted."""
        with open(self._path, "rb") as file:
            format_of_writers = file.read(_FORMAT_OF_WRITERS + 1)[_FORMAT_OF_WRITERS:]
        if format_of_writers > b"\x02":
            raise _Damaged(errno.EIO, "the disk tier's index: a format that SQLite cannot write")
        try:
            _Tables.metadata.create_all(self._engine)
        except DatabaseError as err:
            raise _error(err) from err
        with self._begin() as connection:
            found = connection.execute(text("PRAGMA integrity_check(1)")).scalar()
        if found != "ok":
            raise _Damaged(errno.EIO, f"the disk tier's index: {found}")
        num_foreign = self._delete_foreign()
        self._found = self._rows(select(BlockRow.__table__).order_by(BlockRow.depth))
        return num_foreign

    def _rows(self, query: Any) -> list[IndexedBlock]:
        with self._begin() as connection:
            rows = connection.execute(query).mappings().all()
        try:
            return [_read(row) for row in rows]
        except (HalfmoonError, TypeError, ValueError) as err:
            raise _Damaged(errno.EIO, f"the disk tier's index: {err}") from err

    def _delete_foreign(self) -> int:
        with self._begin() as connection:
            for table in _OLD_TABLES:
                connection.execute(text(f"DROP TABLE IF EXISTS {table}"))
            return int(connection.execute(delete(BlockRow).where(BlockRow.key_id != self._key_id)).rowcount)

    def _begin(self) -> Any:
        return _Transaction(self._engine)


class _Transaction:
    """`engine.begin()` that turns failures into OSError."""

    def __init__(self, engine: Engine) -> None:
        self._context = engine.begin()

    def __enter__(self) -> Any:
        try:
            return self._context.__enter__()
        except DatabaseError as err:
            raise _error(err) from err

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._context.__exit__(kind, error, trace)
        except DatabaseError as err:
            raise _error(err) from err
        if isinstance(error, DatabaseError):
            raise _error(error) from error


def _make(path: Path) -> None:
    """Makes a file that is its owner's alone, whatever the umask. SQLite's own files beside it follow its mode."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(file, 0o600)
    finally:
        os.close(file)


def _error(error: DatabaseError) -> OSError:
    """The error of the file system behind SQLite's."""
    code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF  # an error of text that is not UTF-8 has none
    if code not in _OUTSIDE:
        return _Damaged(errno.EIO, f"the disk tier's index: {error.orig}")
    number = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_READONLY: errno.EROFS}.get(code, errno.EIO)
    return OSError(number, f"the disk tier's index: {error.orig}")


def _on_connect(connection: Any, _: Any) -> None:
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA trusted_schema=OFF")
    cursor.close()


def _written(meta: BlockMeta, place: Location) -> dict[str, Any]:
    layout = meta.layout
    assert layout is not None
    return {
        "id": meta.id,
        "parent": meta.parent,
        "depth": meta.depth,
        "num_layers": layout.num_layers,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "dtype": layout.dtype,
        "block_tokens": layout.block_tokens,
        "recompute_s": meta.recompute_s,
        "expires_at_s": None if meta.expires_at_s == math.inf else meta.expires_at_s,
        "pinned": False,
        "segment": place.segment,
        "offset": place.offset,
        "num_bytes": place.num_bytes,
        "tenant": meta.tenant,
    }


def _read(row: Any) -> IndexedBlock:
    """Raises HalfmoonError, TypeError or ValueError if no block can be so."""
    KVOwner(row["tenant"])
    if any(len(block) != ID_BYTES for block in (row["id"], row["parent"]) if block is not None):
        raise ValueError("a row names no block")
    if not all(isinstance(row[name], int) and row[name] >= 0 for name in _NUMBERS):
        raise ValueError("a row has a number that cannot be")
    recompute_s, expires_at_s = row["recompute_s"], math.inf if row["expires_at_s"] is None else row["expires_at_s"]
    if not (isinstance(expires_at_s, float) and isinstance(recompute_s, float) and 0 <= recompute_s < math.inf):
        raise ValueError("a row has a time that cannot be")
    layout = KVLayout(row["num_layers"], row["num_kv_heads"], row["head_dim"], row["dtype"], row["block_tokens"])
    meta = BlockMeta(row["id"], row["parent"], row["depth"], layout, recompute_s, expires_at_s, row["tenant"])
    return IndexedBlock(meta, Location(row["segment"], row["offset"], row["num_bytes"]), row["pinned"])


def whole_rows(rows: Sequence[IndexedBlock], sizes: dict[int, int]) -> list[IndexedBlock]:
    """Rows whose record fits into its file, given the files' sizes."""
    return [row for row in rows if row.place.offset + row.place.num_bytes <= sizes.get(row.place.segment, 0)]
