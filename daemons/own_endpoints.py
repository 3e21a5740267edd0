"""The ways to reach this node that its card tells, by address."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from daemons.membership import announced_endpoints, with_literal_hosts
from daemons.own_addresses import is_everywhere, look_up, own_hosts
from kakeya_zmq.config import Settings
from kakeya_zmq.io.addresses import Address, parse_address
from wire.cards import Endpoint


class OwnEndpoints:
    """Of one node.

    Args:
        serving: where it serves.
        note: level and text of what its owner should know.
    """

    def __init__(self, settings: Settings, serving: Callable[[], Address], note: Callable[[str, str], None]) -> None:
        self._settings = settings
        self._serving = serving
        self._note = note
        self._literals: Mapping[str, str] = {}

    @property
    def address(self) -> Address:
        """Where other nodes reach this one; without --advertise, where it serves."""
        if self._settings.advertise:
            return parse_address(self._settings.advertise)
        return self._serving()

    def announced(self) -> tuple[Endpoint, ...]:
        """What the card tells now: addresses of this machine may change."""
        own = self._own_hosts()
        literals = {**self._literals, **{host: host for host in own}}
        return with_literal_hosts(announced_endpoints(self._settings, self.address, own), literals)

    def look_up_names(self) -> None:
        """Learn the addresses behind the names that the settings announce, once: the reactor does not run yet."""
        own = self._own_hosts()
        if own:
            text = f"--advertise is not given: what this machine's networks call it is announced ({len(own)})"
            self._note("info", text)
        hosts = [parse_address(each.address).host for each in announced_endpoints(self._settings, self.address, own)]
        self._literals = look_up(hosts)
        for host in dict.fromkeys(hosts):
            if host not in self._literals:
                text = "a host name of --advertise, --endpoint or --bind has no address: it is not announced"
                self._note("warning", text)

    def _own_hosts(self) -> tuple[str, ...]:
        """This machine's addresses, where it serves at all of them and is not told which to announce; they may change."""
        if self._settings.advertise or not is_everywhere(self.address.host):
            return ()
        return own_hosts(six=":" in self.address.host)
