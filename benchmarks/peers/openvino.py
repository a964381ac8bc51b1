"""OpenVINO GenAI's ContinuousBatchingPipeline inside an application's process.

As its documentation advises for agents: prefix caching and `dynamic_split_fuse` on, 512 tokens a
batch; the CPU plugin's own defaults for threads and for its KV, which is 8 bits where ours has 16.
It has no host tier. Where KV is short it runs as many requests at once as have room to their ends:
with more, each holds a part of its prompt, none goes on, and the pipeline gives all of them up. The
application keeps token ids and hands them over as a tensor.
"""

from peers.system import Places
from peers.token_worker import TokenWorker
from peers.workload import Case, strangers

BLOCK = 32  # tokens; of the CPU plugin
BATCH = 512


class OpenVino(TokenWorker):
    """See the module's docstring."""

    name = "openvino"
    module = "peers.workers.openvino_worker"

    def options(self, case: Case, places: Places) -> dict[str, object]:
        """What the worker makes the pipeline with."""
        return {
            "model": str(places.gguf("f16")),
            "scheduler": {
                "num_kv_blocks": case.kv_tokens // BLOCK,
                "enable_prefix_caching": True,
                "dynamic_split_fuse": True,
                "max_num_batched_tokens": BATCH,
                "max_num_seqs": case.slots,
            },
            "properties": {"INFERENCE_NUM_THREADS": places.threads},
            "warm_up": strangers(300),
        }
