"""A fleet of local processes: ``kakeya up`` starts it, ``kakeya down`` stops it."""

from __future__ import annotations

from daemons.fleet.down import started_here, stop_fleet, stop_members, stop_processes
from daemons.fleet.notes import Member, find_member, live_members, load_fleet, primary_address, read_members, run_folder
from daemons.fleet.starting import Starting, deferred_signals
from daemons.fleet.up import FleetPlan, default_psk_file, ensure_psk, restart_member, start_fleet

__all__ = [
    "FleetPlan",
    "Member",
    "Starting",
    "default_psk_file",
    "deferred_signals",
    "ensure_psk",
    "find_member",
    "live_members",
    "load_fleet",
    "primary_address",
    "read_members",
    "restart_member",
    "run_folder",
    "start_fleet",
    "started_here",
    "stop_fleet",
    "stop_members",
    "stop_processes",
]
