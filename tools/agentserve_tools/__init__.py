"""Tools for agents: typed functions, registry, executor. They run in the client's process."""
