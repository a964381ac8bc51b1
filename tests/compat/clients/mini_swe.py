"""mini-swe-agent: its default agent with its own prompts, through litellm, in this directory."""

import os
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it is fetched
os.environ["MSWEA_SILENT_STARTUP"] = "1"

from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_from_spec
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from task import arguments, finish

url, _ = arguments()
Path("greet.py").write_text('print("helo, world")\n')
config = get_config_from_spec("mini.yaml")
prompts = {name: config["agent"][name] for name in ("system_template", "instance_template")}
model = LitellmModel(
    model_name="openai/any-model",
    model_kwargs={"api_base": f"{url}/v1", "api_key": "none"},
    cost_tracking="ignore_errors",
)
agent = DefaultAgent(model, LocalEnvironment(), **prompts)
finish(agent.run("greet.py has a spelling mistake.")["submission"].strip())
