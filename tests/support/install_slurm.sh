#!/usr/bin/env bash
# Installs Slurm from the distribution's packages for the tests, without starting any service of theirs.
# Says what will be skipped where this user may not install packages.
set -euo pipefail

export PATH="$PATH:/usr/sbin:/sbin"
missing=()
for program in sbatch slurmctld slurmd munged ip unshare; do
    command -v "$program" >/dev/null || missing+=("$program")
done
[ ${#missing[@]} -gt 0 ] || exit 0

packages=(slurmctld slurmd slurm-client munge iproute2 util-linux)
if ! command -v apt-get >/dev/null; then
    echo "note: ${missing[*]} missing and no apt-get here: the tests on a real Slurm will be skipped" >&2
    exit 0
fi
if [ "$(id -u)" -eq 0 ]; then
    as_root=()
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
else
    echo "note: ${missing[*]} missing and neither root nor sudo: the tests on a real Slurm will be skipped." \
        "To run them: apt-get install --no-install-recommends ${packages[*]}" >&2
    exit 0
fi

# A policy that forbids starting services while packages are installed; the tests start their own daemons.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' | "${as_root[@]}" tee "$policy" >/dev/null
    "${as_root[@]}" chmod +x "$policy"
    trap '"${as_root[@]}" rm -f "$policy"' EXIT
fi
echo "installing ${packages[*]}" >&2
"${as_root[@]}" apt-get -qq update
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get -qq install -y --no-install-recommends "${packages[@]}" >/dev/null
