#!/bin/sh
# A stand-in for systemctl --user: records its calls in $FAKE_SYSTEMD. no-manager, refuse-enable: files that make it fail.
[ "$1" = --user ] || exit 64
shift
printf '%s\n' "$*" >>"$FAKE_SYSTEMD/calls"
[ ! -e "$FAKE_SYSTEMD/no-manager" ] || {
    echo "Failed to connect to bus: No medium found" >&2
    exit 1
}
case "$1" in
    enable) [ ! -e "$FAKE_SYSTEMD/refuse-enable" ] ;;
    show-environment | daemon-reload | restart | disable) ;;
    *) exit 64 ;;
esac
