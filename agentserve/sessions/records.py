"""A session's turns as clients see them: running, in the history, on a branch, or failed."""

import msgspec

from agentserve.engine.plan import SamplingParams
from agentserve.errors import TurnNotFound
from agentserve.sessions.session import Session
from agentserve.sessions.store import Store
from agentserve.sessions.tree import Entry, TurnNode
from agentserve.wire import Context, Turn


class CommitRecord(msgspec.Struct, frozen=True):
    """What the store holds of a turn that ended: what was told, and the state that it left."""

    turn: Turn
    node: TurnNode | None
    sampling: SamplingParams | None


def turns(session: Session, limit: int) -> list[Turn]:
    """Return the turns of the head's history, oldest first."""
    context = session.context(limit)
    previous: str | None = None
    found: list[Turn] = []
    for entry in session.tree.entries(session.head):
        found.append(_of_entry(session, entry, context, previous))
        previous = entry.turn
    return found


async def turn(session: Session, turn_id: str, store: Store, limit: int) -> Turn:
    """Return one turn. Raises TurnNotFound."""
    context = session.context(limit)
    for run in session.open_runs():
        if run.id == turn_id:
            return run.turn(None, context)
    node = session.tree.nodes.get(turn_id)
    previous = node.parent if node is not None else None
    if entry := session.tree.find_entry(turn_id):
        return _of_entry(session, entry, context, previous)
    if node is not None:
        return Turn(turn_id, session.id, previous, "completed", context)
    if record := await store.load(session.key, turn_id):
        return msgspec.json.decode(record, type=CommitRecord).turn
    raise TurnNotFound(f"no turn {turn_id!r} in this session", param="turn")


def _of_entry(session: Session, entry: Entry, context: Context, previous: str | None) -> Turn:
    if entry.record:
        return msgspec.json.decode(entry.record, type=Turn)
    output = list(entry.output)
    return Turn(entry.turn, session.id, previous, "completed", context, output=output)
