"""The order in which a worker's jobs start: fair between tenants, within a tenant between askers, first come first served
within an asker.

Fairness is of service, not of turns: who has had the fewest tokens computed goes next (start-time fair queueing). Every
tenant and asker has a virtual time, which grows by the tokens that were computed for it. One that comes back after a pause
starts at the present, so that nobody can save turns up; one that was just served and comes back does not get ahead of those
who waited. Between two askers that always have work, the service they got differs by one job at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

IDLE_SHARES_MAX: Final = 256
"""Tenants, and askers of a tenant, that are remembered without waiting jobs."""

Item = TypeVar("Item")


@dataclass(slots=True)
class _Asker(Generic[Item]):
    virtual_tokens: float = 0.0
    waiting: deque[tuple[int, Item]] = field(default_factory=deque)
    """With the number of their arrival."""

    @property
    def first_arrival(self) -> int:
        return self.waiting[0][0]


@dataclass(slots=True)
class _Tenant(Generic[Item]):
    virtual_tokens: float = 0.0
    clock_tokens: float = 0.0
    """Virtual time of the asker that was served last."""
    askers: dict[str, _Asker[Item]] = field(default_factory=dict)

    @property
    def waiting(self) -> list[_Asker[Item]]:
        return [asker for asker in self.askers.values() if asker.waiting]

    @property
    def first_arrival(self) -> int:
        return min(asker.first_arrival for asker in self.waiting)


class FairQueue(Generic[Item]):
    """See the module's text. Items are told apart by identity; bounds are the caller's business."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[Item]] = {}
        self._clock_tokens = 0.0
        self._arrivals = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, item: Item, *, tenant: str, asker: str) -> None:
        """Let an item wait behind those of the same asker."""
        own = self._tenants.setdefault(tenant, _Tenant())
        if not own.waiting:
            own.virtual_tokens = max(own.virtual_tokens, self._clock_tokens)
        share = own.askers.setdefault(asker, _Asker())
        if not share.waiting:
            share.virtual_tokens = max(share.virtual_tokens, own.clock_tokens)
        self._arrivals += 1
        share.waiting.append((self._arrivals, item))
        self._length += 1

    def pop(self) -> Item | None:
        """Take out what is to start next; None when nothing waits. Tell :meth:`charge` what it costs."""
        waiting = [tenant for tenant in self._tenants.values() if tenant.waiting]
        if not waiting:
            return None
        tenant = min(waiting, key=lambda each: (each.virtual_tokens, each.first_arrival))
        asker = min(tenant.waiting, key=lambda each: (each.virtual_tokens, each.first_arrival))
        self._clock_tokens = max(self._clock_tokens, tenant.virtual_tokens)
        tenant.clock_tokens = max(tenant.clock_tokens, asker.virtual_tokens)
        _, item = asker.waiting.popleft()
        self._length -= 1
        return item

    def charge(self, tokens: int, *, tenant: str, asker: str) -> None:
        """So many tokens are computed for an asker now."""
        own = self._tenants.setdefault(tenant, _Tenant())
        own.virtual_tokens = max(own.virtual_tokens, self._clock_tokens) + tokens
        share = own.askers.setdefault(asker, _Asker())
        share.virtual_tokens = max(share.virtual_tokens, own.clock_tokens) + tokens
        self._forget_idle()

    def remove(self, item: Item) -> bool:
        """Take an item out wherever it waits; False when it does not."""
        for tenant in self._tenants.values():
            for asker in tenant.askers.values():
                for entry in asker.waiting:
                    if entry[1] is item:
                        asker.waiting.remove(entry)
                        self._length -= 1
                        return True
        return False

    def in_order(self, cost_tokens: Callable[[Item], int]) -> list[Item]:
        """The waiting items in the order in which they will start, if nothing else comes and the costs are right."""
        copy: FairQueue[Item] = FairQueue()
        copy._clock_tokens = self._clock_tokens
        names: dict[int, tuple[str, str]] = {}
        for tenant_name, tenant in self._tenants.items():
            twin = copy._tenants[tenant_name] = _Tenant(tenant.virtual_tokens, tenant.clock_tokens)
            for asker_name, asker in tenant.askers.items():
                twin.askers[asker_name] = _Asker(asker.virtual_tokens, deque(asker.waiting))
                names.update((id(item), (tenant_name, asker_name)) for _, item in asker.waiting)
        copy._length = self._length
        ordered: list[Item] = []
        while (item := copy.pop()) is not None:
            ordered.append(item)
            tenant_name, asker_name = names[id(item)]
            copy.charge(cost_tokens(item), tenant=tenant_name, asker=asker_name)
        return ordered

    def _forget_idle(self) -> None:
        """Forget who has no claim left to be held back, and beyond the bound those who would wait least."""
        for tenant in self._tenants.values():
            idle = {name: asker.virtual_tokens for name, asker in tenant.askers.items() if not asker.waiting}
            for name in _to_forget(idle, tenant.clock_tokens):
                del tenant.askers[name]
        idle = {name: tenant.virtual_tokens for name, tenant in self._tenants.items() if not tenant.waiting}
        for name in _to_forget(idle, self._clock_tokens):
            del self._tenants[name]


def _to_forget(idle: dict[str, float], clock_tokens: float) -> list[str]:
    done = [name for name, virtual in idle.items() if virtual <= clock_tokens]
    left = sorted((name for name in idle if idle[name] > clock_tokens), key=idle.__getitem__)
    return [*done, *left[: max(0, len(left) - IDLE_SHARES_MAX)]]
