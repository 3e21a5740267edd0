#!/usr/bin/env bash
# Install the prefill worker as a launchd agent of this user (macOS). Idempotent: run it again after changing a value.
#
# usage: bash deploy/install_prefill_worker_launchd.sh [--dry-run] [--replace]
#
#   --dry-run   render and check everything, print the property list, touch nothing
#   --replace   also in the place of one that is installed for another KAKEYA_HOME
#
# From the environment; required:
#   KAKEYA_WORKER_NODE_ID       name of this node, unique in the fleet
#   KAKEYA_WORKER_MODEL         folder of the MLX model, the same as the primary's
#   KAKEYA_WORKER_ADVERTISE     address others reach this node at, host:port
# and optional (what holds when neither it nor kakeya.toml says; what is given here wins over kakeya.toml):
#   KAKEYA_WORKER_PYTHON        a Python with kakeya installed (the repository's .venv)
#   KAKEYA_WORKER_REPO          the repository, to find its .venv (this script's)
#   KAKEYA_WORKER_BIND (0.0.0.0:53051)   KAKEYA_WORKER_PEER   KAKEYA_FLEET_PSK_FILE (~/.kakeya/fleet.psk)
#   KAKEYA_TENANT_ID (default)  KAKEYA_CACHE_MODEL_ID (the folder's name)  KAKEYA_CACHE_COMPRESSION (none)
#   KAKEYA_WORKER_CACHE_GB (4)  KAKEYA_WORKER_CACHE_MIN_GB (1)  KAKEYA_WORKER_MEMORY_RESERVE_GB (0.5)
#   KAKEYA_WORKER_ADAPTIVE_CACHE (0)  KAKEYA_CACHE_BLOCK_TOKENS (64)  KAKEYA_PREFILL_COMPUTE_CHUNK_TOKENS (256)
#   KAKEYA_KV_POLICY (native)  KAKEYA_WORKER_SINK (4)  KAKEYA_WORKER_WINDOW (2048)
#   KAKEYA_WORKER_NETWORK (lan)  KAKEYA_WORKER_PRIORITY (the network's)  KAKEYA_WORKER_MAX_PROMPT_TOKENS (131072)
#   KAKEYA_WORKER_PREFILL_TPS (20)  KAKEYA_BULK_PORTS  KAKEYA_CONFIG
#   KAKEYA_MODEL_REVISION  KAKEYA_TOKENIZER_REVISION   names of yours, part of the namespace
#   KAKEYA_LAYER_GEOMETRY_HASH  KAKEYA_ROPE_HASH  KAKEYA_CACHE_QUANTIZATION   what the model must have, checked
# docs/operations.md explains them and lists what differs from other systems' scripts.
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
need KAKEYA_WORKER_NODE_ID "the name of this node, for example prefill-mini-1"
need KAKEYA_WORKER_MODEL "the folder of the MLX model"
need KAKEYA_WORKER_ADVERTISE "the address others reach this node at, for example 192.168.1.21:53051"
[ -f "$KAKEYA_WORKER_MODEL/config.json" ] || refuse "KAKEYA_WORKER_MODEL: there is no model in $KAKEYA_WORKER_MODEL"
if [ -n "${KAKEYA_WORKER_REPO:-}" ]; then
    [ -d "$KAKEYA_WORKER_REPO" ] || refuse "KAKEYA_WORKER_REPO: there is no folder $KAKEYA_WORKER_REPO"
    kakeya_repo="$KAKEYA_WORKER_REPO"
fi
need_fleet_key "copy the fleet's key from the primary"
KAKEYA_WORKER_COMMAND="$(find_kakeya "${KAKEYA_WORKER_PYTHON:-}")" || exit 2
use_python "$KAKEYA_WORKER_COMMAND"
export KAKEYA_WORKER_COMMAND
name_the_namespace
install_agent ai.kakeya.prefill-worker ai.kakeya.prefill-worker.plist prefill-worker.log
