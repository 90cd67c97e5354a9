"""Every call of a Slurm program except the one that sends a job, and what their answers mean.

Knows nothing of runs. The same programs are answered by the local scheduler where its directory goes first on PATH.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaling_slurm.errors import ConfigError, ScalingError, SchedulerRefusedError, SchedulerUnreachableError
from scaling_slurm.slurm.job_info import JobInfo, read_duration, read_sacct, read_scontrol, read_squeue

KEPT = {"SLURM_CONF"}
DROPPED = re.compile(
    r"(?:SLURM|SBATCH|SRUN|SALLOC|PMIX?|PMI2|OMPI|SUBMITIT|TORCHELASTIC|ROLE|GROUP)_.*"
    r"|(?:LOCAL_)?(?:RANK|WORLD_SIZE)|MASTER_(?:ADDR|PORT)|SCALING_(?:ATTEMPT|RENDEZVOUS|RUN_DIRECTORY)"
)
UNREACHABLE = re.compile(
    r"unable to contact slurm controller|socket timed out|connection (?:refused|timed out|reset)|connect failure"
    r"|communication connection failure|zero bytes were transmitted|transport endpoint|resource temporarily unavailable"
    r"|unable to process configuration file|could not establish a configuration source|munge encode failed"
    r"|no route to host|slurmctld.*not respond",
    re.IGNORECASE,
)
UNKNOWN_JOB = re.compile(r"invalid job id|no such job", re.IGNORECASE)
REFUSALS = (
    (r"policy|(?:assoc|qos)\w*limit|quota|budget", "a budget or a limit of jobs is used up",
     "wait, or use another account or qos"),
    (r"invalid account|account.*not (?:valid|permitted)|no valid account", "sacctmgr show associations user=$USER",
     "set account in the cluster profile, by --account or SCALING_ACCOUNT"),
    (r"invalid qos|qos.*not permitted", "sacctmgr show qos lists them", "set qos in the profile or by --sbatch"),
    (r"partition", "sinfo lists the partitions", "set partition in the cluster profile or by --partition"),
    (r"time limit|--time", "sinfo -o '%P %l' lists the limits", "set --time or allocation.time in the run file"),
    (r"node count|too many nodes|more (?:nodes|processors) requested|--nodes", "sinfo -o '%P %D' lists the sizes",
     "set --nodes or allocation.nodes in the run file"),
    (r"memory", "sinfo -o '%P %m' lists the nodes' MB", "set memory in the cluster profile or --sbatch mem="),
    (r"gres|generic resource|tres|gpu", "sinfo -o '%P %G' lists the GPUs", "look at --sbatch and the profile's gpu"),
    (r"node configuration is not available", "the nodes of the partition have less CPUs, memory or GPUs than asked for",
     "compare the cluster profile and --sbatch with scontrol show node"),
    (r"reservation", "scontrol show reservation lists them", "look at --sbatch and the cluster profile's directives"),
    (r"feature|constraint", "sinfo -o '%P %f' lists them", "look at --sbatch and the cluster profile's directives"),
    (r"licen[sc]e", "scontrol show licenses lists them", "look at --sbatch and the cluster profile's directives"),
    (r"wckey", "this site knows no such wckey", "remove it from --sbatch or the cluster profile's directives"),
    (r"unrecognized option|invalid option|invalid directive", "this version of sbatch does not know the option",
     "look for it in --sbatch, the cluster profile's extra directives and the job template"),
)  # fmt: skip
TRY_AGAIN = "try again later; is this a login node, and is SLURM_CONF right?"


def scrubbed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an enclosing job, launcher or run put there, which would leak into the new job."""
    return {name: value for name, value in environ.items() if name in KEPT or not DROPPED.fullmatch(name)}


def explain_refusal(message: str) -> ScalingError:
    """What a failed sbatch means for the user; Slurm's own words are kept."""
    text = " ".join(re.sub(r"^(?:sbatch|srun|scontrol|scancel): (?:error: )?", "", line).strip().rstrip(".")
                    for line in message.strip().splitlines())  # fmt: skip
    text = text or "no message"
    if UNREACHABLE.search(text):
        return SchedulerUnreachableError(
            f"Slurm did not answer: {_silence(message)}", f"check squeue before sending twice, {TRY_AGAIN}"
        )
    for pattern, right, where in REFUSALS:
        if re.search(pattern, text, re.IGNORECASE):
            return SchedulerRefusedError(f"Slurm refused the job: {text}", right, where)
    return SchedulerRefusedError(f"Slurm refused the job: {text}")


def _silence(message: str) -> str:
    """Of the lines of a program that reached nobody, the last one that says so: those before it are its tries."""
    lines = [line.strip() for line in message.splitlines() if UNREACHABLE.search(line)]
    return re.sub(r"^\w+: (?:(?:error|fatal): )?", "", lines[-1]) if lines else message.strip()


