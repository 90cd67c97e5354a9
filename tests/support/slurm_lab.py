"""A real Slurm of several nodes on this machine, started and stopped by the tests or from the command line.

    python tests/support/slurm_lab.py up [DIRECTORY]      prints the variables to export
    python tests/support/slurm_lab.py down [DIRECTORY]

Each node is a network, host name, mount and process namespace on a bridge, which needs root; without it, the nodes are
several slurmd on the loopback addresses 127.0.0.1, 127.0.0.2, ... Nothing outside of the directory is changed. Only
processes whose number and start time were recorded there are ever signalled.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.daemons import Daemons
from tests.support.slurm_config import write_configuration

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
USABLE_STATES = ("idle", "mixed", "allocated", "completing")


def missing_programs() -> list[str]:
    """What would have to be installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=SYSTEM_PATH) is None]


def can_use_namespaces() -> bool:
    """Whether this process may make network namespaces and bridges."""
    probe = "ip link add vx type veth peer name vy && ip link add bx type bridge"
    command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", probe]
    if shutil.which("ip", path=SYSTEM_PATH) is None or shutil.which("unshare") is None:
        return False
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


class SlurmLab:
    """One cluster. Its methods wait until what they ask for has happened."""

    def __init__(self, directory: Path, *, nodes: int = 4, grace: int = 5, namespaces: bool | None = None,
                 die_with_us: bool = False) -> None:  # fmt: skip
        self.directory = directory.resolve()
        self.daemons = Daemons(self.directory, die_with_us=die_with_us)
        self.record = self.directory / "lab.json"
        if self.record.exists():
            saved = json.loads(self.record.read_text())
        else:
            use = can_use_namespaces() if namespaces is None else namespaces
            saved = {"namespaces": use, "count": nodes, "grace": grace, "index": self._free_index()}
        self.saved: dict[str, Any] = saved
        self.namespaces, self.index = bool(saved["namespaces"]), int(saved["index"])
        self.configuration = self.directory / "etc" / "slurm.conf"
        self.bridge = f"slab{self.index}"

    @property
    def nodes(self) -> list[str]:
        """Names of the nodes; they resolve to their addresses on every node."""
        numbers = range(1, self.saved["count"] + 1)
        return [f"node{number:02d}" if self.namespaces else f"127.0.0.{number}" for number in numbers]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that lead Slurm's programs to this cluster, and keep those of another out."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))
        }
        path = f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_PATH}"
        return inherited | {"SLURM_CONF": str(self.configuration), "PATH": path}

    def start(self) -> None:
        """Start munge, the controller and all nodes; a failure leaves nothing behind."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.directory.chmod(0o755)
        self.record.write_text(json.dumps(self.saved))
        port = self._port(0)
        nodes = {
            name: (self._address(number), self._port(1 if self.namespaces else number))
            for number, name in enumerate(self.nodes, 1)
        }
        controller = self._address(0) if self.namespaces else "127.0.0.1"
        write_configuration(self.directory, nodes, controller, port, hostnames=self.namespaces,
                            grace=self.saved["grace"], first_job=1000 * (1 + self.index))  # fmt: skip
        try:
            if self.namespaces:
                self._ip("link", "add", self.bridge, "type", "bridge")
                self._ip("addr", "add", f"{controller}/24", "dev", self.bridge)
                self._ip("link", "set", self.bridge, "up")
            munge = self.directory / "munge"
            files = [f"--{name}-file={munge}/munged.{name}" for name in ("pid", "log", "seed")]
            self.daemons.start("munged", ["munged", "--foreground", "--force", f"--key-file={munge}/munge.key",
                                   f"--socket={munge}/munge.socket", *files], self.environment)  # fmt: skip
            self.daemons.wait(lambda: self._ok("munge", "-n", "-S", f"{munge}/munge.socket"), "munge", ["munged"])
            self.daemons.start("slurmctld", ["slurmctld", "-D", "-f", str(self.configuration)], self.environment)
            self.daemons.wait(lambda: "UP" in self.run("scontrol", "ping"), "the controller", ["slurmctld"])
            for node in self.nodes:
                self._start_node(node)
            names = [f"node-{node}" for node in self.nodes]
            self.daemons.wait(lambda: list(self._states().values()) == ["idle"] * len(nodes), "the nodes", names)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End everything that was started, jobs included."""
        if self.daemons.pid("slurmctld"):
            with contextlib.suppress(subprocess.SubprocessError):
                if ids := self.run("squeue", "-h", "-o", "%A").split():
                    self.run("scancel", *set(ids), check=False)
        for node in self.nodes:
            self.daemons.kill(f"node-{node}", signal.SIGKILL)
            if not self.namespaces:
                self._kill_processes_of(node)
        for name in ("slurmctld", "munged"):
            self.daemons.kill(name, signal.SIGTERM)
        for node in self.nodes if self.namespaces else ():
            self._ip("link", "del", self._link(node), check=False)
            self._ip("netns", "del", self._netns(node), check=False)
        if self.namespaces:
            self._ip("link", "del", self.bridge, check=False)
        self.record.unlink(missing_ok=True)

    def run(self, *command: str, check: bool = True, timeout: float = 30) -> str:
        """Run a program on the login side; returns what it printed."""
        environ = self.environment
        program = shutil.which(command[0], path=environ["PATH"]) or command[0]
        done = subprocess.run([program, *command[1:]], env=environ, stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=timeout, cwd=self.directory, check=False)  # fmt: skip
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}{done.stdout}")
        return done.stdout

    def power_off(self, node: str) -> None:
        """Lose a node and everything on it at once, and let the controller know."""
        self.daemons.kill(f"node-{node}", signal.SIGKILL)
        if not self.namespaces:
            self._kill_processes_of(node)
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=power")

    def kill_slurmd(self, node: str) -> None:
        """The daemon dies, the node's tasks live on."""
        os.kill(self._slurmd(node), signal.SIGKILL)

    def cut(self, node: str) -> None:
        """Take the node off the network; needs namespaces."""
        self._ip("link", "set", self._link(node), "down")

    def heal(self, node: str) -> None:
        """Put the node back on the network. Slurm does not ask for a node that is down by itself."""
        self._ip("link", "set", self._link(node), "up")
        self._resume(node)

    def boot(self, node: str) -> None:
        """Start a node, or only its daemon, again."""
        self._start_node(node)
        self._resume(node)

    def _resume(self, node: str) -> None:
        def resumed() -> bool:
            state = self._states().get(node, "")
            if state.startswith(("down", "drain")):
                self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)
            return state in USABLE_STATES

        self.daemons.wait(resumed, f"{node} to come back")

    def _states(self) -> dict[str, str]:
        """By node; a * at the end means that it does not answer."""
        lines = self.run("sinfo", "-hN", "-p", "normal", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines)

    def _free_index(self) -> int:
        links = {name for _, name in socket.if_nameindex()}
        for index in range(20):
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", 16810 + 20 * index))
                if f"slab{index}" not in links:
                    return index
        raise RuntimeError("20 clusters run already")

    def _port(self, number: int) -> int:
        # Below the ports that jobs choose for their rendezvous.
        return 16810 + 20 * self.index + number

    def _address(self, number: int) -> str:
        return f"10.77.{self.index}.{1 + 10 * bool(number) + number}" if self.namespaces else f"127.0.0.{number}"

    def _netns(self, node: str) -> str:
        return f"{self.bridge}-{node}"

    def _link(self, node: str) -> str:
        return f"{self.bridge}v{node[4:]}"

    def _ip(self, *arguments: str, check: bool = True) -> None:
        self.run("ip", *arguments, check=check)

    def _ok(self, *command: str) -> bool:
        self.run(*command)
        return True

    def _start_node(self, node: str) -> None:
        if not self.namespaces:
            slurmd = ["slurmd", "-D", "-f", str(self.configuration), "-N", node]
            self.daemons.start(f"node-{node}", slurmd, self.environment | {"SLURM_LAB_NODE": node})
            return
        netns, link = self._netns(node), self._link(node)
        if not Path("/run/netns", netns).exists():
            self._ip("netns", "add", netns)
        if link not in {name for _, name in socket.if_nameindex()}:
            self._ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", netns)
            self._ip("link", "set", link, "master", self.bridge)
            self._ip("-n", netns, "addr", "add", f"{self._address(int(node[4:]))}/24", "dev", "eth0")
            self._ip("-n", netns, "link", "set", "lo", "up")
            self._ip("-n", netns, "link", "set", "eth0", "up")
        self._ip("link", "set", link, "up")
        # The node's first process waits for this file to start slurmd.
        (self.directory / "pids" / f"boot-{node}").touch()
        self.daemons.start(f"node-{node}", [
            "nsenter", f"--net=/run/netns/{netns}", "unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc",
            "--kill-child=SIGKILL", sys.executable, str(Path(__file__).resolve()), "node", str(self.directory), node,
        ], self.environment)  # fmt: skip

    def _slurmd(self, node: str) -> int:
        """The node's slurmd as it is numbered here."""
        recorded = self.daemons.pid(f"node-{node}")
        if recorded is None:
            raise RuntimeError(f"{node} is off")
        if not self.namespaces:
            return recorded
        level = [recorded]
        for _ in range(3):
            level = [
                int(child)
                for pid in level
                for file in Path(f"/proc/{pid}/task").glob("*/children")
                for child in file.read_text().split()
            ]
            for pid in level:
                if Path(f"/proc/{pid}/comm").read_text().strip() == "slurmd":
                    return pid
        raise RuntimeError(f"{node} runs no slurmd")

    def _kill_processes_of(self, node: str) -> None:
        """Without namespaces: slurmstepd and tasks of this cluster's node, told by their environment."""
        configuration = f"SLURM_CONF={self.configuration}".encode()
        names = {f"SLURM_LAB_NODE={node}".encode(), f"SLURMD_NODENAME={node}".encode()}
        for file in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                environ = set(file.read_bytes().split(b"\0"))
                if configuration in environ and environ & names and int(file.parent.name) != os.getpid():
                    os.kill(int(file.parent.name), signal.SIGKILL)


def run_node(directory: Path, node: str) -> None:
    """The first process of a node's namespaces: sets it up, starts slurmd when told to, and takes in orphans."""
    socket.sethostname(node)
    run = subprocess.check_call
    run(["mount", "--bind", str(directory / "etc" / "hosts"), "/etc/hosts"])
    run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm"])
    boot = directory / "pids" / f"boot-{node}"
    slurmd = None
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    while True:
        if boot.exists() and slurmd is None:
            boot.unlink()
            slurmd = os.fork()
            if slurmd == 0:
                os.setsid()
                os.execvp("slurmd", ["slurmd", "-D", "-f", os.environ["SLURM_CONF"]])
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                slurmd = None if ended == slurmd else slurmd
        time.sleep(0.05)


def main(arguments: list[str]) -> int:
    """up and down, for working by hand; node is what a node runs."""
    verb, *rest = arguments
    directory = Path(rest[0] if rest else ".slurm")
    if verb == "node":
        run_node(directory, rest[1])
    elif verb == "up":
        lab = SlurmLab(directory)
        lab.start()
        print(f"export SLURM_CONF={lab.configuration} SCALING_TEST_SLURM_DIRECTORY={lab.directory}")
    elif verb == "down":
        SlurmLab(directory).stop()
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
