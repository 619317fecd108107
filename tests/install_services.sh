#!/bin/sh
# Installs the services that the tests run for real (a Prometheus, ...). Knows Debian's apt only.
# As root on Debian it installs what is missing and starts no daemon; elsewhere it names what is
# missing, what is skipped for it and why, and ends well: those tests skip with the same reason.
set -eu

# One line a service: the program that shows it is there, its Debian package, what needs it.
SERVICES="
mpirun openmpi-bin tests/test_prepare.py,tests/test_hosts.py
promtool prometheus tests/test_exporter.py,tests/test_monitoring.py
prometheus prometheus tests/test_monitoring.py,tests/test_monitored_run.py,tests/test_push.py
amtool prometheus-alertmanager tests/test_alerting.py
openssl openssl tests/test_exporter.py
sshd openssh-server tests/test_hosts.py
ssh openssh-client tests/test_hosts.py
pdsh pdsh tests/test_hosts.py
ip iproute2 tests/test_hosts.py
nft nftables tests/test_hosts.py,tests/faults.py
faketime faketime tests/faults.py
chromium chromium tests/test_report.py
"

PATH="$PATH:/usr/sbin:/sbin"
missing=""
packages=""
while read -r program package users; do
    [ -n "$program" ] || continue
    command -v "$program" >/dev/null 2>&1 && continue
    missing="$missing$program $package $users
"
    case " $packages " in *" $package "*) ;; *) packages="$packages $package" ;; esac
done <<LIST
$SERVICES
LIST
[ -n "$missing" ] || exit 0

skip() {
    printf '%s' "$missing" | while read -r program package users; do
        echo "install_services: $program is missing ($1); skipped for it: $users." \
             "To run them: apt-get install $package" >&2
    done
    exit 0
}

command -v apt-get >/dev/null 2>&1 || skip "no apt-get here"
[ "$(id -u)" = 0 ] || skip "not root"

# A package's own scripts start its daemon unless this policy forbids it (101: action forbidden).
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 130' INT TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

log=$(mktemp)
install() {
    # shellcheck disable=SC2086  # a list of package names
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
        -o DPkg::Lock::Timeout=120 $packages >>"$log" 2>&1 </dev/null
}
echo "install_services: installing$packages" >&2
if ! install; then
    # The package lists may be older than the mirror.
    apt-get update -q >>"$log" 2>&1 || true
    if ! install; then
        tail -n 5 "$log" >&2
        rm -f "$log"
        skip "apt-get failed, see above"
    fi
fi
rm -f "$log"
