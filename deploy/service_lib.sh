# Shared by the scripts that install services: render a template, (re)load it. Source it, don't run it. Works with bash 3.2.
# shellcheck shell=bash

unset CDPATH # with it, cd prints
kakeya_deploy="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
kakeya_repo="$(cd "$kakeya_deploy/.." && pwd)"
kakeya_dry_run=no
kakeya_replace=no
kakeya_home=""
kakeya_agents=""
kakeya_rendered="" # a temporary folder
kakeya_trouble=""  # why the last load failed,
kakeya_remedy=""   # and what tells more
kakeya_staged=""   # a definition that is written but not in its place yet
# For tests: how long to wait between looks, in seconds.
kakeya_wait_s="${KAKEYA_INSTALL_WAIT_S:-0.25}"
kakeya_retry_s="${KAKEYA_INSTALL_RETRY_S:-2}"

say() { printf 'kakeya: %s\n' "$*" >&2; }

# One line, exit code 2: bad or missing input. Nothing has been touched by then.
refuse() {
    printf 'kakeya: error: %s\n' "$*" >&2
    exit 2
}

complain() { printf 'kakeya: error: %s\n' "$*" >&2; }

die() {
    complain "$*"
    exit 1
}

# quoted WORD: as a shell reads it, for the commands that are shown to the user.
quoted() { printf '%q' "$1"; }

# need VARIABLE WHAT: the variable must be set.
need() {
    [ -n "${!1:-}" ] || refuse "set $1 ($2)"
}

