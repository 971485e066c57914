"""Who a call is from, and whether it may be made at all: before anything of its request is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from block_manager_svc.core.errors import PermissionDenied, Refused
from block_manager_svc.identity import Caller, Callers, Role

_GENERATION: Final = "/pagedkv.v1.GenerationService/"
_BLOCK_MANAGER: Final = "/pagedkv.v1.BlockManagerService/"
_EXECUTOR_LINK: Final = "/pagedkv.v1.ExecutorLinkService/"

# One of these roles is needed. What is not named here administers, and is for operators.
_ROLES: Final = {
    _GENERATION + "Generate": frozenset({Role.GATEWAY}),
    _GENERATION + "ListModels": frozenset({Role.GATEWAY, Role.ENGINE, Role.OPERATOR}),
    _BLOCK_MANAGER + "StepBatch": frozenset({Role.ENGINE}),
    _BLOCK_MANAGER + "GetPool": frozenset({Role.ENGINE, Role.OPERATOR}),
    _BLOCK_MANAGER + "ListSequences": frozenset({Role.ENGINE, Role.OPERATOR}),
    _BLOCK_MANAGER + "GetBlockTables": frozenset({Role.ENGINE, Role.OPERATOR}),
    _BLOCK_MANAGER + "GetSequence": frozenset({Role.ENGINE, Role.OPERATOR}),
    _BLOCK_MANAGER + "Match": frozenset({Role.GATEWAY, Role.ENGINE, Role.OPERATOR}),
    _BLOCK_MANAGER + "WatchEvents": frozenset({Role.GATEWAY, Role.ENGINE, Role.OPERATOR}),
    _EXECUTOR_LINK + "Attach": frozenset({Role.EXECUTOR}),
}
_ADMINISTRATION: Final = frozenset({Role.OPERATOR})

_SCHEME: Final = "bearer "

# Without a default: a call that did not pass here is from nobody. Each call has a task, and so a value, of its own.
_caller: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """Whom the call that is being served is from."""
    return _caller.get()


class Authentication(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """To stand behind Boundary, which gives what is refused its status. Health and reflection are open."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith("/pagedkv."):
            return handler
        try:
            who = self._callers.identify(_token(handler_call_details))
            _check_role(who, method)
        except Refused as refused:
            return _refusing(handler, refused)
        _caller.set(who)
        return handler


def _token(details: grpc.HandlerCallDetails) -> str | None:
    for key, value in details.invocation_metadata:
        if key == "authorization" and isinstance(value, str) and value[: len(_SCHEME)].lower() == _SCHEME:
            return value[len(_SCHEME) :].strip()
    return None


def _check_role(who: Caller, method: str) -> None:
    needed = _ROLES.get(method, _ADMINISTRATION)
    if who.roles.isdisjoint(needed):
        name = method.rpartition("/")[2]
        raise PermissionDenied(
            "ROLE_NOT_ALLOWED",
            f"{name} is for {' or '.join(sorted(needed))}, this token's tenant {who.tenant.name} is "
            f"{', '.join(sorted(who.roles))}: use another token",
            method=name,
            needed=",".join(sorted(needed)),
            tenant=who.tenant.name,
            roles=",".join(sorted(who.roles)),
        )


def _refusing(handler: grpc.RpcMethodHandler[Any, Any], refused: Refused) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler of the same kind that reads nothing and raises."""

    async def refuse(request: object, context: object) -> NoReturn:
        raise refused

    behave: Any = refuse
    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(behave, bytes, handler.response_serializer)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(behave, bytes, handler.response_serializer)
    return grpc.unary_unary_rpc_method_handler(behave, bytes, handler.response_serializer)
