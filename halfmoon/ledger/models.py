"""The ledger's tables."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import JSON, DateTime, Dialect, String, TypeDecorator
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

RequestStatus = Literal["ok", "error", "cancelled", "rejected"]


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, in UTC also where the database keeps no time zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """To UTC on the way in."""
        assert value is None or value.tzinfo is not None
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Aware on the way out."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Root of the ledger's tables."""


class QosClassRow(Base):
    """A QoS class. `version` counts its edits, so that none of them overwrites another unseen."""

    __tablename__ = "qos_classes"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    version: Mapped[int]
    definition: Mapped[dict[str, Any]] = mapped_column(JSON)


class RequestRow(Base):
    """One request that reached the gateway. Times are seconds from its arrival, on the gateway's clock."""

    __tablename__ = "requests"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    request_id: Mapped[str] = mapped_column(String(128), index=True)  # the client may choose it: not unique
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    model: Mapped[str] = mapped_column(String(256))
    endpoint: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16))  # RequestStatus
    http_status: Mapped[int]
    error: Mapped[str | None]
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]  # prompt tokens not computed again
    output_tokens: Mapped[int]
    finish_reason: Mapped[str | None] = mapped_column(String(16))
    prefill_worker: Mapped[str | None] = mapped_column(String(256))  # of the last attempt
    decode_worker: Mapped[str | None] = mapped_column(String(256))
    queue_s: Mapped[float | None]  # at the first prefill worker
    ttft_s: Mapped[float | None]
    mean_tbt_s: Mapped[float | None]
    max_tbt_s: Mapped[float | None]
    e2e_s: Mapped[float]
    num_retries: Mapped[int]
    qos_class: Mapped[str | None] = mapped_column(String(64))
    predicted_ttft_s: Mapped[float | None]  # when it was admitted, or refused
    predicted_tbt_s: Mapped[float | None]

    def as_dict(self) -> dict[str, Any]:
        """Columns by name."""
        return {column.key: getattr(self, column.key) for column in self.__table__.columns}
