"""Worker: transformers' continuous batching, whose manager runs a thread of its own."""

import threading
from typing import Any

import torch
import transformers
from peers.workers.protocol import Message, Pipe, Sessions
from transformers import AutoModelForCausalLM
from transformers.generation import ContinuousBatchingConfig, GenerationConfig


class Turns:
    """The turns that the manager works on; taken in by one thread, ended by another."""

    def __init__(self, manager: Any, pipe: Pipe) -> None:
        self._manager = manager
        self._pipe = pipe
        self._sessions = Sessions()
        self._open: dict[str, Message] = {}

    def add(self, message: Message) -> None:
        """Begin a turn."""
        name = str(message["turn"])
        self._open[name] = message
        self._manager.add_request(
            list(self._sessions.prompt(message["session"], message["new"])),
            request_id=name,
            max_new_tokens=message["output"],
            streaming=True,
            eos_token_id=-1,
        )

    def follow(self) -> None:
        """Tell of first tokens and of ends, as long as the manager runs."""
        heard: set[str] = set()
        for output in self._manager:
            message = self._open[output.request_id]
            if output.error is not None:
                self._pipe.say(event="failed", turn=message["turn"], error=str(output.error))
                continue
            if output.request_id not in heard and output.generated_tokens:
                heard.add(output.request_id)
                self._pipe.say(event="first", turn=message["turn"])
            if output.is_finished():
                ids = list(output.generated_tokens)
                self._sessions.said(message["session"], ids)
                self._pipe.say(event="done", turn=message["turn"], output=len(ids))


def warm_up(manager: Any, ids: list[int]) -> None:
    """Run one turn to its end."""
    manager.add_request(ids, request_id="warm-up", max_new_tokens=4, eos_token_id=-1)
    for output in manager:
        if output.is_finished() or output.error is not None:
            return


def serve(pipe: Pipe) -> None:
    """Answer until the input ends."""
    options = pipe.message()
    torch.set_num_threads(options["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        options["model"], dtype=options["dtype"], attn_implementation=options["attention"]
    ).eval()
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1),
        continuous_batching_config=ContinuousBatchingConfig(**options["batching"]),
    )
    manager.start()
    warm_up(manager, options["warm_up"])
    pipe.say(event="ready", version=transformers.__version__, torch=torch.__version__)
    turns = Turns(manager, pipe)
    threading.Thread(target=turns.follow, daemon=True).start()
    while not pipe.ended:
        for message in pipe.messages(wait=True):
            turns.add(message)
    manager.stop(block=True, timeout=5)


if __name__ == "__main__":
    serve(Pipe.standard())
