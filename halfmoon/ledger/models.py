"""The ledger's tables, as of the newest migration in `schema/`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Double, Integer, LargeBinary, String, TypeDecorator
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

RequestStatus = Literal["ok", "error", "cancelled", "rejected"]

RowNumber = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows only in INTEGER columns


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, in UTC even if the database stores no time zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Converts to UTC on the way in."""
        assert value is None or value.tzinfo is not None
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Makes values aware on the way out."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Root of the ledger's tables."""

    type_annotation_map: ClassVar = {float: Double}


class QosClassRow(Base):
    """A QoS class. `version` counts its edits, so that none silently overwrites another."""

    __tablename__ = "qos_classes"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    version: Mapped[int]
    definition: Mapped[dict[str, Any]] = mapped_column(JSON)


class ClassRevisionRow(Base):
    """A single row: how often any class was edited. Editors update it first, which serializes edits."""

    __tablename__ = "class_revision"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # 1
    revision: Mapped[int]


class ClassEditRow(Base):
    """One edit of a class: its definition before and after, None if it did not exist."""

    __tablename__ = "class_edits"

    revision: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    edited_at: Mapped[datetime] = mapped_column(UtcDateTime)
    name: Mapped[str] = mapped_column(String(64))
    version: Mapped[int]  # of the class since this edit; for a removed class, the last
    definition: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    before: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class DeclaredClassRow(Base):
    """A class as a configuration declared it last; what it is by now, `QosClassRow` says.

    `definition` is None for one that the configuration withdrew: no operator removed it.
    """

    __tablename__ = "declared_classes"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    definition: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class ModeEditRow:
    """One edit of a mode; the newest counts."""

    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    edited_at: Mapped[datetime] = mapped_column(UtcDateTime)
    mode: Mapped[str | None] = mapped_column(String(16))  # None: each service's own setting


class AdmissionEditRow(ModeEditRow, Base):
    """One edit of the admission mode."""

    __tablename__ = "admission_edits"


class AutopilotEditRow(ModeEditRow, Base):
    """One edit of the autopilot's mode."""

    __tablename__ = "autopilot_edits"


class WorkerChangeRow(Base):
    """One change of a worker by an operator."""

    __tablename__ = "worker_changes"

    id: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    changed_at: Mapped[datetime] = mapped_column(UtcDateTime)
    worker_id: Mapped[str] = mapped_column(String(256))
    before: Mapped[str] = mapped_column(String(16))  # its role
    after: Mapped[str] = mapped_column(String(16))  # its role, or what became of it
    epoch: Mapped[int]  # of its role
    changed_by: Mapped[str] = mapped_column(String(128))
    is_forced: Mapped[bool]
    gateway_id: Mapped[str] = mapped_column(String(64))


class AutopilotDecisionRow(Base):
    """One decision of the autopilot. Pressures are demand over capacity of a phase."""

    __tablename__ = "autopilot_decisions"

    id: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    decided_at: Mapped[datetime] = mapped_column(UtcDateTime)
    mode: Mapped[str] = mapped_column(String(16))
    action: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(String(256))
    worker_id: Mapped[str] = mapped_column(String(256))  # "": of no worker
    before: Mapped[str] = mapped_column(String(16))  # its role
    after: Mapped[str] = mapped_column(String(16))  # the role it is to have, or that of a worker to start
    split: Mapped[str] = mapped_column(String(32))  # prefill:decode:both
    target: Mapped[str] = mapped_column(String(32))
    num_needed: Mapped[int]  # workers that would meet the targets; 0: not known
    prefill: Mapped[float]
    decode: Mapped[float]
    predicted_prefill: Mapped[float]
    predicted_decode: Mapped[float]
    attainment: Mapped[float | None]  # of the requests that ended just before
    outcome: Mapped[str] = mapped_column(String(256))  # done, advised, or why it was refused
    measured_at: Mapped[datetime | None] = mapped_column(UtcDateTime)  # a while after
    measured_prefill: Mapped[float | None]
    measured_decode: Mapped[float | None]
    measured_attainment: Mapped[float | None]


class TenantRow(Base):
    """What a tenant may use. `version` counts its edits, so that none silently overwrites another."""

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    version: Mapped[int]
    definition: Mapped[dict[str, Any]] = mapped_column(JSON)


class ApiKeyRow(Base):
    """One API key of a tenant, by digest. Rows stay: where there ever was a key, one is needed."""

    __tablename__ = "api_keys"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)  # `halfmoon.rpc.credentials.api_keys.key_digest`
    tenant: Mapped[str] = mapped_column(String(64))
    label: Mapped[str] = mapped_column(String(128))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class TenantRevisionRow(Base):
    """A single row: how often tenants and keys were edited. Editors update it first, which serializes edits."""

    __tablename__ = "tenant_revision"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # 1
    revision: Mapped[int]


class ProfileRow(Base):
    """Speed that a worker of one kind measured of itself: the coefficients of its latency models."""

    __tablename__ = "latency_profiles"

    kind: Mapped[str] = mapped_column(String(256), primary_key=True)
    measured_at: Mapped[datetime] = mapped_column(UtcDateTime)
    prefill: Mapped[list[float]] = mapped_column(JSON)  # `policy.models.latency.PrefillModel`
    step: Mapped[list[float]] = mapped_column(JSON)  # `policy.models.latency.StepModel`


