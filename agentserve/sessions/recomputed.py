"""Why tokens were computed although their KV had been computed before: one reason for each."""

from collections.abc import Iterable

from agentserve.wire import Recomputed

REASONS = (
    "template_rewrite",  # the template renders the past otherwise than before
    "history_edited",  # the past was replaced, or the head moved where the engine's copy was not
    "tools_changed",  # the tools in the prompt were changed
    "engine_restarted",  # the KV was lost with an engine
    "evicted",  # another session needed the room, and there is no host tier
    "host_full",  # another session needed the room, and the host tier had none
    "policy",  # the KV policy keeps nothing between turns
    "dropped",  # the client gave the hint kv: drop
    "preempted",  # the turn gave up its KV to another while it ran
    "last_token",  # all was there; the last token is computed to get what follows
)


def closed_list(reason: str) -> str:
    """Return the engine's reason, or the most general one when this version does not know it.

    Without any, the engine's copy never had what the head needs.
    """
    return reason if reason in REASONS else "evicted" if reason else "history_edited"


def divide(tokens: int, causes: Iterable[Recomputed]) -> list[Recomputed]:
    """Return `tokens` divided among `causes`, in their order and at most what each stands for.

    What no cause stands for is left out; causes of one reason become one.
    """
    parts: dict[str, int] = {}
    for cause in causes:
        taken = min(cause.tokens, tokens)
        if taken > 0:
            tokens -= taken
            parts[cause.reason] = parts.get(cause.reason, 0) + taken
    return [Recomputed(taken, reason) for reason, taken in parts.items()]
