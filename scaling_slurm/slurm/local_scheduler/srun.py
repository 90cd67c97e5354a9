"""srun: starts the tasks of a step on the job's nodes, all of which are this machine, and waits for them.

Says what Slurm's srun says when a task fails, and ends with the highest exit code.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from scaling_slurm.slurm.local_scheduler import jobs
from scaling_slurm.slurm.local_scheduler.jobs import Job, Step
from scaling_slurm.slurm.local_scheduler.options import SlurmError, fail, parse_count, parse_options, spread_tasks
from scaling_slurm.slurm.local_scheduler.processes import die_with_parent, identify, send_to_tree

FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@dataclass
class Task:
    """One rank: its place and its process."""

    rank: int
    node: int
    local_rank: int
    process: "subprocess.Popen[bytes]"


def srun(arguments: list[str]) -> int:
    """Run a step inside of a job; the value is the tasks' highest exit code, 128 + n for signal n."""
    try:
        options, command = parse_options(arguments, wait_takes_value=True)
        job_id = os.environ.get("SLURM_JOB_ID", "")
        job = jobs.read_job(int(job_id)) if job_id.isdigit() else None
        if job is None or not job.is_live:
            raise SlurmError("Unable to allocate resources: without Slurm, srun works only inside of a job")
        if not command:
            raise SlurmError("fatal: No command given to execute.")
        counts = _counts(options, job)
        return _StepRun(job, options, counts, command).run()
    except SlurmError as error:
        return fail("srun", error)


def _counts(options: dict[str, str], job: Job) -> list[int]:
    """Tasks of each node of the step: the job's, unless the options say otherwise."""
    nodes, tasks = parse_count(options, "nodes"), parse_count(options, "ntasks")
    per_node = parse_count(options, "ntasks-per-node")
    if nodes and nodes > job.nodes:
        raise SlurmError(f"Only allocated {job.nodes} nodes asked for {nodes}")
    if tasks is None and per_node is None:
        return job.tasks_per_node[: nodes or job.nodes]
    nodes = nodes or (min(job.nodes, tasks) if tasks else job.nodes)
    if tasks is not None and tasks < nodes:
        print(
            f"srun: Warning: can't run {tasks} processes on {nodes} nodes, setting nnodes to {tasks}", file=sys.stderr
        )
        nodes = tasks
    return spread_tasks(tasks, nodes) if tasks else [per_node or 1] * nodes