class MeasuredProfileRow(Base):
    """A profile measured by `halfmoon profile`, under its name."""

    __tablename__ = "measured_profiles"

    name: Mapped[str] = mapped_column(String(128), primary_key=True)
    measured_at: Mapped[datetime] = mapped_column(UtcDateTime)
    profile: Mapped[dict[str, Any]] = mapped_column(JSON)  # `sim.latency_sources.measured_profile.MeasuredProfile`


class PlanRow(Base):
    """A cluster layout found by the planner."""

    __tablename__ = "plans"

    id: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    model: Mapped[str] = mapped_column(String(256))
    goal: Mapped[dict[str, Any]] = mapped_column(JSON)  # the planning problem: targets, rate, hardware
    layout: Mapped[dict[str, Any]] = mapped_column(JSON)  # what to start
    figures: Mapped[dict[str, Any]] = mapped_column(JSON)  # its predicted figures


class RequestRow(Base):
    """One request that reached the gateway. Times are seconds from its arrival, on the gateway's clock."""

    __tablename__ = "requests"

    id: Mapped[int] = mapped_column(RowNumber, primary_key=True, autoincrement=True)
    request_id: Mapped[str] = mapped_column(String(128), index=True)  # the client may choose it, so it is not unique
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    model: Mapped[str] = mapped_column(String(256))
    endpoint: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16))  # RequestStatus
    http_status: Mapped[int]
    error: Mapped[str | None]
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]  # prompt tokens that were not recomputed
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
    predicted_ttft_s: Mapped[float | None]  # when it was admitted, or rejected
    predicted_tbt_s: Mapped[float | None]
    gateway_id: Mapped[str | None] = mapped_column(String(64))  # the row's writer; None in older rows
    num_outputs: Mapped[int | None]  # choices of all its prompts
    prefill_s: Mapped[float | None]  # from the first forward pass to the first token, on the first prefill worker
    predicted_queue_s: Mapped[float | None]  # the parts of `predicted_ttft_s`
    predicted_prefill_s: Mapped[float | None]
    refused_unread: Mapped[bool | None]  # before its prompt was tokenized: its predictions are lower bounds
    tenant: Mapped[str | None] = mapped_column(String(64))  # None where no API key is needed
    peer: Mapped[str | None] = mapped_column(String(256))  # the gateway that answered it instead of this one
    num_drafts: Mapped[int | None]  # tokens that workers guessed of its outputs (speculation)
    num_right_drafts: Mapped[int | None]  # of these, how many were what was drawn

    def as_dict(self) -> dict[str, Any]:
        """Columns by name."""
        values = vars(self)  # unset columns are absent
        return {name: values.get(name) for name in self.__table__.columns.keys()}  # noqa: SIM118 (not a mapping)


class _Leased:
    """What one gateway at a time works on. A lease that is not renewed ends, and another gateway goes on."""

    holder: Mapped[str | None] = mapped_column(String(64))  # the gateway; None: nobody
    leased_until: Mapped[datetime | None] = mapped_column(UtcDateTime)  # or given back; by the clock of the holder
    num_claims: Mapped[int]  # how often a gateway took it and did not give it back


class StoredResponseRow(_Leased, Base):
    """One response that is kept: a turn of a conversation, with its own input only. Leased while in the background."""

    __tablename__ = "stored_responses"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), index=True)
    previous_id: Mapped[str | None] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16), index=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    input: Mapped[list[Any]] = mapped_column(JSON)  # this turn's items
    response: Mapped[dict[str, Any]] = mapped_column(JSON)  # as it is returned
    job: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))  # what to run in the background


class ResponseEventsRow(Base):
    """Some events in a row of a background response that is streamed."""

    __tablename__ = "response_events"

    response_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    first: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # sequence number of the first
    events: Mapped[list[Any]] = mapped_column(JSON)


class FileRow(Base):
    """An uploaded file, or one that a batch made. Its bytes are in chunks."""

    __tablename__ = "files"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), index=True)
    filename: Mapped[str] = mapped_column(String(256))
    purpose: Mapped[str] = mapped_column(String(32))
    num_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)
    is_whole: Mapped[bool]  # False while it is being written


class FileChunkRow(Base):
    """A piece of a file."""

    __tablename__ = "file_chunks"

    file_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # from 0
    data: Mapped[bytes] = mapped_column(LargeBinary)


class BatchRow(_Leased, Base):
    """A batch of requests from a file."""

    __tablename__ = "batches"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(64), index=True)
    status: Mapped[str] = mapped_column(String(16), index=True)
    endpoint: Mapped[str] = mapped_column(String(64))
    input_file_id: Mapped[str] = mapped_column(String(64))
    output_file_id: Mapped[str | None] = mapped_column(String(64))
    error_file_id: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime, index=True)  # the end of its window
    labels: Mapped[dict[str, Any]] = mapped_column(JSON)  # the client's metadata
    times: Mapped[dict[str, Any]] = mapped_column(JSON)  # when each status began, in Unix seconds
    errors: Mapped[list[Any]] = mapped_column(JSON)  # why it failed as a whole
    num_total: Mapped[int]
    num_completed: Mapped[int]
    num_failed: Mapped[int]


class BatchResultRow(Base):
    """The result of one line of a batch that is running, as a line of its output or error file."""

    __tablename__ = "batch_results"

    batch_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # of the line, from 0
    is_error: Mapped[bool]
    line: Mapped[bytes] = mapped_column(LargeBinary)
