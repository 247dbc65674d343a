#!/bin/bash
# Installs what one_machine.py needs, where this user may and the system is a Debian; says why where not. Always succeeds:
# the tests skip, with the reason, where something is missing.
set -u
for program in munged slurmctld slurmd sbatch; do
    PATH=$PATH:/usr/sbin command -v $program > /dev/null || missing="${missing:-} $program"
done
[ -z "${missing:-}" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then
    echo "not installed:$missing; needs root and apt-get (slurmctld slurmd slurm-client munge)"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
{ timeout 300 apt-get update && timeout 300 apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge; } \
    > /dev/null 2>&1 || echo "slurmctld slurmd slurm-client munge could not be installed by apt-get"
exit 0
