# Values that several services share: what names the namespace, what the dashboard is told. Source it after service_lib.sh.
# shellcheck shell=bash

# Names and values of an earlier system's environment, turned into this one's settings.
# Sets KAKEYA_REVISION_LABEL and KAKEYA_ASSERT_COMPATIBILITY where there is something to set.
name_the_namespace() {
    local label="" asserted="" pair name value
    # Names of one's own become part of the namespace; the digests of model and tokenizer always are.
    for value in "${KAKEYA_MODEL_REVISION:-}" "${KAKEYA_TOKENIZER_REVISION:-}"; do
        label="$label${label:+/}$value"
    done
    KAKEYA_REVISION_LABEL="${KAKEYA_REVISION_LABEL:-${label%/}}"
    for pair in "layer_geometry_hash=${KAKEYA_LAYER_GEOMETRY_HASH:-}" "rope_hash=${KAKEYA_ROPE_HASH:-}" \
        "quantization=${KAKEYA_CACHE_QUANTIZATION:-}"; do
        name="${pair%%=*}"
        value="${pair#*=}"
        [ -z "$value" ] || asserted="$asserted${asserted:+,}$name=$value"
    done
    KAKEYA_ASSERT_COMPATIBILITY="${KAKEYA_ASSERT_COMPATIBILITY:-$asserted}"
    case "${KAKEYA_CACHE_FORMAT_VERSION:-}" in
        "") ;;
        kakeya-prefill-v3-kl-d4-q38) need_compression kakeyalattice-d4 ;;
        kakeya-prefill-v2-zlib) need_compression zlib ;;
        *) refuse "KAKEYA_CACHE_FORMAT_VERSION is not known: leave it out, KAKEYA_CACHE_COMPRESSION says how KV is stored" ;;
    esac
    export KAKEYA_REVISION_LABEL KAKEYA_ASSERT_COMPATIBILITY
}

need_compression() {
    [ "${KAKEYA_CACHE_COMPRESSION:-}" = "$1" ] ||
        refuse "KAKEYA_CACHE_FORMAT_VERSION=$KAKEYA_CACHE_FORMAT_VERSION goes with KAKEYA_CACHE_COMPRESSION=$1"
}

# The dashboard's own variables (docs/dashboard.md) hold for its service, too, where KAKEYA_NETWORK_… does not say it.
name_the_dashboard() {
    local bind="${KAKEYA_DASHBOARD_BIND:-}"
    export KAKEYA_NETWORK_API_KEY_FILE="${KEY_FILE:-${KAKEYA_NETWORK_API_KEY_FILE:-$kakeya_home/network_api_key}}"
    export KAKEYA_NETWORK_ALLOW_HOST="${KAKEYA_NETWORK_ALLOW_HOST:-${KAKEYA_DASHBOARD_ALLOW_HOST:-}}"
    export KAKEYA_NETWORK_BUS="${KAKEYA_NETWORK_BUS:-${KAKEYA_DASHBOARD_BUS:-}}"
    export KAKEYA_NETWORK_STATE="${KAKEYA_NETWORK_STATE:-${KAKEYA_DASHBOARD_STATE:-}}"
    if [ -n "$bind" ]; then
        case "$bind" in
            ?*:*[0-9]) ;;
            *) refuse "KAKEYA_DASHBOARD_BIND is not an address: write host:port, for example 127.0.0.1:8090" ;;
        esac
        export KAKEYA_NETWORK_HTTP_HOST="${KAKEYA_NETWORK_HTTP_HOST:-${bind%:*}}"
        export KAKEYA_NETWORK_HTTP_PORT="${KAKEYA_NETWORK_HTTP_PORT:-${bind##*:}}"
    fi
}
