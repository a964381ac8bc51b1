"""The forms in which models write tool calls: each is read, written and constrained."""