def parse_job_id(text: str) -> str:
    """A job id as Slurm's programs take it: 123, or 123_4 for a task of an array. Raises ConfigError for the rest."""
    if not re.fullmatch(r"[0-9]+(?:_[0-9]+)?", text):
        raise ConfigError(f"{text!r} is not a job id", "a job id is like 123, or 123_4 for a task of an array")
    return text


@dataclass(frozen=True)
class Slurm:
    """Slurm's programs. All methods raise SchedulerUnreachableError when there is no answer after some tries."""

    path_prefix: Path | None = None
    """Directory of programs that go before those on PATH: the local scheduler's."""
    pauses: Sequence[float] = (1.0, 3.0)
    """Seconds between the tries."""
    timeout: float = 30.0
    """Seconds that one call may take; Slurm's own time-outs are shorter."""

    def job(self, job_id: str) -> JobInfo | None:
        """The job, or None if Slurm does not know it, or no longer."""
        return self.jobs([job_id]).get(job_id)

    def jobs(self, job_ids: Iterable[str]) -> dict[str, JobInfo]:
        """Those of the jobs that Slurm knows. One call for all that are live; the rest is asked for in more detail."""
        wanted = [parse_job_id(job_id) for job_id in dict.fromkeys(job_ids)]
        if not wanted:
            return {}
        answer = self._ask("squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(wanted)}",
                           "--format=%i|%A|%T|%r|%N|%S|%e|%l")  # fmt: skip
        found = read_squeue(answer or "")
        for job_id in wanted:
            if job_id not in found or not found[job_id].is_live:
                answer = self._ask("scontrol", "show", "job", "--oneliner", job_id)
                found |= {key: info for key, info in read_scontrol(answer or "").items() if key == job_id}
        if missing := [job_id for job_id in wanted if job_id not in found]:
            found |= read_sacct(self._account(missing))
        return {job_id: found[job_id] for job_id in wanted if job_id in found}

    def seconds_left(self, job_id: str) -> float | None:
        """Until the time limit, as Slurm sees it now; None for a job without a limit or that is not running."""
        answer = self._ask("squeue", "--noheader", f"--jobs={parse_job_id(job_id)}", "--format=%T|%L")
        state, _, left = (answer or "").strip().partition("|")
        return read_duration(left) if state == "RUNNING" else None

    def cancel(self, job_id: str, signal: str | None = None) -> None:
        """End the job, or only send a signal such as "USR2" to the tasks of its steps. A finished job is no error."""
        arguments = [f"--signal={signal}"] if signal else []
        self._ask("scancel", *arguments, parse_job_id(job_id))

    def test_only(self, script: str) -> str:
        """Slurm's opinion on a script, which is not queued: when and where it would start. Raises its refusal."""
        done = self._run("sbatch", "--test-only", stdin=script)
        if done.returncode:
            raise explain_refusal(done.stderr)
        return done.stderr.strip().removeprefix("sbatch: ")

    def _account(self, job_ids: list[str]) -> str:
        """The database's records; nothing where there is none, or where it is away while the controller answers."""
        try:
            done = self._run("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(job_ids)}",
                             "--format=JobID,JobIDRaw,State,ExitCode,Start,End,Timelimit,NodeList")  # fmt: skip
        except SchedulerUnreachableError:
            return ""
        return done.stdout

    def _ask(self, *command: str) -> str | None:
        """The answer, or None if the job is unknown."""
        done = self._run(*command)
        if done.returncode == 0:
            return done.stdout
        if UNKNOWN_JOB.search(done.stderr):
            return None
        raise SchedulerRefusedError(f"{' '.join(command)} failed with code {done.returncode}: {done.stderr.strip()}")

    def _run(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run one program; waits and tries again while nobody answers."""
        environ = self.environment()
        program = shutil.which(command[0], path=environ.get("PATH"))
        if program is None:
            raise SchedulerUnreachableError(
                f"{command[0]} is not on PATH", "this must run where Slurm is installed", "or use --cluster local"
            )
        for pause in (*self.pauses, None):
            try:
                done = subprocess.run([program, *command[1:]], input=stdin, capture_output=True, text=True,
                                      errors="replace", timeout=self.timeout, env=environ, check=False)  # fmt: skip
            except subprocess.TimeoutExpired:
                problem = f"no answer within {self.timeout:g} s"
            else:
                if done.returncode == 0 or not UNREACHABLE.search(done.stderr):
                    return done
                problem = _silence(done.stderr)
            if pause is not None:
                time.sleep(pause)
        raise SchedulerUnreachableError(
            f"{command[0]} got no answer from Slurm in {len(self.pauses) + 1} tries: {problem}", TRY_AGAIN
        )

    def environment(self) -> dict[str, str]:
        """For queries: scrubbed, and with answers in one language and one form of time."""
        environ = scrubbed_environment(os.environ) | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
        if self.path_prefix is not None:
            environ["PATH"] = f"{self.path_prefix}{os.pathsep}{environ.get('PATH', os.defpath)}"
        return environ
