"""The one error tree. Each class carries the gRPC status it travels as; `rpc.interceptor` does the mapping.

    HalfmoonError                    INTERNAL              a bug of ours
    ├── InvalidRequest               INVALID_ARGUMENT      bad input; `param` names the field
    │   └── ConstraintFailed         INVALID_ARGUMENT      a structured output allows no token within its limits
    ├── Unauthenticated              UNAUTHENTICATED       no token or credential, or an unknown one
    ├── Forbidden                    PERMISSION_DENIED     the caller's role may not do this
    ├── NotFound                     NOT_FOUND             absent block, unknown request
    │   └── UnknownModel             NOT_FOUND             no such model is served here
    ├── AlreadyHere                  ALREADY_EXISTS        it is already stored here
    ├── DataLoss                     DATA_LOSS             a digest did not match
    ├── Incompatible                 FAILED_PRECONDITION   wrong model, layout or version
    ├── NoCapacity                   RESOURCE_EXHAUSTED    full now; `retry_after_ms` says when to come back
    ├── Unavailable                  UNAVAILABLE           the peer is starting or gone
    │   └── StalePlacement           ABORTED               the worker drains, or serves another role by now
    ├── Cancelled                    ABORTED               the request was cancelled during this call
    ├── DeadlineExceeded             DEADLINE_EXCEEDED     a peer did not answer in time
    └── ServiceFailed                INTERNAL              a service's process ended on its own

gRPC's own UNKNOWN and CANCELLED are never ours to send. This file knows nothing of gRPC but the status names.
"""

from __future__ import annotations

from typing import ClassVar


class HalfmoonError(Exception):
    """Root of the tree, and the class of our own bugs. `message` is safe to show to a user."""

    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, param: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms


class InvalidRequest(HalfmoonError):
    """A user's or peer's input is wrong; `param` names the offending field, if there is one."""

    grpc_status = "INVALID_ARGUMENT"


class ConstraintFailed(InvalidRequest):
    """An output's constraint allows no token, or finding one needs more work than is allowed."""

    def __init__(
        self,
        message: str = "the structured output cannot go on: finding its next token needs more work than is allowed, or "
        "no token is allowed; make its schema, expression or grammar simpler",
        *,
        param: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_ms=retry_after_ms)


class Unauthenticated(HalfmoonError):
    """The caller has no token or credential where one is required, or an unknown one."""

    grpc_status = "UNAUTHENTICATED"


class Forbidden(HalfmoonError):
    """The caller is known, and its role may not do this."""

    grpc_status = "PERMISSION_DENIED"


class NotFound(HalfmoonError):
    """The requested object is not here."""

    grpc_status = "NOT_FOUND"


class UnknownModel(NotFound):
    """The named model is not served here."""


class AlreadyHere(HalfmoonError):
    """The object to be stored is already here."""

    grpc_status = "ALREADY_EXISTS"


class DataLoss(HalfmoonError):
    """The digest of bytes that arrived or were read does not match."""

    grpc_status = "DATA_LOSS"


class Incompatible(HalfmoonError):
    """Two ends disagree on model, layout or protocol version; retrying cannot help."""

    grpc_status = "FAILED_PRECONDITION"


class NoCapacity(HalfmoonError):
    """No room now; another worker may have some, or this one after `retry_after_ms`."""

    grpc_status = "RESOURCE_EXHAUSTED"


class Unavailable(HalfmoonError):
    """The peer is starting, draining or gone; another one may serve the call."""

    grpc_status = "UNAVAILABLE"


class StalePlacement(Unavailable):
    """The worker takes no such work any more; whoever placed it did not know yet, and places it again."""

    grpc_status = "ABORTED"


class Cancelled(HalfmoonError):
    """Another party cancelled the request that this call worked for."""

    grpc_status = "ABORTED"


class DeadlineExceeded(HalfmoonError):
    """A peer did not answer within the call's deadline."""

    grpc_status = "DEADLINE_EXCEEDED"


class ServiceFailed(HalfmoonError):
    """A service's process ended on its own; the message says how and where its log is."""


def leaf_errors(error: BaseException) -> list[BaseException]:
    """The errors inside an exception group, however deep; an ordinary error is its own only leaf."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaf_errors(inner)]
    return [error]


def error_classes() -> dict[str, type[HalfmoonError]]:
    """Every class of the tree by name, for looking up the `halfmoon-error` trailer."""
    classes: dict[str, type[HalfmoonError]] = {}
    todo: list[type[HalfmoonError]] = [HalfmoonError]
    while todo:
        cls = todo.pop()
        classes[cls.__name__] = cls
        todo.extend(cls.__subclasses__())
    return classes