# absolute VARIABLE...: paths as seen from here, since a service starts in another folder. A leading ~ is the home folder.
absolute() {
    local name path folder
    for name in "$@"; do
        path="${!name:-}"
        # The pattern is the character: a quoted ~ reaches a script as it is.
        # shellcheck disable=SC2088
        case "$path" in
            "" | /*) continue ;;
            "~" | "~/"*)
                [ -n "${HOME:-}" ] || refuse "HOME is not set, and $name starts with ~"
                path="$HOME${path#?}"
                ;;
            "~"*) refuse "$name is $path: write the home folder of another user in full, or ./ before a name with ~" ;;
            *)
                if [ -d "$path" ]; then
                    path="$(cd "./$path" && pwd)"
                else
                    folder="$(cd "./$(dirname "$path")" 2>/dev/null && pwd)" || folder="$PWD/$(dirname "$path")"
                    path="${folder%/}/$(basename "$path")"
                fi
                ;;
        esac
        export "$name=$path"
    done
}

# find_folders DEFINITIONS: make given paths absolute; set kakeya_home and kakeya_agents. DEFINITIONS is the variable that
# names the folder of service definitions: with it and KAKEYA_HOME, HOME is not needed.
find_folders() {
    local definitions="$1"
    if [ -z "${HOME:-}" ] && { [ -z "${KAKEYA_HOME:-}" ] || [ -z "${!definitions:-}" ]; }; then
        refuse "HOME is not set: set it, or both KAKEYA_HOME and $definitions"
    fi
    absolute KAKEYA_HOME KAKEYA_LAUNCH_AGENTS XDG_CONFIG_HOME KAKEYA_CONFIG KAKEYA_FLEET_PSK_FILE KAKEYA_TENANT_KEY_FILE \
        KAKEYA_TELEMETRY_KEY_FILE KAKEYA_NETWORK_STATE KAKEYA_DASHBOARD_STATE KAKEYA_NETWORK_API_KEY_FILE KEY_FILE VENV KAKEYA_RUNTIME_MODEL KAKEYA_RUNTIME_PYTHON \
        KAKEYA_RUNTIME_REPO KAKEYA_WORKER_MODEL KAKEYA_WORKER_PYTHON KAKEYA_WORKER_REPO
    kakeya_home="${KAKEYA_HOME:-${HOME:-}/.kakeya}"
    kakeya_agents="${KAKEYA_LAUNCH_AGENTS:-${HOME:-}/Library/LaunchAgents}"
}

# need_key WHAT FILE REMEDY: a secret must be there and be its owner's only. A link counts as what it leads to, as for the
# daemons; they look at owner, folder and content when the settings are checked.
need_key() {
    [ -e "$2" ] || refuse "there is no $2: $3"
    [ -f "$2" ] || refuse "the $1 file $2 is not a regular file (pass the right path)"
    case "$(file_mode "$2")" in
        0 | *00) ;;
        *) refuse "the $1 file $2 is open to other users (chmod 600 $(quoted "$2"))" ;;
    esac
}

# need_fleet_key REMEDY: the PSK, unless kakeya.toml names its file: then the daemon's own check judges it.
need_fleet_key() {
    local config="${KAKEYA_CONFIG:-$kakeya_home/kakeya.toml}"
    [ -n "${KAKEYA_FLEET_PSK_FILE:-}" ] || ! grep -q '^[[:space:]]*fleet_psk_file' "$config" 2>/dev/null || return 0
    need_key "fleet key" "${KAKEYA_FLEET_PSK_FILE:-$kakeya_home/fleet.psk}" "$1"
}

# need_api_key: the dashboard's, which opens writes.
need_api_key() {
    local file
    file="$(quoted "$KAKEYA_NETWORK_API_KEY_FILE")"
    need_key "API key" "$KAKEYA_NETWORK_API_KEY_FILE" "openssl rand -hex 24 > $file; chmod 600 $file"
}

file_mode() {
    case "$(uname -s)" in
        Darwin) stat -L -f %Lp "$1" ;;
        *) stat -L -c %a "$1" ;;
    esac
}

# read_options SCRIPT "$@": the options all install scripts have.
read_options() {
    local script="$1"
    shift
    while [ $# -gt 0 ]; do
        case "$1" in
            --dry-run) kakeya_dry_run=yes ;;
            --replace) kakeya_replace=yes ;;
            -h | --help)
                # The script's own comment is its help text.
                sed -n '2,/^[^#]/{s/^# \{0,1\}//p;}' "$script"
                exit 0
                ;;
            *) refuse "unknown option $1; see --help" ;;
        esac
        shift
    done
}

# find_kakeya [PYTHON]: print the kakeya command: beside the given Python, in the repository's .venv, or on the PATH.
find_kakeya() {
    local candidate
    if [ -n "${1:-}" ]; then
        candidate="$(dirname "$1")/kakeya"
        [ -x "$candidate" ] || refuse "there is no kakeya beside $1: $(quoted "$1") -m pip install $(quoted "${kakeya_repo}[mlx]")"
        printf '%s\n' "$candidate"
        return
    fi
    for candidate in "$kakeya_repo/.venv/bin/kakeya" "$(command -v kakeya || true)"; do
        if [ -n "$candidate" ] && [ -x "$candidate" ]; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    refuse "kakeya is not installed: run bash deploy/quickstart.sh first, or name a Python with kakeya"
}

# render TEMPLATE OUTPUT: standard library only, so any Python of 3.11 or newer does.
render() {
    "$kakeya_python" "$kakeya_deploy/render_service.py" "$1" "$2"
}

# use_python COMMAND: the Python beside it renders the templates.
use_python() {
    local beside
    beside="$(dirname "$1")"
    for kakeya_python in "$beside/python" "$beside/python3" "$(command -v python3 || true)"; do
        [ -n "$kakeya_python" ] && [ -x "$kakeya_python" ] && return
    done
    refuse "no Python was found beside $1"
}

# check_arguments FILE: whether the daemon would accept the command line in FILE (a JSON list), before anything is touched.
# It sees what the service will see: of KAKEYA_ variables, the home alone. What it refuses is told in one line, its own.
check_arguments() {
    KAKEYA_HOME="$kakeya_home" "$kakeya_python" - "$1" <<'PYTHON' || exit 2
import json, os, subprocess, sys
with open(sys.argv[1], encoding="utf-8") as stream:
    arguments = json.load(stream)
seen = {name: value for name, value in os.environ.items() if not name.startswith("KAKEYA_") or name == "KAKEYA_HOME"}
command = [*arguments, "--check-settings"]
try:
    done = subprocess.run(command, env=seen, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    told, failed = done.stderr, done.returncode != 0
except OSError as error:
    told, failed = os.fsencode("%s cannot be run: %s" % (command[0], error.strerror)), True
if failed:
    last = told.strip().split(b"\n")[-1] or os.fsencode("%s cannot check the settings, and does not say why" % command[0])
    told = b"kakeya: error: %s\n" % last.removeprefix(b"kakeya: ")
sys.stderr.buffer.write(told)
sys.exit(failed)
PYTHON
}

loaded() { launchctl print "gui/$(id -u)/$1" >/dev/null 2>&1; }

# unload LABEL: boot it out and wait until it is gone.
unload() {
    local tries=0
    loaded "$1" || return 0
    launchctl bootout "gui/$(id -u)/$1" >/dev/null 2>&1 || true
    while loaded "$1"; do
        tries=$((tries + 1))
        [ "$tries" -le 200 ] || die "$1 does not stop: look at its log, then try again"
        sleep "$kakeya_wait_s"
    done
}

# load LABEL PLIST: launchd now and then refuses a bootstrap right after a bootout; three tries. Not loaded or not started: 1;
# kakeya_trouble says which, and kakeya_remedy what tells more.
load() {
    local try domain
    domain="gui/$(id -u)"
    for try in 1 2 3; do
        if launchctl bootstrap "$domain" "$2"; then
            launchctl kickstart "$domain/$1" >/dev/null && return
            kakeya_trouble="$1 was loaded but does not start"
            kakeya_remedy="launchctl print $domain/$1"
            return 1
        fi
        [ "$try" -eq 3 ] || sleep "$kakeya_retry_s"
    done
    kakeya_trouble="launchd refuses $1 three times"
    kakeya_remedy="launchctl bootstrap $domain $(quoted "$2") says why"
    return 1
}

# go_back LABEL TARGET OLD RUNNING: the new definition does not work: put OLD, a copy of the one before, in its place, and load
# it where it was loaded before.
go_back() {
    local why="$kakeya_trouble with the new definition, which --dry-run shows"
    kakeya_staged="$2.new"
    if ! { (unload "$1") && cp "$3" "$2.new" && put_in_place "$2"; } 2>/dev/null; then
        die "$why; the old one could not be put back"
    fi
    [ "$4" = yes ] || die "$why; the old one is back"
    load "$1" "$2" 2>/dev/null || die "$why; the old one is back, and does not run either: $kakeya_remedy"
    die "$why; the old one is back and runs"
}

# need_same_home DEFINITION HOW: a service of the same role for another home would lose its place without a word.
need_same_home() {
    local other
    [ -f "$1" ] && [ "$kakeya_replace" = no ] || return 0
    other="$("$kakeya_python" "$kakeya_deploy/installed_home.py" "$1" "$kakeya_home")" || exit 2
    [ -z "$other" ] || refuse "$(basename "$1") is installed for the home $other, and this one is for $kakeya_home; a user has one service of each role: $2, or give --replace"
}

clean_up() {
    [ -z "$kakeya_rendered" ] || rm -rf "$kakeya_rendered"
    [ -z "$kakeya_staged" ] || rm -f "$kakeya_staged"
}

# make_private_folder FOLDER: for this user only, unless it is there.
make_private_folder() {
    local reason
    reason="$(umask 077 && mkdir -p "$1" 2>&1)" || die "$1 cannot be made: ${reason##*: }"
}

# make_folders DEFINITIONS: the folder of definitions, and the home folder.
make_folders() {
    local reason
    reason="$(mkdir -p "$1" 2>&1)" || die "$1 cannot be made: ${reason##*: }"
    make_private_folder "$kakeya_home"
}

# stage FILE TARGET: write TARGET.new, whole or not at all; what runs is not touched. `put_in_place TARGET` renames it.
stage() {
    local reason
    [ ! -d "$2" ] || die "$2 is a folder: remove it, then try again"
    kakeya_staged="$2.new"
    if ! reason="$({ rm -f "$2.new" && cp "$1" "$2.new" && chmod 644 "$2.new"; } 2>&1)"; then
        die "$2 cannot be written: ${reason##*: }; nothing was changed"
    fi
    cmp -s "$1" "$2.new" || die "$2 cannot be written: what was written reads differently; nothing was changed"
}

# keep_old TARGET: a copy of the definition that is about to be replaced, if any; `has_old TARGET`: whether it was another.
keep_old() {
    [ ! -f "$1" ] || cp "$1" "$kakeya_rendered/old" 2>/dev/null || die "$1 cannot be read; nothing was changed"
}

has_old() { [ -f "$kakeya_rendered/old" ] && ! cmp -s "$kakeya_rendered/old" "$1"; }

put_in_place() {
    mv -f "$1.new" "$1" 2>/dev/null || return 1
    kakeya_staged=""
}

# warn_of_variables DEFINITION: KAKEYA_ variables that do not reach the service. They are worth a line, not a refusal.
warn_of_variables() {
    "$kakeya_python" "$kakeya_deploy/service_environment.py" "$1" >&2
}

# install_agent LABEL TEMPLATE LOG: render, check, replace what runs. With --dry-run: render, check and print.
install_agent() {
    local label="$1" template="$kakeya_deploy/launchd/$2" rendered target="$kakeya_agents/$1.plist" running=no
    trap clean_up EXIT
    kakeya_rendered="$(mktemp -d)" || die "no temporary folder"
    rendered="$kakeya_rendered"
    render "$template" "$rendered/$label.plist" || exit 2
    if command -v plutil >/dev/null 2>&1; then
        plutil -lint -s "$rendered/$label.plist" || die "$label: the rendered property list is not valid"
    fi
    "$kakeya_python" "$kakeya_deploy/render_service.py" --arguments "$template" "$rendered/arguments.json" || exit 2
    check_arguments "$rendered/arguments.json"
    need_same_home "$target" "remove it first (bash deploy/uninstall_launchd.sh)"
    warn_of_variables "$template"
    if [ "$kakeya_dry_run" = yes ]; then
        cat "$rendered/$label.plist"
        say "dry run: $target was not written and nothing was started"
        return
    fi
    command -v launchctl >/dev/null 2>&1 || die "there is no launchctl: on Linux use deploy/install_systemd.sh"
    make_folders "$kakeya_agents"
    if [ -f "$target" ] && cmp -s "$rendered/$label.plist" "$target" && loaded "$label"; then
        launchctl kickstart -k "gui/$(id -u)/$label" >/dev/null || die "$label does not start"
        say "$label was up to date; restarted"
        return
    fi
    # Written before the old one is unloaded: on a full disk the old one goes on.
    stage "$rendered/$label.plist" "$target"
    keep_old "$target"
    ! loaded "$label" || running=yes
    unload "$label"
    if ! put_in_place "$target"; then
        [ ! -f "$target" ] || load "$label" "$target" || complain "$kakeya_trouble: $kakeya_remedy"
        die "$target cannot be replaced: the old definition is still there"
    fi
    if ! load "$label" "$target"; then
        ! has_old "$target" || go_back "$label" "$target" "$rendered/old" "$running"
        die "$kakeya_trouble: $kakeya_remedy"
    fi
    say "$label runs; log: $kakeya_home/$3"
}
