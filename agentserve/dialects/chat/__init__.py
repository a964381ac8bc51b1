"""POST /v1/chat/completions, as OpenAI's clients have it."""
