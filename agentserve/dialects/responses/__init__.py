"""POST /v1/responses, as OpenAI's clients have it."""
