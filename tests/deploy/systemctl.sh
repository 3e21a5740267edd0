#!/bin/sh
# A stand-in for systemctl --user: records its calls in $FAKE_SYSTEMD, and remembers what runs there.
# no-manager, refuse-enable: files that make it fail; refuse-restart: how many of the next restarts fail.
[ "$1" = --user ] || exit 64
shift
printf '%s\n' "$*" >>"$FAKE_SYSTEMD/calls"
[ ! -e "$FAKE_SYSTEMD/no-manager" ] || {
    echo "Failed to connect to bus: No medium found" >&2
    exit 1
}
for unit in "$@"; do :; done
case "$1" in
    enable) [ ! -e "$FAKE_SYSTEMD/refuse-enable" ] ;;
    restart)
        left="$(cat "$FAKE_SYSTEMD/refuse-restart" 2>/dev/null || echo 0)"
        [ "$left" -eq 0 ] || {
            echo $((left - 1)) >"$FAKE_SYSTEMD/refuse-restart"
            exit 1
        }
        touch "$FAKE_SYSTEMD/runs-$unit"
        ;;
    is-active)
        if [ -e "$FAKE_SYSTEMD/runs-$unit" ]; then echo active; else echo inactive; exit 3; fi
        ;;
    stop | disable) rm -f "$FAKE_SYSTEMD/runs-$unit" ;;
    show-environment | daemon-reload) ;;
    *) exit 64 ;;
esac
