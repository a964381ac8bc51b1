"""Errors of turns that the engine or the store did not take."""

from agentserve.engine.messages import NOTHING_FITS, Refused
from agentserve.errors import (
    AgentserveError,
    BadToolSchema,
    ContextFull,
    EngineDown,
    EngineError,
    ExceedsKvCapacity,
    InvalidRequest,
    Overloaded,
)
from agentserve.sessions.turn import TurnRun

_REFUSALS: dict[str, type[AgentserveError]] = {
    "context_full": ContextFull,
    "exceeds_kv_capacity": ExceedsKvCapacity,
    "overloaded": Overloaded,
    "no_compiler": EngineDown,  # it is started again for the next turn
}


def refusal(run: TurnRun, event: Refused) -> AgentserveError:
    """Return the error of a turn that the engine refused after it was accepted."""
    if event.code != "bad_grammar":
        return _REFUSALS.get(event.code, EngineError)(event.message)
    return _bad_schema(run, f"the schema cannot be compiled to a grammar: {event.message}")


def failure(run: TurnRun, message: str) -> AgentserveError:
    """Return the error of a turn that failed alone; `message` is the engine's."""
    if message != NOTHING_FITS:
        return EngineError(message)
    return _bad_schema(run, "the schema has no value that could be generated here")


def _bad_schema(run: TurnRun, message: str) -> AgentserveError:
    if run.request.response_format is not None:
        return InvalidRequest(message, param="response_format.schema")
    return BadToolSchema(message, param="tools")


def as_refusal(error: BaseException) -> AgentserveError:
    """Return the error of a turn that could not be written down."""
    if isinstance(error, AgentserveError):
        return error
    return EngineError("the turn could not be stored")
