#!/usr/bin/env bash
# Install the dashboard and control API of the head, or a cache peer, as a launchd agent of this user (macOS).
#
# usage: bash deploy/install_prefill_network_launchd.sh [--dry-run] [--cache-peer] [--replace]
#
#   --dry-run      render and check everything, print the property list, touch nothing
#   --cache-peer   a cache-only peer instead of the dashboard
#   --replace      also in the place of one that is installed for another KAKEYA_HOME
#
# From the environment, optional (default); for the dashboard:
#   VENV                        virtual environment with kakeya (the repository's .venv)
#   KEY_FILE (~/.kakeya/network_api_key)   made by: openssl rand -hex 24 > FILE; chmod 600 FILE
#   KAKEYA_NETWORK_HTTP_HOST (127.0.0.1)  KAKEYA_NETWORK_HTTP_PORT (8090)
#   KAKEYA_NETWORK_ALLOW_HOST   further names it is reached by from other machines, with commas between; needs another
#                               KAKEYA_NETWORK_HTTP_HOST than a loopback address, or a proxy (docs/dashboard.md)
#   KAKEYA_NETWORK_BUS          bus of any node, host:port (found by itself on this machine)
#   KAKEYA_TELEMETRY_KEY_FILE   the telemetry-read key (~/.kakeya/telemetry.key)
#   KAKEYA_NETWORK_STATE        file of its database
# and for a cache peer, required:
#   KAKEYA_CACHE_NODE_ID        name of this node, unique in the fleet
#   KAKEYA_CACHE_ADVERTISE      address others reach it at, host:port
# optional (what holds when neither it nor kakeya.toml says; what is given here wins over kakeya.toml):
#   KAKEYA_CACHE_BIND (0.0.0.0:52051)  KAKEYA_CACHE_PEER_ADDRESS  KAKEYA_CACHE_GB (8)
#   KAKEYA_CACHE_NETWORK (lan)  KAKEYA_CACHE_PRIORITY (the network's)  KAKEYA_TENANT_ID (default)
#   KAKEYA_FLEET_PSK_FILE (~/.kakeya/fleet.psk)
[ -n "${BASH_VERSION:-}" ] || { echo "kakeya: error: this script needs bash: bash $0" >&2; exit 2; }
set -euo pipefail

script="${BASH_SOURCE[0]}"
while [ -L "$script" ]; do # run through a link: what it needs is beside the script itself
    link="$(readlink "$script")"
    case "$link" in /*) script="$link" ;; *) script="$(dirname "$script")/$link" ;; esac
done
# shellcheck source=deploy/service_lib.sh
source "$(dirname "$script")/service_lib.sh"
# shellcheck source=deploy/service_values.sh
source "$kakeya_deploy/service_values.sh"

cache_peer=no
remaining=()
for argument in "$@"; do
    if [ "$argument" = --cache-peer ]; then cache_peer=yes; else remaining+=("$argument"); fi
done
read_options "${BASH_SOURCE[0]}" ${remaining[@]+"${remaining[@]}"}
find_folders KAKEYA_LAUNCH_AGENTS

python=""
if [ -n "${VENV:-}" ]; then
    python="$VENV/bin/python"
    [ -x "$python" ] || refuse "VENV: there is no $python"
fi
if [ "$cache_peer" = yes ]; then
    need KAKEYA_CACHE_NODE_ID "the name of this node, for example cache-mini-1"
    need KAKEYA_CACHE_ADVERTISE "the address others reach this node at, for example 192.168.1.22:52051"
    need_fleet_key "copy the fleet's key from the primary"
else
    name_the_dashboard
    need_api_key
fi
KAKEYA_NETWORK_COMMAND="$(find_kakeya "$python")" || exit 2
use_python "$KAKEYA_NETWORK_COMMAND"
export KAKEYA_NETWORK_COMMAND
if [ "$cache_peer" = yes ]; then
    install_agent ai.kakeya.prefill-network-peer ai.kakeya.prefill-network-peer.plist prefill-cache.log
else
    install_agent ai.kakeya.prefill-network ai.kakeya.prefill-network.plist prefill-network.log
fi
