"""The process that compiles grammars: `python -m agentserve.model.grammar_worker`.

It holds a vocabulary and nothing else, takes bounded memory and time, opens no files once it is
up, and ends when its input does, also in the middle of a job. torch and transformers, which the
package xgrammar imports, are left out: they take seconds and 200 MB, and compiling needs neither.
"""

import importlib.machinery
import importlib.util
import os
import queue
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from agentserve.engine.frames import FrameError, encode_frame
from agentserve.engine.jobs import Done, Down, Failed, Job, Reply, Setup, Up, read_frames

MAX_GRAMMAR = 32 * 1024 * 1024  # characters, serialised
_NICE = 5


def main() -> None:
    """Serve the parent over stdin and stdout."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; the parent decides
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not get between the frames
    frames: queue.SimpleQueue[Down] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(frames,), daemon=True).start()
    setup = frames.get()
    assert isinstance(setup, Setup)
    try:
        compile_tag = _compiler(setup.tokenizer)
        _confine(setup.memory)
    except Exception as error:
        _reply(replies, Failed(_reason(error)))
        return
    _reply(replies, Up())
    while True:
        job = frames.get()
        assert isinstance(job, Job)
        signal.setitimer(signal.ITIMER_PROF, setup.cpu_s)  # SIGPROF ends the process
        reply = _answer(job, compile_tag)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _reply(replies, reply)


def _receive(frames: "queue.SimpleQueue[Down]") -> None:
    """Read what the parent sends; when it goes away the process ends here."""
    try:
        for frame in read_frames(0, Down):
            frames.put(frame)
    except (EOFError, FrameError, OSError):
        pass
    os._exit(0)


def _compiler(tokenizer: str) -> Callable[[str], str]:
    """Return what compiles a structural tag for a tokenizer; both serialised by xgrammar."""
    core = _xgrammar()
    info = core.TokenizerInfo.deserialize_json(tokenizer)
    # One thread, no cache (the engine has one), all masks at once.
    compiler = core.GrammarCompiler(info, 1, False, -1, False)
    return lambda spec: str(compiler.compile_structural_tag(spec).serialize_json())


def _xgrammar() -> Any:
    """Import the C++ part of xgrammar without the package's own module."""
    sys.modules["torch"] = None  # type: ignore[assignment] # an import of it raises ImportError
    spec = importlib.machinery.PathFinder.find_spec("xgrammar")
    if spec is None:
        raise ImportError("xgrammar is not installed")
    sys.modules["xgrammar"] = importlib.util.module_from_spec(spec)
    importlib.import_module("xgrammar.load_binding")
    return importlib.import_module("xgrammar.base")._core


def _confine(memory: int) -> None:
    """Take no more than `memory` bytes, open nothing, leave no core dump; others go first."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(_NICE)


def _answer(job: Job, compile_tag: Callable[[str], str]) -> Reply:
    try:
        grammar = compile_tag(job.spec)
    except MemoryError:
        os._exit(1)
    except Exception as error:  # a C++ library: its errors have no common base
        if "bad_alloc" in str(error):
            os._exit(1)
        return Failed(_reason(error))
    if len(grammar) > MAX_GRAMMAR:
        return Failed("it becomes too large")
    return Done(grammar)


def _reason(error: Exception) -> str:
    """Return the first line of what went wrong, without the place in xgrammar's source."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return re.sub(r"^\[[0-9:]+\] \S+: ", "", first[:500])


def _reply(descriptor: int, reply: Reply) -> None:
    data = memoryview(encode_frame(reply))
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
