"""HTTP: routes, auth, SSE, metrics."""
