"""A real SLURM on this host: munge, slurmctld and slurmd "nodes", each in its own namespaces, as root.

A node is `slurmd -N nodeX` in its own UTS, PID, mount and network namespace: hostnames differ, a bridge joins them, and
killing the outer process is a power cut, after which nobody even refuses a connection. Nothing outside the state folder
is written; names of nodes are known inside the namespaces only.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CONFIG = """
ClusterName=tests
SlurmctldHost={host}({net}.254)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# seconds after which a requeued job may start again: its old credential has to expire (two minutes by default)
AuthInfo=socket={state}/munge/socket,cred_expire=8
StateSaveLocation={state}/ctld
SlurmdSpoolDir={state}/spool.%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd.%n.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/slurmd.%n.log
SlurmctldDebug=verbose
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1
SlurmctldTimeout=5
SlurmdTimeout={timeout}
KillWait=10
MinJobAge=600
Waittime=0
CompleteWait=0
MessageTimeout=10
TCPTimeout=2
ReturnToService=2
JobRequeue=1
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[1-2] NodeHostname={host} NodeAddr={net}.[1-2] Port=[{first}-{last}] CPUs=8 RealMemory=8000 Gres=gpu:4
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 State=UP
PartitionName=closed Nodes=ALL State=DOWN
"""
HOSTS = "127.0.0.1 localhost\n{net}.1 node1\n{net}.2 node2\n{net}.254 {host}\n"
INSIDE = """
hostname {node}
mount --bind {state}/hosts /etc/hosts
ip link set lo up
until ip link set {link} up 2>/dev/null; do sleep 0.02; done
ip addr add {net}.{number}/24 dev {link}
slurmd -D -N {node} & wait $!
"""


class Slurm:
    def __init__(self, state: Path, *, node_timeout_s: int = 5) -> None:
        self.state, self.timeout = state, node_timeout_s
        self.env = {"SLURM_CONF": str(state / "slurm.conf")}
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for folder in ("munge", "ctld", "dev"):
            (self.state / folder).mkdir(parents=True)
        self.state.chmod(0o755)
        self._claim()
        host, port = socket.gethostname().partition(".")[0], self._port
        about = {"state": self.state, "host": host, "net": self._net, "port": port}
        about["timeout"] = self.timeout
        (self.state / "slurm.conf").write_text(
            CONFIG.format(**about, first=port + 1, last=port + 2)
        )
        (self.state / "hosts").write_text(HOSTS.format(**about))
        self.run("ip", "addr", "add", f"{self._net}.254/24", "dev", self._bridge)
        self.run("ip", "link", "set", self._bridge, "up")
        (self.state / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for number in range(4):  # gres.conf requires character devices, such as copies of /dev/null
            os.mknod(self.state / f"dev/nvidia{number}", 0o666 | 0o020000, os.makedev(1, 3))
        (self.state / "gres.conf").write_text(
            f"AutoDetect=off\nName=gpu File={self.state}/dev/nvidia[0-3]\n"
        )
        self._munge()
        self.run("slurmctld")
        for node in ("node1", "node2"):
            self.power_on(node)

    def _claim(self) -> None:
        """A network and ports that no other suite on this host uses: a bridge's name exists only once."""
        for number in range(250):
            self._number, self._net, self._bridge = number, f"10.87.{number}", f"slurm{number}"
            self._port = 21000 + 3 * number
            add = f"ip link add {self._bridge} address {_mac(number, 254)} type bridge"
            if subprocess.run(add.split(), capture_output=True).returncode == 0:
                return
        raise AssertionError("no free bridge of slurm0 to slurm249; see `ip link`")

    def _munge(self) -> None:
        folder = self.state / "munge"
        key = folder / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        shutil.chown(folder, "munge", "munge")
        shutil.chown(key, "munge", "munge")
        files = [f"--{name}-file={folder}/{name}" for name in ("key", "pid", "log", "seed")]
        munged = ("munged", "--force", f"--socket={folder}/socket", *files)
        self.run("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", *munged)

    def address(self, node: str) -> str:
        return f"{self._net}.{node[-1]}"

    def power_on(self, node: str) -> None:
        log = (self.state / f"{node}.out").open("ab")
        number, plug = node[-1], f"{self._bridge}{node[-1]}"
        inside = INSIDE.format(
            state=self.state, node=node, link=f"{plug}i", net=self._net, number=number
        )
        spaces = ("--uts", "--pid", "--mount", "--net", "--fork", "--kill-child", "--mount-proc")
        process = self._nodes[node] = subprocess.Popen(
            ["unshare", *spaces, "bash", "-c", inside], env={**os.environ, **self.env},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        self.until(lambda: _child(process.pid))
        mac = _mac(self._number, int(number))
        peer = f"name {plug}i address {mac} netns {_child(process.pid)}"
        self.run(*f"ip link add {plug} type veth peer {peer}".split())
        self.run("ip", "link", "set", plug, "master", self._bridge, "up")
        self.until(lambda: _listens(f"{self._net}.{number}", self._port + int(number)))
        self.until(lambda: self._state(node) in ("idle", "mix", "alloc"))

    def ready(self) -> None:
        """Wait until both nodes take jobs. One that does not come back is switched off and on."""
        for node in ("node1", "node2"):
            deadline = time.monotonic() + 30
            while self._state(node) not in ("idle", "mix", "alloc", "comp"):
                if time.monotonic() > deadline:
                    print(f"{node} is {self._state(node)}\n{self._logs()}")
                    self.power_off(node)
                    self.power_on(node)
                    break
                time.sleep(0.1)

    def power_off(self, node: str) -> None:
        """Cut the network first, because a dying process would otherwise close its connections."""
        process = self._nodes.pop(node, None)
        if process is None:
            return
        subprocess.run(["ip", "link", "del", f"{self._bridge}{node[-1]}"], capture_output=True)
        process.kill()  # --kill-child also ends everything in the namespace
        process.wait()

    def stop(self) -> None:
        for call in (("scancel", "--user=root", "--quiet"), ("scontrol", "shutdown")):
            subprocess.run(call, env={**os.environ, **self.env}, timeout=20, capture_output=True)
        for node in list(self._nodes):
            self.power_off(node)
        for file in (self.state / "slurmctld.pid", self.state / "munge/pid"):
            _end(file)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)

    def run(self, *command: object) -> str:
        done = subprocess.run(
            list(map(str, command)),
            env={**os.environ, **self.env}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def field(self, job: str, name: str) -> str:
        return self.run(
            "squeue", "--noheader", "--states=all", f"--jobs={job}", f"--Format={name}:100"
        )

    def ends(self, job: str, state: str = "COMPLETED") -> None:
        """Wait for this end; raise at once on any other, with the job's last output."""
        living = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
        other = 0.0  # the time, because a requeued job shows the end of its last start for a moment

        def ended() -> bool:
            nonlocal other
            now = self.field(job, "state")
            other = 0.0 if now in (*living, state) else other or time.monotonic()
            if other and time.monotonic() - other > 30:
                output = Path(self.field(job, "stdout")).read_text()[-6000:]
                raise AssertionError(f"job {job} is {now}, not {state}\n{output}\n{self._logs()}")
            return now == state

        self.until(ended)

    def _state(self, node: str) -> str | None:
        """Return the state of a node; None while the controller does not answer yet."""
        ask = ["sinfo", "-hN", "-n", node, "-p", "main", "-o", "%t"]
        done = subprocess.run(
            ask, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=120
        )
        return None if done.returncode else done.stdout.strip()

    def inside(self, node: str, pattern: str) -> list[int]:
        """Find processes of a node by their command line; return the process ids on this host."""
        space = _child(self._nodes[node].pid)
        ask = ["pgrep", "--ns", str(space), "--nslist", "pid", "-f", pattern]
        found = subprocess.run(ask, capture_output=True, text=True).stdout
        return [int(pid) for pid in found.split()]

    def listening(self, pid: int) -> set[str]:
        """Addresses at which a process listens, in the network of its node; `::` as hex digits."""
        mine = set()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed meanwhile
                mine.add(link.readlink().name.removeprefix("socket:[").removesuffix("]"))
        found = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                local, _, state, *_, inode = line.split()[1:10]
                address = bytes.fromhex(local.partition(":")[0])
                if state == "0A" and inode in mine:  # LISTEN
                    found.add(socket.inet_ntoa(address[::-1]) if table == "tcp" else address.hex())
        return found

    def until(self, true: Callable[[], object], seconds: float = 900) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"waited {seconds} s in vain\n{self.run('squeue', '--states=all')}\n{self._logs()}"
                )
            time.sleep(0.1)

    def _logs(self) -> str:
        return "\n".join(
            f"{log.name}: {log.read_text()[-1500:]}" for log in sorted(self.state.glob("*.log"))
        )


