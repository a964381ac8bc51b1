"""The KV of a runner in its tiers: the copies of plans, and the tickets of those that ended."""

import torch

from agentserve.engine.copier import Copier
from agentserve.engine.plan import Copy, StepPlan, Traffic
from agentserve.model.copier import host_slab, open_device

WAIT_S = 0.005  # of a step that has nothing to compute, for a copy to end


class KvTiers:
    """The device's cache and, with `host_blocks`, a host tier and what copies to and from it."""

    def __init__(self, cache: torch.Tensor, host_blocks: int) -> None:
        self._cache = cache
        self._device = self._copier = None
        if host_blocks:
            self._device = open_device(cache, host_slab(cache, host_blocks))
            self._copier = Copier(self._device)

    def copy(self, copies: list[Copy]) -> None:
        """Queue a plan's copies, before its rows: those within the device are part of the step.

        Raises ValueError for copies to or from a host tier that is not there.
        """
        cache = self._cache
        moves: list[Copy] = []
        for copy in copies:
            if copy.kind == "device":
                source = cache[copy.source, ..., : copy.tokens, :]
                cache[copy.target, ..., : copy.tokens, :] = source
            else:
                moves.append(copy)
        if self._copier is not None:
            self._copier.submit(moves)
        elif moves:
            raise ValueError(f"this runner has no host tier: {moves[0]}")

    def ended(self, plan: StepPlan) -> tuple[list[int], Traffic]:
        """Return the tickets to report with this plan, whose step has ended, and all traffic.

        Waits only if the plan says so, and then for a copy or WAIT_S.
        """
        tickets = [copy.ticket for copy in plan.copies if copy.kind == "device"]
        if self._copier is None or self._device is None:
            return tickets, Traffic()
        if plan.wait:
            self._copier.wait(WAIT_S)
        # `again` first: it knows what earlier polls have reported, not what this one will.
        tickets += self._copier.again(plan.overdue) + self._copier.poll()
        return tickets, self._device.traffic()
