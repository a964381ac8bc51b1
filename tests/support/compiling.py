"""A real compiler process, waited for."""

import threading

from agentserve.model.grammar import grammar_compiler

WAIT_S = 60.0


class Compiling:
    """Compiles one spec after the other and gives matchers."""

    def __init__(self, directory, vocab_size, **options):
        self.process = grammar_compiler(directory, vocab_size, **options)
        self._changed = threading.Event()
        self.process.listen(self._changed.set)
        self._job = 0
        self._known = {}

    def answer(self, spec):
        """Return the answer to one job."""
        self._job += 1
        self.process.begin(self._job, spec)
        while True:
            self._changed.clear()
            for answer in self.process.poll():
                if answer.job == self._job:
                    return answer
            assert self._changed.wait(WAIT_S), "the compiler says nothing"

    def compile(self, spec):
        """Return a new matcher. Raises ValueError with the reason."""
        if spec not in self._known:
            answer = self.answer(spec)
            if answer.compiled is None:
                raise ValueError(answer.error)
            self._known[spec] = answer.compiled
        return self._known[spec].matcher()

    def close(self):
        self.process.end()
