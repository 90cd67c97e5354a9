"""The configuration files of the Slurm that the tests start. Knows no process."""

import os
import pwd
import socket
from pathlib import Path

NODE_EPILOG = """#!/bin/sh
# What proctrack/cgroup does and proctrack/linuxproc cannot: nothing of a job outlives it on a node. Daemonised children
# still carry the job's environment.
for file in /proc/[0-9]*/environ; do
    pid=${file#/proc/}
    pid=${pid%/environ}
    if grep -qzx "SLURM_JOB_ID=$SLURM_JOB_ID" "$file" && grep -qzx "SLURMD_NODENAME=$SLURMD_NODENAME" "$file" &&
        ! grep -qz "^SLURM_SCRIPT_CONTEXT=" "$file"; then
        kill -9 "$pid"
    fi
done 2>/dev/null
exit 0
"""

SLURM_CONF = """
ClusterName=tests
SlurmctldHost={host}({controller})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# The time for which a requeued job is held is that of a credential; 5 is the least.
AuthInfo=socket={directory}/munge/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/pids/slurmctld.pid
SlurmdPidFile={directory}/pids/slurmd-%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd-%n.log
LogTimeFormat=iso8601_ms
SwitchType=switch/none
MpiDefault=none
# No cgroups, no systemd; nodes claim more than the machine has.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
# Little waiting for the scheduler.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=3,bf_continue,sched_min_interval=100000
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=5
SlurmdTimeout=10
SlurmctldTimeout=30
MessageTimeout=5
TCPTimeout=2
# A step that cannot end would drain its node.
UnkillableStepTimeout=600
InactiveLimit=0
MinJobAge=86400
MailProg=/bin/true
Epilog={directory}/etc/epilog.sh
FirstJobId={first_job}
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=normal Nodes=ALL Default=YES PriorityTier=100 PreemptMode=OFF MaxTime=4:00:00 DefaultTime=10
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} MaxTime=4:00:00 DefaultTime=10
PartitionName=short Nodes=ALL PriorityTier=100 PreemptMode=OFF MaxTime=2 DefaultTime=1
"""


def write_configuration(directory: Path, nodes: dict[str, tuple[str, int]], controller: str, port: int, *,
                        hostnames: bool, grace: int, first_job: int) -> Path:  # fmt: skip
    """Write slurm.conf and what belongs to it; returns its path.

    nodes: address and port of each node. hostnames: whether a node's name is its host name too.
    """
    host = socket.gethostname()
    for name in ("etc", "log", "pids", "state", "munge"):
        (directory / name).mkdir(exist_ok=True)
    lines = []
    for name, (address, node_port) in nodes.items():
        (directory / "spool" / name).mkdir(parents=True, exist_ok=True)
        lines.append(
            f"NodeName={name} NodeHostname={name if hostnames else host} NodeAddr={address} Port={node_port} CPUs=16"
            " Boards=1 SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=64000 State=UNKNOWN"
        )
    configuration = directory / "etc" / "slurm.conf"
    configuration.write_text(
        SLURM_CONF.format(
            host=host, controller=controller, port=port, user=pwd.getpwuid(os.geteuid()).pw_name, directory=directory,
            nodes="\n".join(lines), grace=grace, first_job=first_job,
        )
    )  # fmt: skip
    epilog = directory / "etc" / "epilog.sh"
    epilog.write_text(NODE_EPILOG)
    epilog.chmod(0o755)
    addresses = {"localhost": "127.0.0.1", host: controller} | {name: address for name, (address, _) in nodes.items()}
    (directory / "etc" / "hosts").write_text("".join(f"{value} {name}\n" for name, value in addresses.items()))
    key = directory / "munge" / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    return configuration
