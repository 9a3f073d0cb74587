#!/usr/bin/env sh
# System packages that some tests need: a browser, the tools that make network namespaces,
# and a reverse proxy.
# Installed if this machine lets us; otherwise those tests say why they are left out.
missing=""
command -v chromium >/dev/null || missing="$missing chromium"
command -v ip >/dev/null && command -v tc >/dev/null || missing="$missing iproute2"
command -v nginx >/dev/null || [ -x /usr/sbin/nginx ] || missing="$missing nginx-light"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; } >/dev/null && exit 0
fi
echo "Not installed:$missing. Tests that need them are left out and say so." >&2
