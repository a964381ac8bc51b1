"""The engine's end of the process that compiles grammars: started by exec, ended by its pid.

Each process has a thread here, which starts it, feeds it and takes up what it gives: reading a
compiled grammar takes tens of milliseconds, without the interpreter lock. The engine's own thread
waits for nothing.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from agentserve.engine.frames import encode_frame
from agentserve.engine.grammars import Answer, Compiled
from agentserve.engine.jobs import Done, Failed, Job, Reply, Setup, read_frames

OVER_TIME = signal.SIGPROF  # what a process dies of that is over its processor time
EXIT_S = 1.0
CLOSE_S = 10.0  # the longest piece of a thread's work is the vocabulary: a second
_KEPT = ("PATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT")  # of the environment


class CompilerProcess:
    """A `grammars.Compiler` over `python ARGUMENTS`.

    `setup` makes the first frame that a process gets, `adopt` makes a grammar of what it sends.
    Both run in a thread of their own. A process that dies takes the job with it and no other.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        setup: Callable[[], Setup],
        adopt: Callable[[str], Compiled],
    ) -> None:
        self._arguments = list(arguments)
        self._setup = setup
        self._adopt = adopt
        self._answers: deque[Answer] = deque()
        self._wake: Callable[[], None] = lambda: None
        self._life: _Life | None = None

    @property
    def ready(self) -> bool:
        """Whether a process is up."""
        return self._life is not None and self._life.up

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        return self._life.pid if self._life is not None else None

    def listen(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, when something has changed."""
        self._wake = wake

    def start(self) -> None:
        """Start a process ahead of the first job."""
        self._life = _Life(self._arguments, self._setup, self._adopt, self._say)

    def begin(self, job: int, spec: str) -> None:
        """Hand a job to the process; starts one when there is none."""
        if self._life is None or not self._life.offer(Job(job, spec)):
            self.start()
            assert self._life is not None
            self._life.offer(Job(job, spec))

    def poll(self) -> list[Answer]:
        """Return the answers that have come."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def end(self) -> None:
        """Kill the process, whatever it does."""
        if self._life is not None:
            self._life.kill()
            self._life = None

    def close(self) -> None:
        """End the process, and the thread: one in a library's code would end the program badly."""
        life = self._life
        self.end()
        if life is not None:
            life.thread.join(CLOSE_S)

    def _say(self, answer: Answer | None) -> None:
        if answer is not None:
            self._answers.append(answer)
        self._wake()


class _Life:
    """One process and the thread that owns its pipes."""

    def __init__(
        self,
        arguments: list[str],
        setup: Callable[[], Setup],
        adopt: Callable[[str], Compiled],
        say: Callable[[Answer | None], None],
    ) -> None:
        self.up = False
        self._arguments = arguments
        self._setup = setup
        self._adopt = adopt
        self._say = say
        self._lock = threading.Lock()  # of the process, and of what is in the queue when it ends
        self._over = False
        self._process: subprocess.Popen[bytes] | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._job: Job | None = None
        self.thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        self.thread.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def offer(self, job: Job) -> bool:
        """Take a job, unless the process has ended."""
        with self._lock:
            dead = self._process is not None and self._process.poll() is not None
            if self._over or dead:
                return False
            self._jobs.put(job)
            return True

    def kill(self) -> None:
        with self._lock:
            self._over = True
            if self._process is not None:
                self._process.kill()
            self._jobs.put(None)

    def _run(self) -> None:
        try:
            if (process := self._spawn()) is not None:
                with process:
                    try:
                        self._serve(process)
                    finally:
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(EXIT_S)  # how it ended by itself, if it did
                        process.kill()
        except Exception as error:  # whatever ended the process must end no more than its job
            self._give_up(error)
        finally:
            self.up = False
            self._say(None)

    def _spawn(self) -> "subprocess.Popen[bytes] | None":
        with self._lock:
            if not self._over:
                self._process = subprocess.Popen(
                    [sys.executable, *self._arguments],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,  # the library writes parts of schemas there
                    cwd="/",
                    env=compiler_environment(),
                )
            return self._process

    def _serve(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        replies = read_frames(process.stdout.fileno(), Reply)
        _send(process.stdin, self._setup())
        first = next(replies)
        if isinstance(first, Failed):
            raise ChildProcessError(first.message)
        self.up = True
        self._say(None)
        while (job := self._jobs.get()) is not None:
            self._job = job
            _send(process.stdin, job)
            reply = next(replies)
            if isinstance(reply, Done):
                self._say(Answer(job.number, self._adopt(reply.grammar)))
            else:
                self._say(Answer(job.number, error=reply.message))
            self._job = None

    def _give_up(self, error: Exception) -> None:
        """Answer the job that was given, if there is one; say whose fault it is that it ended."""
        with self._lock:
            if self._over:  # it was told to end, and nobody waits for its word
                return
            self._over = True
            if self._job is None and not self._jobs.empty():
                self._job = self._jobs.get()
        if self._job is None:
            return
        if self.up:
            answer = Answer(self._job.number, error=self._end_of_job(), ended=True)
        else:
            reason = f"the grammar compiler does not start: {type(error).__name__}: {error}"
            answer = Answer(self._job.number, error=reason, fault=True)
        self._say(answer)

    def _end_of_job(self) -> str:
        if self._process is not None and self._process.poll() == -OVER_TIME:
            return "it takes too much time"
        return "it takes too much memory, or the compiler fails on it"


def compiler_environment() -> dict[str, str]:
    """Return all that the process gets to know of ours: where Python and its packages are."""
    root = str(Path(__file__).parents[2])
    paths = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), root]
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    paths = list(dict.fromkeys(os.path.abspath(path) for path in paths))
    return kept | {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths)}


def _send(stream: IO[bytes], value: Setup | Job) -> None:
    stream.write(encode_frame(value))
    stream.flush()
