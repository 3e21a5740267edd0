"""Asks every node that can be found from here; of those that `kakeya up` started, whether they are still there.

A process of `kakeya up` that has ended is the cause of whatever else would be told about it (nothing listens there, others
do not reach it), so it alone is told. Where the same node serves again, started otherwise, nothing is wrong.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator

from daemons.doctor.finding import Finding, problem, warning
from daemons.doctor.network import NodeView, addresses_of, each_once, look_at, reach, told_here
from daemons.doctor.network_findings import judge_nodes, judge_reach, judge_refusal, judge_wrong_key
from daemons.doctor.site import Site
from daemons.fleet import Member
from kakeya_zmq.io.addresses import parse_address
from wire.errors import ConfigError, FailureCode, RequestFailed, SecretFileError


def examine_fleet(site: Site) -> Iterator[Finding]:
    """What is wrong with each node, then with what they tell of each other."""
    known = addresses_of(site)
    asked = _Asked(site)
    for address in known:
        yield from asked.ask(address)
    for address in told_here(site):
        if address not in known:
            yield from asked.ask(address, only_told=True)
    if asked.wrong_key:
        yield judge_wrong_key(asked.wrong_key)
    if not asked.views:
        yield warning("nodes", "no node answered, so the fleet was not examined", "start one, or name one with --address")
    yield from judge_nodes(each_once(asked.views), asked.ended)


def judge_ended(member: Member) -> Finding:
    """A process that `kakeya up` has started, and that `kakeya down` has not stopped."""
    text = f"{member.node_id}, which `kakeya up` has started at {member.address}, has ended (process {member.pid})"
    remedy = f"its log may tell why: {member.log}; `kakeya up` starts it again, `kakeya down` stops the others, too"
    return problem("nodes", text, remedy)


class _Asked:
    """What came of asking. ``wrong_key``: addresses of nodes with another fleet key; ``ended``: nodes that are gone."""

    def __init__(self, site: Site) -> None:
        self.views: list[NodeView] = []
        self.wrong_key: list[str] = []
        self.ended: list[Member] = []
        self._site = site
        self._noted = {member.address: member for member in site.ended}

    def ask(self, address: str, *, only_told: bool = False) -> Iterator[Finding]:
        """Ask one node. With ``only_told`` it runs here, and the address is the one that it tells others."""
        member = self._noted.get(address)
        if member is not None and reach(parse_address(address)).error == errno.ECONNREFUSED:
            yield self._has_ended(member)
            return
        try:
            view = look_at(address, self._site)
        except RequestFailed as error:
            if member is not None:
                yield self._has_ended(member)
            yield from self._refused(address, error, only_told=only_told)
        except (SecretFileError, ConfigError) as error:
            yield problem("nodes", error.message, error.remedy or "see `kakeya key show`")
        else:
            self.views.append(view)
            if member is not None and view.node_id != member.node_id:
                yield self._has_ended(member)

    def _has_ended(self, member: Member) -> Finding:
        self.ended.append(member)
        return judge_ended(member)

    def _refused(self, address: str, error: RequestFailed, *, only_told: bool) -> Iterator[Finding]:
        if error.code is FailureCode.UNAUTHENTICATED:
            self.wrong_key.append(address)
            return
        unreached = judge_reach(address, reach(parse_address(address)))
        if unreached is not None and only_told:
            # The way back from outside may be another one: a router's address need not lead home from within.
            text = f"a node runs here and tells others to reach it at {address}, where this machine does not reach it"
            yield warning("reach", text, "see from another machine that it answers there; else check --advertise")
            return
        yield unreached or judge_refusal(address)
