"""A client of a stateless endpoint that takes token ids and streams events."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from peers.system import SystemFailed


class Endpoint:
    """One base address; every request is a POST that is answered by server-sent events."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=None,
            trust_env=False,
            verify=False,  # nothing here is encrypted, so no certificates are loaded
            limits=httpx.Limits(max_connections=None),
        )

    async def healthy(self, path: str) -> bool:
        """Whether a GET of `path` answers 200."""
        try:
            return (await self._http.get(path, timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the data of each event. Raises SystemFailed for an answer that is an error."""
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise SystemFailed(f"{path} answered {response.status_code}: {text[:300]}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                data: dict[str, Any] = json.loads(line[6:])
                if "error" in data:
                    raise SystemFailed(f"{path}: {data['error']}")
                yield data

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
