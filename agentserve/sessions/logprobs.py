"""Log probabilities as clients see them: each once, beside the text that its token has given."""

from collections import deque
from collections.abc import Sequence

import msgspec

from agentserve import wire
from agentserve.engine.plan import TokenLogprobs
from agentserve.sessions.cut import Ledger
from agentserve.sessions.tokenizer import Tokenizer


class Logprobs:
    """Those of one turn's tokens; the ledger knows which characters each has given."""

    def __init__(self, tokenizer: Tokenizer, ledger: Ledger) -> None:
        self._tokenizer = tokenizer
        self._ledger = ledger
        self._held: deque[tuple[int, int, TokenLogprobs]] = deque()  # place of the id, id

    def push(self, token: int, logprobs: TokenLogprobs) -> None:
        """Take those of the id that the ledger gets next."""
        self._held.append((self._ledger.count, token, logprobs))

    def take(self, pieces: Sequence[tuple[int, str]]) -> list[wire.TokenLogprob]:
        """Return those of the ids that gave any part of the pieces, without what was taken before.

        pieces: text, and where it begins in the stream.
        """
        if not self._held:
            return []
        shown = []
        for begin, text in pieces:
            for place in self._ledger.ids_within(begin, begin + len(text)):
                while self._held and self._held[0][0] < place:
                    self._held.popleft()  # nothing of it was shown
                if self._held and self._held[0][0] == place:
                    _, token, of = self._held.popleft()
                    shown.append(self._shown(token, of))
        return shown

    def _shown(self, token: int, of: TokenLogprobs) -> wire.TokenLogprob:
        top = [
            wire.TopLogprob(one, *self._spelled(one), value)
            for one, value in zip(of.top, of.top_logprobs, strict=True)
        ]
        return wire.TokenLogprob(token, *self._spelled(token), of.logprob, top)

    def _spelled(self, token: int) -> tuple[str, list[int]]:
        """Return a token's text and bytes; a control token, which adds no text, has its name."""
        data = self._tokenizer.token_bytes(token) or self._tokenizer.control_text(token).encode()
        return data.decode("utf-8", "backslashreplace"), list(data)


def without_logprobs(items: Sequence[wire.OutputItem]) -> list[wire.OutputItem]:
    """Return output items as a session keeps them: its history would grow by many times."""
    return [
        msgspec.structs.replace(item, logprobs=[])
        if isinstance(item, wire.TextOut) and item.logprobs
        else item
        for item in items
    ]


def told_without(turn: wire.Turn) -> wire.Turn:
    """Return a turn without log probabilities."""
    return msgspec.structs.replace(turn, output=without_logprobs(turn.output))
