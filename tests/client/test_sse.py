"""Events come out whole however their bytes are cut."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from agentserve.client.sse import Message, SSEParser

STREAM = (
    b": ping\n\n"
    b'id: 1\nevent: text.delta\ndata: {"delta":"h\xc3\xa9"}\n\n'
    b"id: 2\r\ndata:no space\r\n\r\n"
    b"retry: 5\nunknown\n\n"
    b"data: two\ndata: lines\n\n"
    b": ping\n\n"
)
MESSAGES = [
    Message(b'{"delta":"h\xc3\xa9"}', "1"),
    Message(b"no space", "2"),
    Message(b"two\nlines", "2"),
]


@given(st.lists(st.integers(0, len(STREAM))))
def test_any_cutting_gives_the_same_messages(cuts):
    places = [0, *sorted(cuts), len(STREAM)]
    parser = SSEParser()
    found = [
        message
        for start, end in itertools.pairwise(places)
        for message in parser.feed(STREAM[start:end])
    ]
    assert found == MESSAGES


def test_an_incomplete_message_does_not_count_as_seen():
    parser = SSEParser()
    parser.feed(b"id: 1\ndata: a\n\nid: 2\ndata: b")
    parser.restart()
    assert parser.last_id == "1"
    assert parser.feed(b"data: c\n\n") == [Message(b"c", "1")]
