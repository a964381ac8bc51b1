"""What the engine process sends: at once while the socket takes it, in order in any case."""

import socket
import threading

import pytest

from agentserve.engine.channel import SocketOutbox
from agentserve.engine.frames import FrameDecoder
from agentserve.engine.messages import Down, Event, Stats, Tokens

STATS = Stats(*[0] * 12)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    with ours, theirs:
        yield ours, theirs


def batches(ours, count):
    decoder, found = FrameDecoder(list[Event]), []
    while len(found) < count:
        found += decoder.feed(ours.recv(4096))
    return found


def test_a_batch_is_sent_by_the_thread_that_puts_it(ends):
    ours, theirs = ends
    SocketOutbox(theirs).put([Tokens(1, [2])])
    ours.setblocking(False)
    assert batches(ours, 1) == [[Tokens(1, [2])]]


def test_what_a_full_socket_does_not_take_is_sent_later_and_in_order(ends):
    ours, theirs = ends
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    outbox = SocketOutbox(theirs)
    sent = [[Tokens(1, [n] * 500)] for n in range(200)]
    for batch in sent:
        outbox.put(batch)
    outbox.put([STATS])  # a heartbeat is left out while others wait
    outbox.put_last([Down("stalled")])
    flusher = threading.Thread(target=outbox.flush, args=(60,))
    flusher.start()
    assert batches(ours, 201) == [*sent, [Down("stalled")]]
    flusher.join(60)
    assert not flusher.is_alive()
