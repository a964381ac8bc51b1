"""`python -m agentserve` is the `agentserve` command."""

from agentserve.cli import main

main()
