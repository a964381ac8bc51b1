"""Frames of the engine seam, without sockets."""

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.engine.frames import FrameDecoder, FrameError, encode_frame
from agentserve.engine.messages import (
    Cancel,
    Close,
    Command,
    Event,
    Finished,
    Fork,
    Submit,
    Tokens,
)
from agentserve.engine.plan import SamplingParams, pack

COMMANDS: list[Command] = [
    Submit(
        turn=1,
        sequence=7,
        generation=2,
        keep=0,
        tokens=pack([1, 2, 3]),
        namespace="local",
        max_tokens=8,
        stop_ids=[2],
        sampling=SamplingParams(temperature=0.5, logit_bias={3: -1.5}),
        grammar="{}",
    ),
    Fork(sequence=7, generation=2, into=8, into_generation=1, keep=3),
    Cancel(turn=1),
    Close(sequence=7),
]
STREAM = b"".join(map(encode_frame, COMMANDS))


def test_commands_survive_a_stream_that_is_split_at_every_byte():
    for cut in range(len(STREAM) + 1):
        decoder: FrameDecoder[Command] = FrameDecoder(Command)
        assert decoder.feed(STREAM[:cut]) + decoder.feed(STREAM[cut:]) == COMMANDS


@given(st.lists(st.integers(min_value=0, max_value=len(STREAM)), max_size=20))
def test_commands_survive_any_chunks(cuts):
    decoder: FrameDecoder[Command] = FrameDecoder(Command)
    edges = [0, *sorted(cuts), len(STREAM)]
    got = [
        command
        for start, end in itertools.pairwise(edges)
        for command in decoder.feed(STREAM[start:end])
    ]
    assert got == COMMANDS


def test_a_batch_of_events_is_one_frame():
    batch: list[Event] = [
        Tokens(1, [5, 6]),
        Finished(1, "stop", log_length=5, kv_length=5, stop_id=2),
    ]
    decoder: FrameDecoder[list[Event]] = FrameDecoder(list[Event])
    assert decoder.feed(encode_frame(batch)) == [batch]


def test_a_length_over_the_limit_is_refused_before_its_body_arrives():
    decoder: FrameDecoder[Command] = FrameDecoder(Command, max_frame_bytes=100)
    with pytest.raises(FrameError, match="over the limit"):
        decoder.feed(struct.pack("<I", 101))


def test_a_value_over_the_limit_is_not_encoded():
    with pytest.raises(FrameError, match="over the limit"):
        encode_frame(bytes(64 * 1024 * 1024))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\xff\xff",
        b"\xa2\xff\xfe",
        encode_frame({"type": "no_such_command"})[4:],
        encode_frame({"type": "cancel"})[4:],
        encode_frame({"type": "cancel", "turn": "one"})[4:],
        encode_frame([1, 2])[4:],
    ],
)
def test_a_body_of_another_shape_is_a_frame_error(body):
    decoder: FrameDecoder[Command] = FrameDecoder(Command)
    with pytest.raises(FrameError, match="malformed frame"):
        decoder.feed(struct.pack("<I", len(body)) + body)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_values_or_a_frame_error(data):
    decoder: FrameDecoder[Command] = FrameDecoder(Command)
    try:
        values = decoder.feed(data)
    except FrameError:
        return
    assert all(isinstance(value, Command) for value in values)
