#!/usr/bin/env bash
# Install the runtime (the primary) as a launchd agent of this user (macOS). Idempotent: run it again after a change.
#
# usage: bash deploy/install_runtime_launchd.sh [--dry-run] [--replace]
#
#   --dry-run   render and check everything, print the property list, touch nothing
#   --replace   also in the place of one that is installed for another KAKEYA_HOME
#
# From the environment; required:
#   KAKEYA_RUNTIME_MODEL        folder of the MLX model
# and optional (what holds when neither it nor kakeya.toml says; what is given here wins over kakeya.toml):
#   KAKEYA_ENABLE_PREFILL_CACHE (1)   0 runs without any KV sharing: the rollback
#   KAKEYA_RUNTIME_PYTHON       a Python with kakeya installed (the repository's .venv)
#   KAKEYA_RUNTIME_REPO         the repository, to find its .venv (this script's)
#   KAKEYA_RUNTIME_NODE_ID (head-runtime)  KAKEYA_RUNTIME_BIND (0.0.0.0:51051)  KAKEYA_RUNTIME_ADVERTISE
#   KAKEYA_RUNTIME_PEER         address of the worker, host:port
#   KAKEYA_RUNTIME_CACHE_GB (1)  KAKEYA_RUNTIME_CAPACITY (1)  KAKEYA_PREFILL_POLICY (local-fallback)
#   KAKEYA_CACHE_REPLICATION_FACTOR (1)  KAKEYA_PREFILL_WORKER_TIMEOUT_S (3600)
#   KAKEYA_REMOTE_PREFILL_MIN_TOKENS (0)  KAKEYA_CACHE_LINK_MBPS (10000)
#   KAKEYA_KV_POLICY (native)  KAKEYA_RUNTIME_SINK (4)  KAKEYA_RUNTIME_WINDOW (2048)
#   KAKEYA_RUNTIME_HEALTH_PORT (8091; 0 turns the health endpoint off)
#   KAKEYA_RUNTIME_NETWORK (lan)  KAKEYA_RUNTIME_PRIORITY (the network's)  KAKEYA_FLEET_PSK_FILE (~/.kakeya/fleet.psk)
#   and KAKEYA_TENANT_ID, KAKEYA_CACHE_…, KAKEYA_MODEL_REVISION, … as for the worker
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

read_options "${BASH_SOURCE[0]}" "$@"
find_folders KAKEYA_LAUNCH_AGENTS
need KAKEYA_RUNTIME_MODEL "the folder of the MLX model"
[ -f "$KAKEYA_RUNTIME_MODEL/config.json" ] || refuse "KAKEYA_RUNTIME_MODEL: there is no model in $KAKEYA_RUNTIME_MODEL"
if [ -n "${KAKEYA_RUNTIME_REPO:-}" ]; then
    [ -d "$KAKEYA_RUNTIME_REPO" ] || refuse "KAKEYA_RUNTIME_REPO: there is no folder $KAKEYA_RUNTIME_REPO"
    kakeya_repo="$KAKEYA_RUNTIME_REPO"
fi
need_fleet_key "make it with kakeya key new, and copy it to every node"
KAKEYA_RUNTIME_COMMAND="$(find_kakeya "${KAKEYA_RUNTIME_PYTHON:-}")" || exit 2
use_python "$KAKEYA_RUNTIME_COMMAND"
export KAKEYA_RUNTIME_COMMAND
name_the_namespace
install_agent ai.kakeya.zmq-runtime-prefill ai.kakeya.zmq-runtime-prefill.plist zmq-runtime-prefill.log
