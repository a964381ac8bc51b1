"""transformers' continuous batching inside an application's process.

As its documentation advises: a ContinuousBatchingManager with streamed requests, block sharing (its
prefix cache) on, which is the default, and attention by SDPA, since flash attention needs a GPU.
Where KV is short its offloading of preempted requests may take the case's host memory.
"""

from peers.system import Places, computing_dtype
from peers.token_worker import TokenWorker
from peers.workload import Case, strangers

PAGE = 256  # tokens; its default
BATCH = 512


class TransformersCb(TokenWorker):
    """See the module's docstring."""

    name = "transformers"
    module = "peers.workers.transformers_worker"

    def options(self, case: Case, places: Places) -> dict[str, object]:
        """What the worker makes the manager with."""
        batching: dict[str, object] = {
            "page_size": PAGE,
            "num_blocks": case.kv_tokens // PAGE,
            "max_batch_tokens": BATCH,
        }
        if case.host_bytes is not None:
            batching["cpu_offload_space"] = case.host_bytes / 2**30
        return {
            "model": str(places.weights),
            "dtype": computing_dtype(),
            "attention": "sdpa",
            "threads": places.threads,
            "batching": batching,
            "warm_up": strangers(300),
        }
