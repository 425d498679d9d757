#!/usr/bin/env bash
# Brings up a Slurm cluster of one node on this (Debian) machine, as root, for tests/train/test_launchers.py.
set -euo pipefail
command -v slurmctld >/dev/null || { apt-get update -qq; apt-get install -y -qq slurm-wlm munge; }
node=$(hostname -s)
mkdir -p /etc/slurm /var/spool/slurmd /var/spool/slurmctld /var/log/slurm /run/munge
chown munge: /run/munge
cat > /etc/slurm/slurm.conf <<C
ClusterName=flock
SlurmctldHost=$node(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ReturnToService=2
NodeName=$node NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=$node Default=YES MaxTime=INFINITE State=UP
C
pgrep munged >/dev/null || su munge -s /bin/sh -c munged
pgrep slurmctld >/dev/null || slurmctld
pgrep slurmd >/dev/null || slurmd
for _ in $(seq 30); do
    [ "$(sinfo -h -o %T 2>/dev/null)" = idle ] && { sinfo; exit 0; }
    sleep 1
done
echo "the node did not become idle: see /var/log/slurm" >&2
exit 1