class _StepRun:
    def __init__(self, job: Job, options: dict[str, str], counts: list[int], command: list[str]) -> None:
        self.job, self.options, self.counts, self.command = job, options, counts, command
        self.step: Step = jobs.new_step(job)
        self.name = f"StepId={job.id}.{self.step.number}"
        self.tasks: list[Task] = []
        self.poll = select.poll()
        self.ended: dict[int, Task] = {}
        """By the descriptor that tells of a task's end."""
        self.pipes: dict[int, tuple[Task, int, bytearray]] = {}
        """Where labelled output comes from: its task, where it goes to, the unfinished line."""
        self.files: dict[str, int] = {}
        self.kill_at: float | None = None
        """When those tasks get SIGKILL that SIGTERM did not end."""
        self.patience_ends: float | None = None
        """When --wait is over."""

    def run(self) -> int:
        reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (*FORWARDED, *ENDING):
            signal.signal(number, lambda *_: None)
        self.poll.register(reading, select.POLLIN)
        driver = self._watch_driver()
        self._launch()
        while self.ended or self.pipes:
            for descriptor, _ in self.poll.poll(self._timeout()):
                if descriptor == reading:
                    self._forward(os.read(reading, 64))
                elif descriptor == driver:
                    self._signal_tasks(signal.SIGKILL)
                    return 137
                elif descriptor in self.ended:
                    self._note_end(descriptor)
                else:
                    self._copy(descriptor)
            self._check_deadlines()
        return max(_exit_code(task) for task in self.tasks)

    def _watch_driver(self) -> int:
        """Slurm ends the steps of a node that it lost; here the driver is the node."""
        try:
            descriptor = os.pidfd_open(self.job.driver.pid)
        except ProcessLookupError:
            raise SlurmError("the job's driver is gone") from None
        self.poll.register(descriptor, select.POLLIN)
        return descriptor

    def _launch(self) -> None:
        rank = 0
        for node, count in enumerate(self.counts):
            for local_rank in range(count):
                self._launch_task(rank, node, local_rank)
                rank += 1
        jobs.save_step(self.job, self.step)

    def _launch_task(self, rank: int, node: int, local_rank: int) -> None:
        out = self._open_output("output", rank, node, 1)
        err = self._open_output("error", rank, node, out if "output" in self.options else 2)
        labelled = "label" in self.options
        try:
            process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE if labelled else out,
                stderr=subprocess.PIPE if labelled else err, env=self._environment(rank, node, local_rank),
                cwd=self.options.get("chdir"), start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        except OSError as error:
            self._signal_tasks(signal.SIGKILL)
            raise SlurmError(
                f"{self.job.node_names[node]}: task {rank}: {self.command[0]}: {error.strerror}", 2
            ) from None
        task = Task(rank, node, local_rank, process)
        self.tasks.append(task)
        descriptor = os.pidfd_open(process.pid)
        self.ended[descriptor] = task
        self.poll.register(descriptor, select.POLLIN)
        if known := identify(process.pid):
            self.step.tasks.append(known)
        for stream, target in ((process.stdout, out), (process.stderr, err)):
            if stream is not None:
                self.pipes[stream.fileno()] = (task, target, bytearray())
                self.poll.register(stream.fileno(), select.POLLIN)

    def _open_output(self, option: str, rank: int, node: int, default: int) -> int:
        """The descriptor for a task's output; tasks that share a file share the descriptor."""
        if option not in self.options:
            return default
        name = jobs.fill_pattern(self.options[option], self.job, step=self.step.number, task=rank, node=node)
        if name not in self.files:
            append = self.options.get("open-mode", self.job.options.get("open-mode")) == "append"
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (0 if append else os.O_TRUNC)
            try:
                self.files[name] = os.open(name, flags, 0o644)
            except OSError as error:
                raise SlurmError(f"Could not open stdout file {name}: {error.strerror}") from None
        return self.files[name]

    def _environment(self, rank: int, node: int, local_rank: int) -> dict[str, str]:
        total, nodes = sum(self.counts), len(self.counts)
        names, tasks = self.job.node_names, jobs.format_tasks(self.counts)
        environ = os.environ | {
            "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank), "SLURM_NODEID": str(node),
            "SLURM_STEP_ID": str(self.step.number), "SLURM_STEPID": str(self.step.number),
            "SLURM_STEP_NUM_TASKS": str(total), "SLURM_STEP_NUM_NODES": str(nodes),
            "SLURM_STEP_NODELIST": jobs.format_nodes(names[:nodes]), "SLURM_STEP_TASKS_PER_NODE": tasks,
            "SLURM_NTASKS": str(total), "SLURM_NPROCS": str(total), "SLURM_NNODES": str(nodes),
            "SLURM_TASKS_PER_NODE": tasks, "SLURMD_NODENAME": names[node], "SLURM_LAUNCH_NODE_IPADDR": names[0],
        }  # fmt: skip
        if "ntasks-per-node" in self.options:
            environ["SLURM_NTASKS_PER_NODE"] = self.options["ntasks-per-node"]
        if gpus := _gpus_per_node(self.job.options):
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(_installed_gpus())))
            devices = visible.split(",") if visible else []
            # The machine's GPUs are dealt out to the nodes, so that no two ranks share one while there are enough.
            own = [devices[(node * gpus + number) % len(devices)] for number in range(gpus)] if devices else []
            environ["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(own))
        return environ

    def _timeout(self) -> float | None:
        deadlines = [deadline for deadline in (self.kill_at, self.patience_ends) if deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1 if deadlines else None

    def _forward(self, numbers: bytes) -> None:
        for number in numbers:
            if number in ENDING:
                print("srun: forcing job termination", file=sys.stderr)
                self._end_others()
            elif number in FORWARDED:
                self._signal_tasks(number)

    def _note_end(self, descriptor: int) -> None:
        task = self.ended.pop(descriptor)
        self.poll.unregister(descriptor)
        os.close(descriptor)
        code = task.process.wait()
        if code:
            what = signal.strsignal(-code) if code < 0 else f"Exited with exit code {code}"
            print(
                f"srun: error: {self.job.node_names[task.node]}: task {task.rank}: {what}", file=sys.stderr, flush=True
            )
        if code and self.options.get("kill-on-bad-exit", "0") != "0" and self.ended and self.kill_at is None:
            print(f"srun: Terminating {self.name}", file=sys.stderr, flush=True)
            self._end_others()
        wait = float(self.options.get("wait", "0"))
        if wait and self.patience_ends is None:
            self.patience_ends = time.monotonic() + wait * jobs.time_scale()

    def _end_others(self) -> None:
        self._signal_tasks(signal.SIGCONT)
        self._signal_tasks(signal.SIGTERM)
        self.kill_at = self.kill_at or time.monotonic() + jobs.KILL_WAIT_SECONDS * jobs.time_scale()

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if self.patience_ends is not None and now >= self.patience_ends and self.ended:
            print(f"srun: First task exited {self.options['wait']}s ago", file=sys.stderr)
            print(f"srun: Terminating {self.name}", file=sys.stderr, flush=True)
            self.patience_ends = float("inf")
            self._end_others()
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = float("inf")
            self._signal_tasks(signal.SIGKILL)

    def _signal_tasks(self, number: int) -> None:
        running = {task.process.pid for task in self.ended.values()}
        for known in self.step.tasks:
            if known.pid in running:
                send_to_tree(known, number)

    def _copy(self, descriptor: int) -> None:
        """Pass on whole lines, each with its rank before it."""
        task, target, rest = self.pipes[descriptor]
        data = os.read(descriptor, 65536)
        rest += data
        *lines, last = rest.split(b"\n")
        if not data and last:
            lines.append(last)
        label = f"{task.rank:>{len(str(len(self.tasks) - 1))}}: ".encode()
        rest[:] = last
        if text := b"".join(label + bytes(line) + b"\n" for line in lines):
            _write_all(target, text)
        if not data:
            del self.pipes[descriptor]
            self.poll.unregister(descriptor)


def _write_all(descriptor: int, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        while text:
            text = text[os.write(descriptor, text) :]


def _exit_code(task: Task) -> int:
    code = task.process.returncode
    return 128 - code if code < 0 else code


def _gpus_per_node(options: dict[str, str]) -> int:
    """From --gpus-per-node=4 or h100:4, or --gres=gpu:h100:4."""
    text = options.get("gpus-per-node") or next(
        (part for part in options.get("gres", "").split(",") if part.startswith("gpu")), "0"
    )
    count = text.rpartition(":")[2]
    return int(count) if count.isdigit() else 1


def _installed_gpus() -> int:
    return sum(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev"))