def absent() -> str | None:
    """Return why SLURM cannot be started here."""
    tools = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "ip")
    missing = [name for name in tools if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}; `make system` installs SLURM from Debian's packages"
    if os.geteuid() != 0:
        return "SLURM's nodes are namespaces, which need root"
    bridge = f"probe{os.getpid() % 10**6}"
    probes = (
        ("unshare", "--uts", "--pid", "--mount", "--net", "--fork", "true"),
        ("ip", "link", "add", bridge, "type", "bridge"),
        ("ip", "link", "del", bridge),
    )
    for probe in probes:
        done = subprocess.run(probe, capture_output=True, text=True)
        if done.returncode:
            return f"no namespaces or bridges here: {done.stderr.strip()}"
    return None


@contextmanager
def running(state: Path) -> Iterator[Slurm]:
    slurm = Slurm(state)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def _mac(net: int, host: int) -> str:
    """A node keeps its MAC address: with another one, its neighbors could not reach it for seconds after a start."""
    return f"02:87:00:00:{net:02x}:{host:02x}"


def _child(pid: int) -> int | None:
    """Return the first process inside a node, once it exists."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _end(file: Path) -> None:
    """Whether the daemon of a pid file runs; a zombie has ended."""
    try:
        pid = int(file.read_text())
        os.kill(pid, signal.SIGTERM)
        for _ in range(100):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
    except (OSError, ValueError):
        return
