"""Worker: OpenVINO GenAI's ContinuousBatchingPipeline, stepped in this thread."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino
import openvino_genai
from peers.workers.protocol import Message, Pipe, Sessions

WARM_UP_TURN = 0  # turns are numbered from 1


@dataclass
class Open:
    """A turn that runs."""

    message: Message
    handle: Any
    ids: list[int] = field(default_factory=list)


class Engine:
    """The pipeline, and the turns that it works on."""

    def __init__(self, options: Message) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        for name, value in options["scheduler"].items():
            setattr(scheduler, name, value)
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            options["model"], scheduler, "CPU", options["properties"]
        )
        self._sessions = Sessions()
        self.open: list[Open] = []

    def add(self, message: Message) -> None:
        """Begin a turn."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = message["output"]
        config.ignore_eos = True
        config.do_sample = False
        prompt = self._sessions.prompt(message["session"], message["new"])
        tensor = openvino.Tensor(np.array([prompt], dtype=np.int64))
        handle = self._pipeline.add_request(message["turn"], tensor, config)
        self.open.append(Open(message, handle))

    def step(self, pipe: Pipe) -> None:
        """Run one step and tell of first tokens and of ends."""
        self._pipeline.step()
        for turn in list(self.open):
            self._read(turn, pipe)
            if len(turn.ids) >= turn.message["output"]:
                self._end(turn, pipe)

    def _read(self, turn: Open, pipe: Pipe) -> None:
        """Take what a turn has said.

        A preempted request can be read and then gives nothing; one that the pipeline gave up
        never gives anything again.
        """
        while turn.handle.can_read() and (outputs := turn.handle.read()):
            (output,) = outputs.values()
            if not turn.ids:
                pipe.say(event="first", turn=turn.message["turn"])
            turn.ids += output.generated_ids
        if turn.handle.get_status() == openvino_genai.GenerationStatus.IGNORED:
            raise RuntimeError("the pipeline has no room for a request, even alone")

    def _end(self, turn: Open, pipe: Pipe) -> None:
        self.open.remove(turn)
        self._sessions.said(turn.message["session"], turn.ids)
        pipe.say(event="done", turn=turn.message["turn"], output=len(turn.ids))


def serve(pipe: Pipe) -> None:
    """Answer until the input ends."""
    options = pipe.message()
    engine = Engine(options)
    engine.add({"turn": WARM_UP_TURN, "session": -1, "new": options["warm_up"], "output": 4})
    while engine.open:
        engine.step(Silent())
    pipe.say(event="ready", version=openvino_genai.__version__)
    while not pipe.ended:
        for message in pipe.messages(wait=not engine.open):
            engine.add(message)
        if engine.open:
            engine.step(pipe)


class Silent(Pipe):
    """Says nothing: for the warm-up."""

    def __init__(self) -> None:
        pass

    def say(self, **message: Any) -> None:
        """Drop the message."""


if __name__ == "__main__":
    serve(Pipe.standard())
