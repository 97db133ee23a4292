"""What hardware means for a run: described by trees of /proc and /sys files, as nodes have them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from slurmft.core import process
from slurmft.core.config import JobConfig
from slurmft.core.errors import SlurmftError, UsageError
from slurmft.core.files import write_json
from slurmft.core.text import numbers
from slurmft.node import ccl, hardware, heartbeat, profiles
from slurmft.node.hardware import Hardware, as_list
from slurmft.node.preparation import training_environment
from slurmft.node.profiles import Profile, bind_rank, choose
from slurmft.node.rendezvous import Rendezvous
from tests.conftest import Done, assert_two_lines, records, slurmft
from tests.support import prepared
from tests.support.ccl import BINDING, SETVARS, stand_in, torch_version
from tests.support.cluster import Cluster

NO_BINDING = pytest.mark.skipif(
    find_spec("oneccl_bindings_for_pytorch") is not None,
    reason="the binding, whose absence is tested, is installed here",
)
SAPPHIRE_RAPIDS = "fpu avx2 avx512f avx512_vnni avx512_bf16 amx_bf16 amx_tile amx_int8"


def node(
    root: Path,
    *,
    sockets: int = 2,
    numa_per_socket: int = 1,
    cores: int = 32,
    threads: int = 2,
    flags: str = SAPPHIRE_RAPIDS,
    vendor: str = "GenuineIntel",
    gpus: int = 0,
    files: dict[str, str] | None = None,
    **environment: str,
) -> Hardware:
    """A node of so many cores a socket, numbered as Linux does: all first threads come first."""
    found = {
        "proc/cpuinfo": f"vendor_id : {vendor}\nmodel name : a CPU\nflags : {flags}\n",
        "proc/meminfo": "MemTotal:  263840412 kB\n",
        "sys/devices/system/cpu/online": f"0-{sockets * cores * threads - 1}",
        **(files or {}),
    }
    for number in range(sockets * cores * threads):
        place = number % (sockets * cores)
        folder = f"sys/devices/system/cpu/cpu{number}"
        numa = place * numa_per_socket // cores
        found |= {
            f"{folder}/topology/physical_package_id": str(place // cores),
            f"{folder}/topology/core_id": str(place % cores),
            f"{folder}/node{numa}/here": "",
        }
    found |= {f"dev/nvidia{number}": "" for number in range(gpus)}
    for name, text in found.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return hardware.detect(environment, root)


def settings(profile: Profile) -> dict[str, str]:
    return {s.name: s.value for s in profile.settings()}


def test_two_sockets_of_sapphire_rapids(tmp_path: Path) -> None:
    found = node(tmp_path)
    assert hardware.computes_bf16(found.flags)
    assert found.memory_mib == 257656
    assert (len(found.cpus), len(found.cores), found.threads_per_core) == (128, 64, 2)
    profile = choose(found, JobConfig(nodes=2))
    assert (profile.name, profile.nproc) == ("xeon", 2)
    # no second threads
    assert [as_list(cores) for cores in profile.cores] == ["0-31", "32-63"]
    assert settings(profile)["OMP_NUM_THREADS"] == "32"
    assert settings(profile)[profiles.CORES] == "0-31;32-63"


@pytest.mark.parametrize("profile", ["cpu", "xeon"])
def test_a_lost_answer_of_dns_holds_nobody_up_for_5_s(
    profile: str, tmp_path: Path
) -> None:
    """torch asks for the name of each peer at every connection to its stores."""
    chosen = choose(node(tmp_path), JobConfig(profile=profile))
    assert settings(chosen)["RES_OPTIONS"] == "timeout:1 attempts:5"
    users = {"RES_OPTIONS": "timeout:3"}
    assert "RES_OPTIONS" not in profiles.merge(chosen.settings(), users)


@pytest.mark.parametrize("profile", ["cpu", "xeon"])
def test_tests_fork_what_a_node_starts(profile: str, tmp_path: Path) -> None:
    """A variable that libraries read at their import would have each torchrun import them anew."""
    chosen = choose(node(tmp_path), JobConfig(profile=profile))
    hosts = ("n1", "n2")
    rendezvous = Rendezvous(hosts=hosts, node_rank=0, port=1, check_port=2, id="1")
    variables = training_environment(chosen, rendezvous, {})
    assert profiles.USE_CPU in variables
    assert prepared.read_at_import(variables) == {}


def test_rank_that_mpi_has_bound(tmp_path: Path) -> None:
    """It sees its own cores alone: fewer than there are ranks on the node."""
    hardware_of_rank = node(tmp_path, sockets=1, cores=2, threads=1)
    job = JobConfig(nproc_per_node=4)
    with pytest.raises(UsageError, match="gives this job 2 core"):
        choose(hardware_of_rank, job, for_rank=True)
    profile = choose(hardware_of_rank, job, for_rank=True, is_bound=True)
    assert profile.cores == ((0, 1),) * 4
    assert settings(profile)["OMP_NUM_THREADS"] == "2"


def test_one_process_a_numa_node(tmp_path: Path) -> None:
    """Sub-NUMA clustering: four parts of two sockets."""
    profile = choose(node(tmp_path, numa_per_socket=2), JobConfig())
    assert [as_list(cores) for cores in profile.cores] == [
        "0-15",
        "16-31",
        "32-47",
        "48-63",
    ]
    assert choose(node(tmp_path), JobConfig(profile="cpu")).nproc == 2


def test_cores_set_aside_for_oneccl(tmp_path: Path) -> None:
    profile = choose(node(tmp_path), JobConfig(), uses_ccl=True)
    assert [as_list(cores) for cores in profile.comm_cores] == ["28-31", "60-63"]
    found = settings(profile)
    assert found["OMP_NUM_THREADS"] == "28"
    assert found["CCL_WORKER_COUNT"] == "4"
    assert found["CCL_WORKER_AFFINITY"] == "28,29,30,31,60,61,62,63"
    assert found["CCL_ATL_TRANSPORT"] == "ofi"
    assert found["CCL_PROCESS_LAUNCHER"] == "none"
    # Its own threads, which poll, bind themselves to the others.
    assert found[profiles.CORES] == "0-27;32-59"


def test_no_core_for_oneccl(tmp_path: Path) -> None:
    """Its thread would poll on the core that computes."""
    one_core = choose(node(tmp_path, cores=1), JobConfig(nodes=2), uses_ccl=True)
    assert one_core.comm_cores == ((), ())
    assert settings(one_core)["CCL_WORKER_OFFLOAD"] == "0"
    # else PMI's variables decide
    assert settings(one_core)["CCL_ATL_TRANSPORT"] == "ofi"
    assert settings(one_core)["CCL_PROCESS_LAUNCHER"] == "none"
    some = node(tmp_path / "some", SLURM_CPUS_PER_TASK="16")
    shared = choose(some, JobConfig(nodes=2), uses_ccl=True)
    # which core, nobody knows
    assert (shared.pinned, shared.comm_cores) == (False, ((),))
    assert not any("CCL" in name for name in settings(choose(some, JobConfig())))


def test_one_process_sends_nothing(tmp_path: Path) -> None:
    profile = choose(node(tmp_path, sockets=1), JobConfig(), uses_ccl=True)
    assert settings(profile)["OMP_NUM_THREADS"] == "32"


@pytest.mark.processes  # of the binding's setvars.sh, where it is installed
def test_interface_of_oneccl(tmp_path: Path) -> None:
    """Its libfabric would take any; a user's own choice stays."""
    rendezvous = Rendezvous(
        hosts=("a", "b"), node_rank=0, port=1, check_port=2, id="1", interface="lo"
    )
    names = ("GLOO_SOCKET_IFNAME", "FI_TCP_IFACE", "CCL_KVS_IFACE")
    profile = choose(node(tmp_path), JobConfig(nodes=2), uses_ccl=True)
    found = training_environment(profile, rendezvous, {})
    assert [found[name] for name in names] == ["lo"] * 3
    one_host = Rendezvous(hosts=("a",), node_rank=0, port=1, check_port=2, id="1")
    assert (
        training_environment(profile, one_host, {"FI_TCP_IFACE": "ib0"})["FI_TCP_IFACE"]
        == "ib0"
    )
    gloo = choose(node(tmp_path), JobConfig(nodes=2))
    assert "FI_TCP_IFACE" not in training_environment(gloo, rendezvous, {})


@pytest.mark.processes  # of the binding's setvars.sh, where it is installed
def test_network_of_oneccl_is_no_shared_memory(tmp_path: Path) -> None:
    """On one node it may be; a user's own choice stays."""
    two_hosts = Rendezvous(
        hosts=("a", "b"), node_rank=0, port=1, check_port=2, id="1", interface="lo"
    )
    one_host = dataclasses.replace(two_hosts, hosts=("a",))
    may_have_others = dataclasses.replace(one_host, elastic=True)
    profile = choose(node(tmp_path), JobConfig(nodes=2), uses_ccl=True)
    for rendezvous in (two_hosts, may_have_others):
        variables = training_environment(profile, rendezvous, {})
        assert variables["FI_PROVIDER"] == "^shm,sm2"
    for provider in ("verbs", ""):
        users_own = {"FI_PROVIDER": provider}
        variables = training_environment(profile, two_hosts, users_own)
        assert variables["FI_PROVIDER"] == provider
    assert "FI_PROVIDER" not in training_environment(profile, one_host, {})
    gloo = choose(node(tmp_path), JobConfig(nodes=2))
    assert "FI_PROVIDER" not in training_environment(gloo, two_hosts, {})


def test_what_slurm_and_cgroups_really_grant(tmp_path: Path) -> None:
    some = node(tmp_path, SLURM_CPUS_PER_TASK="16")  # 16 threads are 8 cores
    assert len(some.cores) == 8
    profile = choose(some, JobConfig())
    # other jobs may be there, and no mask says which cores are ours
    assert not profile.pinned
    assert "other jobs may share the node" in profile.pinning
    assert profiles.CORES not in settings(profile)
    quota = {
        "proc/self/cgroup": "0::/job_7\n",
        "sys/fs/cgroup/job_7/cpu.max": "400000 100000\n",
    }
    quota["sys/fs/cgroup/job_7/memory.max"] = str(2**34)
    limited = node(tmp_path / "v2", files=quota)
    assert (len(limited.cores), limited.memory_mib) == (4, 2**14)
    old = {"proc/self/cgroup": "3:cpu,cpuacct:/job\n", "sys/fs/cgroup/cpu/job/x": ""}
    old |= {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000"}
    old |= {"sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}
    assert node(tmp_path / "v1", files=old).quota_cpus == 2


def test_container_with_a_part_of_its_host(tmp_path: Path) -> None:
    """A quota says how much, not which cores: others of the host would bind to the same."""
    quota = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "800000 100000\n"}
    pod = node(tmp_path / "v2", files=quota)
    assert len(pod.cores) == 8
    profile = choose(pod, JobConfig(), uses_ccl=True)
    assert (profile.pinned, profile.nproc) == (False, 1)
    assert not {profiles.CORES, "CCL_WORKER_AFFINITY", "KMP_AFFINITY"} & set(
        settings(profile)
    )
    # Of version 1, whose paths are the host's, the container sees its own part alone.
    host = {"proc/self/cgroup": "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n"}
    host |= {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "800000"}
    host |= {"sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}
    host |= {"sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**34)}
    found = node(tmp_path / "v1", files=host)
    assert (len(found.cores), found.memory_mib) == (8, 2**14)


def test_kernel_that_does_not_know_the_cores(tmp_path: Path) -> None:
    """It writes -1, as virtual machines and some boards have it: every CPU is a core."""
    known = node(tmp_path, sockets=1, cores=4, threads=1)
    for cpu in known.cpus:
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu.number}/topology"
        (folder / "core_id").write_text("-1")
        (folder / "physical_package_id").write_text("-1")
    assert len(hardware.detect({}, tmp_path).cores) == 4


def test_more_processes_than_cores(tmp_path: Path) -> None:
    small = node(tmp_path, sockets=1, cores=2, threads=1)
    with pytest.raises(
        UsageError, match=r"--nproc-per-node 3, but .* gives this job 2 core"
    ):
        choose(small, JobConfig(nproc_per_node=3))
    simulated = choose(small, JobConfig(nproc_per_node=3), part=(1, 2))
    assert (simulated.nproc, simulated.pinned) == (3, False)


def test_gpus_and_the_cores_near_them(tmp_path: Path) -> None:
    lines = "".join(
        f"{i}, GPU-{i}, Tesla V100-SXM2-16GB, 7.0, 16160, 00000000:{0x15 + i:X}:00.0\n"
        for i in range(4)
    )
    for i in range(4):
        file = tmp_path / f"sys/bus/pci/devices/0000:{0x15 + i:x}:00.0/local_cpulist"
        file.parent.mkdir(parents=True)
        file.write_text("0-19" if i < 2 else "20-39")
    known = hardware.parse_nvidia_smi(lines, tmp_path)
    assert known["GPU-3"].precision == "fp16"
    assert known["2"].near_cpus == tuple(range(20, 40))
    here = node(tmp_path, cores=20, threads=1)
    fields = {name: getattr(here, name) for name in Hardware.__slots__}
    gpus = tuple(known[str(i)] for i in range(4))
    profile = choose(Hardware(**fields | {"gpus": gpus}), JobConfig())
    assert (profile.name, profile.nproc) == ("gpu", 4)
    assert [as_list(cores) for cores in profile.cores] == [
        "0-9",
        "10-19",
        "20-29",
        "30-39",
    ]
    with pytest.raises(UsageError, match=r"--nproc-per-node 5, but \S+ has 4 GPUs\n"):
        choose(Hardware(**fields | {"gpus": gpus}), JobConfig(nproc_per_node=5))


@pytest.mark.processes
def test_gpus_without_nvidia_smi(tmp_path: Path) -> None:
    found = node(tmp_path, gpus=2)
    assert [gpu.name for gpu in found.gpus] == ["0", "1"]
    assert node(tmp_path, CUDA_VISIBLE_DEVICES="").gpus == ()
    named = node(tmp_path, CUDA_VISIBLE_DEVICES="1,GPU-ab")
    assert [gpu.name for gpu in named.gpus] == ["1", "GPU-ab"]
    assert [gpu.name for gpu in node(tmp_path, CUDA_VISIBLE_DEVICES="1,-1,2").gpus] == [
        "1"
    ]


def mi300(count: int, first: int = 2) -> dict[str, str]:
    """Files of a node with so many MI300X, after the nodes of its CPUs."""
    files = {"dev/kfd": ""}
    topology = "sys/class/kfd/kfd/topology/nodes"
    for number in range(first):
        text = "cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\ndrm_render_minor 0\n"
        files[f"{topology}/{number}/properties"] = text
    for gpu in range(count):
        minor, device = 128 + gpu, f"sys/class/drm/renderD{128 + gpu}/device"
        files |= {
            f"{topology}/{first + gpu}/properties": "cpu_cores_count 0\nsimd_count 1216\n"
            f"gfx_target_version 90402\ndrm_render_minor {minor}\n",
            f"dev/dri/renderD{minor}": "",
            f"{device}/mem_info_vram_total": str(192 * 2**30),
            f"{device}/local_cpulist": "0-31" if gpu < count / 2 else "32-63",
        }
    return files


def test_amd_gpus(tmp_path: Path) -> None:
    """They have no /dev/nvidia*: the node would train on its CPUs."""
    here = node(tmp_path, files=mi300(4), flags="avx2", vendor="AuthenticAMD")
    (first, *_), profile = here.gpus, choose(here, JobConfig())
    assert (first.vendor, first.model, first.capability) == ("AMD", "gfx942", 9.4)
    assert (first.memory_mib, first.precision) == (192 * 2**10, "bf16")
    assert (profile.name, profile.nproc) == ("gpu", 4)
    assert [as_list(cores) for cores in profile.cores] == [
        "0-15",
        "16-31",
        "32-47",
        "48-63",
    ]
    found = settings(profile)
    assert found[profiles.GPUS] == "4 AMD"
    # ROCm has no such segments in all versions
    assert "PYTORCH_ALLOC_CONF" not in found
    (tmp_path / "dev/dri/renderD129").unlink()  # a container with some of them
    assert len(hardware.detect({}, tmp_path).gpus) == 3


@pytest.mark.parametrize("version", ["100306", "90012", "110000"])
def test_radeons_of_desktops_are_no_gpus(version: str, tmp_path: Path) -> None:
    """A Ryzen's own (gfx1036, gfx90c), and a card (gfx1100)."""
    files = {k: t.replace("90402", version) for k, t in mi300(1).items()}
    assert (
        choose(node(tmp_path, files=files, vendor="AuthenticAMD"), JobConfig()).name
        == "cpu"
    )


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        # HIP numbers what ROCr leaves it
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, ["0", "1"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ["1"]),
        ({"HIP_VISIBLE_DEVICES": "3"}, ["3"]),
        ({"CUDA_VISIBLE_DEVICES": "0,2"}, ["0", "2"]),  # HIP reads it, too
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        ({"ZE_AFFINITY_MASK": "0"}, ["0", "1", "2", "3"]),
    ],
)
def test_variables_that_choose_among_amd_gpus(
    variables: dict[str, str], names: list[str], tmp_path: Path
) -> None:
    node(tmp_path, files=mi300(4))
    here = hardware.detect(variables, tmp_path)
    assert [gpu.name for gpu in here.gpus] == names
    if "2,3" in variables.get("ROCR_VISIBLE_DEVICES", ""):
        assert here.gpus[0].near_cpus == tuple(range(32, 64))
    assert hardware.select(here.gpus[:1]) == (
        {"HIP_VISIBLE_DEVICES": names[0]} if names else {"CUDA_VISIBLE_DEVICES": ""}
    )


def intel_gpu(root: Path, minor: int, bus: str, pci_class: str, tiles: int = 0) -> None:
    device = root / f"sys/devices/pci{bus[:7]}/{bus}"
    device.mkdir(parents=True)
    for name, text in {
        "vendor": "0x8086",
        "class": pci_class,
        "local_cpulist": "0-31",
    }.items():
        (device / name).write_text(f"{text}\n")
    for tile in range(tiles):
        (device / f"tile{tile}").mkdir()
    drm = root / f"sys/class/drm/renderD{minor}"
    drm.mkdir(parents=True)
    (drm / "device").symlink_to(device)
    (root / "dev/dri").mkdir(parents=True, exist_ok=True)
    (root / f"dev/dri/renderD{minor}").touch()


def test_intel_gpus(tmp_path: Path) -> None:
    # a Max 1550: two devices
    intel_gpu(tmp_path, 128, "0000:29:00.0", "0x038000", tiles=2)
    intel_gpu(tmp_path, 129, "0000:4d:00.0", "0x038000")
    here = node(tmp_path)
    assert [f"{gpu.vendor} {gpu.name}" for gpu in here.gpus] == [
        "Intel 0",
        "Intel 1",
        "Intel 2",
    ]
    assert settings(choose(here, JobConfig()))[profiles.GPUS] == "3 Intel"
    masked = hardware.detect(
        {"ZE_AFFINITY_MASK": "0.1,2", "CUDA_VISIBLE_DEVICES": ""}, tmp_path
    )
    assert [gpu.name for gpu in masked.gpus] == ["0.1", "2"]
    assert hardware.select(masked.gpus) == {"ZE_AFFINITY_MASK": "0.1,2"}


@pytest.mark.parametrize(
    ("bus", "pci_class"),
    [
        ("0000:00:02.0", "0x030000"),
        ("0000:00:02.0", "0x038000"),
        ("0000:03:00.0", "0x030000"),
    ],
)
def test_graphics_of_a_desktop_are_no_gpus(
    bus: str, pci_class: str, tmp_path: Path
) -> None:
    """A processor's own, without a screen, too; and a card that drives one."""
    intel_gpu(tmp_path, 128, bus, pci_class)
    assert choose(node(tmp_path), JobConfig()).name == "xeon"


MIG = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5b)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4)
  MIG 1g.5gb+me   Device  1: (UUID: MIG-ba72)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-77aa)
"""


def test_mig_instances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "0, GPU-5d5b, NVIDIA A100-SXM4-40GB, 8.0, 40960, 00000000:07:00.0\n"
    whole = hardware.parse_nvidia_smi(lines, tmp_path)
    known = hardware.parse_mig(MIG, whole)
    assert known.keys() == {"MIG-c6d4", "MIG-ba72"}
    one = known["MIG-c6d4"]
    assert (one.model, one.capability) == ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 8.0)
    assert (one.memory_mib, known["MIG-ba72"].memory_mib) == (20 * 1024, 5 * 1024)
    answers = {"--query-gpu": lines, "-L": MIG}
    monkeypatch.setattr(
        "slurmft.core.process.output",
        lambda command, _: next(
            t for k, t in answers.items() if command[1].startswith(k)
        ),
    )
    here = node(tmp_path, gpus=1, CUDA_VISIBLE_DEVICES="MIG-c6d4,MIG-ba72")
    assert [gpu.model.split()[-1] for gpu in here.gpus] == ["3g.20gb", "1g.5gb+me"]
    assert choose(here, JobConfig()).nproc == 1  # CUDA shows a process one alone
    with pytest.raises(
        UsageError, match="2 GPUs, as MIG instances, of which torch and NCCL can"
    ):
        choose(here, JobConfig(nproc_per_node=2))


@pytest.mark.processes
def test_one_visible_gpu_for_each_rank_of_mpirun(tmp_path: Path) -> None:
    """Its ranks find out whether it is their own; a node's one task knows that it is not."""
    here = node(tmp_path, gpus=4, CUDA_VISIBLE_DEVICES="3")
    job = JobConfig(nproc_per_node=4)
    assert len(choose(here, job, for_rank=True).cores) == 4
    with pytest.raises(UsageError, match=r"--nproc-per-node 4, but \S+ has 1 GPUs"):
        choose(here, job)


@pytest.mark.processes
def test_a_node_with_gpus_that_computes_on_cpus(tmp_path: Path) -> None:
    here = node(tmp_path, gpus=4)
    for job in (
        JobConfig(profile="cpu"),
        JobConfig(backend="gloo"),
        JobConfig(backend="ccl"),
    ):
        profile = choose(here, job)
        assert (profile.name != "gpu", profile.nproc) == (True, 2)
        assert settings(profile)[profiles.GPUS] == "0"
    assert choose(here, JobConfig(profile="gpu", backend="gloo")).name == "gpu"
    assert profiles.GPUS not in settings(choose(node(tmp_path / "none"), JobConfig()))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.8.0+cu128", "PYTORCH_CUDA_ALLOC_CONF"),
        ("2.13.0+cu130", "PYTORCH_ALLOC_CONF"),
    ],
)
def test_allocator_that_keeps_no_fragments(
    version: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda package: version)
    found = settings(choose(node(tmp_path, gpus=2), JobConfig()))
    assert found[name] == "expandable_segments:True"
    assert found[profiles.GPUS] == "2 NVIDIA"
    assert sum("ALLOC_CONF" in each for each in found) == 1


@pytest.mark.processes
def test_nvidia_smi_is_asked_once_a_node(tmp_path: Path) -> None:
    """By the node's task. Its ranks are told what it found, though one sees its own cores alone."""
    told = {"host": "n1", "cpus": list(range(128)), "gpus": [{"name": "0"}]}
    write_json(heartbeat.hardware_file(tmp_path), told)
    code = "from slurmft.node import hardware\nfrom slurmft.train.loop import environment\n"
    code += "hardware.detect = None\n"
    code += "print(environment.describe_node()['hardware']['cpus'][-1], hardware.computes_bf16())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {heartbeat.FOLDER: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split()[:1] == ["127"], done.stderr


def test_profile_that_the_node_cannot_serve(tmp_path: Path) -> None:
    amd = node(tmp_path, flags="avx2", vendor="AuthenticAMD")
    assert choose(amd, JobConfig()).name == "cpu"
    with pytest.raises(
        UsageError, match=r"looked at CUDA_VISIBLE_DEVICES and .* /sys/class/kfd"
    ):
        choose(amd, JobConfig(profile="gpu"))
    with pytest.raises(UsageError, match="has no AVX-512"):
        choose(amd, JobConfig(profile="xeon"))


def test_what_the_user_has_set_wins(tmp_path: Path) -> None:
    profile = choose(node(tmp_path), JobConfig())
    assert "OMP_NUM_THREADS" not in profiles.merge(
        profile.settings(), {"OMP_NUM_THREADS": "7"}
    )
    lines = profiles.describe(profile, {"OMP_NUM_THREADS": "7"})
    assert lines[0] == "OMP_NUM_THREADS=7  # yours (else 32)"
    nothing = {"OMP_NUM_THREADS": ""}  # said as well as any value
    assert "OMP_NUM_THREADS" not in profiles.merge(profile.settings(), nothing)
    assert (
        profiles.describe(profile, nothing)[0] == "OMP_NUM_THREADS=  # yours (else 32)"
    )


def test_libraries_where_distributions_put_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    (tmp_path / "venv" / "lib").mkdir(parents=True)
    (tmp_path / "venv" / "lib" / "libiomp5.so").touch()
    conda = tmp_path / "conda" / "lib"
    conda.mkdir(parents=True)
    (conda / "libtcmalloc.so.4").touch()
    monkeypatch.setenv("CONDA_PREFIX", str(conda.parent))
    found = settings(choose(node(tmp_path / "node"), JobConfig()))
    preloads = found["LD_PRELOAD"].split(":")
    assert f"{tmp_path}/venv/lib/libiomp5.so" in preloads
    assert any("libtcmalloc" in path for path in preloads)
    assert found["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    shared = choose(node(tmp_path / "node", SLURM_CPUS_PER_TASK="16"), JobConfig())
    assert "KMP_AFFINITY" not in settings(shared)  # all would bind to the first cores
    (tmp_path / "a b").mkdir()
    # LD_PRELOAD ends at a space
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "a b"))
    (tmp_path / "a b" / "lib").mkdir()
    (tmp_path / "a b" / "lib" / "libx.so").touch()
    assert profiles.find_library(("libx.so",)) is None


def test_lists_of_cpus() -> None:
    assert numbers("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert as_list([8, 0, 1, 2, 3, 11, 10]) == "0-3,8,10-11"
    assert numbers("") == []


def test_rank_that_may_not_use_its_cores() -> None:

    with pytest.raises(
        SlurmftError, match="cannot bind this rank to the cores 4000"
    ) as error:
        bind_rank({profiles.CORES: "0;4000", "LOCAL_RANK": "1"})
    assert "cores that it may use" in str(error.value.hint)


# --- oneCCL ---------------------------------------------------------------------------------------


def train_on_ccl(folder: Path, *more: str, nodes: int = 2, **variables: str) -> Done:
    """A training with the stand-in; torch's own kernels, for one core."""
    env = stand_in(folder / "lib", torch_version()) | variables
    flags = (
        "--cluster",
        "local",
        "--nodes",
        str(nodes),
        "--runs-dir",
        str(folder),
        *more,
    )
    return slurmft(
        "submit", "--follow", *flags, "--batch-size", "8", env=env, imported=True
    )


@pytest.mark.processes
def test_ccl_is_wired(tmp_path: Path) -> None:
    """Also beside variables that oneCCL would take for those of an mpirun."""
    done = train_on_ccl(
        tmp_path,
        "--max-steps",
        "2",
        PMI_RANK="0",
        PMI_SIZE="1",
        CCL_STAND_IN="fast",
    )
    assert done.code == 0, done.err
    assert done.result["backend"] == "ccl"  # auto takes it where it is faster
    assert done.out.count("collectives: ccl: a gradient of ") == 1
    for rank in (0, 1):
        log = done.run.rank_log(rank).read_text()
        assert "made by the stand-in" in log
        (pid,) = re.findall(r"process (\d+)", log)
        assert not list(Path("/dev/shm").glob(f"{pid}:*"))


@pytest.mark.processes
@pytest.mark.parametrize(
    "flags",
    [
        ("--nproc-per-node", "2", "--precision", "bf16", "--grad-comm", "bf16"),
        ("--grad-comm", "local:2", "--optimizer", "muon"),
    ],
)
def test_ccl_can_do_what_is_asked_of_it(flags: tuple[str, ...], tmp_path: Path) -> None:
    done = train_on_ccl(tmp_path, "--max-steps", "4", "--backend", "ccl", *flags)
    assert done.code == 0, done.err
    for rank in range(done.result["world_size"]):
        assert "CCL_ERROR" not in done.run.rank_log(rank).read_text()


@pytest.mark.processes
@NO_BINDING
@pytest.mark.parametrize("more", [(), ("--setup", "true")])
def test_ccl_that_is_not_here(more: tuple[str, ...], tmp_path: Path) -> None:
    """Refused before there is a run, unless --setup may load a module that has it."""
    flags = (
        "--cluster",
        "local",
        "--backend",
        "ccl",
        "--runs-dir",
        str(tmp_path / "r"),
    )
    done = slurmft("submit", "--dry-run", *flags, *more)
    if more:
        assert done.code == 0, done.err
    else:
        problem = "--backend ccl: oneccl_bindings_for_pytorch is not installed"
        assert_two_lines(done, problem)
    assert not (tmp_path / "r").exists()


@pytest.mark.extra("faults")
@pytest.mark.processes
def test_ranks_that_do_not_connect(tmp_path: Path) -> None:
    """The watchdog does not wait as long as for a start: all ranks are there."""
    flags = ("--hang-timeout-s", "4", "--max-requeues", "0", "--max-steps", "2")
    done = train_on_ccl(tmp_path, "--backend", "ccl", *flags, FI_PROVIDER="shm")
    assert done.code != 0
    assert "(connect, after step 0)" in done.err


@pytest.mark.processes
def test_what_the_binding_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists grow; mpirun's own library does not give way to the one that the binding brings."""
    env = stand_in(tmp_path, torch_version())
    script = tmp_path / "oneccl_bindings_for_pytorch" / "env" / "setvars.sh"
    script.write_text(
        f"{SETVARS}export I_MPI_ROOT=/its/own CCL_ROOT=/its/ccl\n"
        'export LD_LIBRARY_PATH="/its/lib:$LD_LIBRARY_PATH"\n'
    )
    monkeypatch.syspath_prepend(env["PYTHONPATH"])
    monkeypatch.setenv("I_MPI_ROOT", "/of/mpirun")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/my/lib")
    binding = ccl.find()
    assert binding is not None
    assert binding.environment() == {
        "CCL_ROOT": "/its/ccl",
        "FROM_SETVARS": "yes",
        "LD_LIBRARY_PATH": "/its/lib:/my/lib",
    }


@pytest.mark.processes
def test_ccl_for_another_torch(tmp_path: Path) -> None:
    env = stand_in(tmp_path / "lib", "1.13.0")
    flags = ("--cluster", "local", "--max-steps", "1", "--runs-dir", str(tmp_path))
    done = slurmft(
        "submit", "--follow", *flags, "--batch-size", "8", env=env, imported=True
    )
    assert done.code == 0, done.err
    assert done.result["backend"] == "gloo"
    (warning,) = records(done.run, "warning")
    words = "oneccl_bindings_for_pytorch 1.13.0 was built for another torch than"
    assert f"collectives use gloo; on {os.uname().nodename}: {words}" in warning["text"]
    done = slurmft(
        "submit", "--follow", "--backend", "ccl", *flags, env=env, imported=True
    )
    assert done.code == 2
    assert "1.13.0 was built for another torch" in done.err
    hint = ccl.hint()
    assert hint in done.err
    assert ("install oneccl_bind_pt==2.8.*" in hint) == torch_version().startswith(
        "2.8."
    )
    assert "--backend gloo" in hint


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        ("2.7.1", "install oneccl_bind_pt==2.7.*"),
        ("2.9.0a0+git", "and this is torch 2.9"),
        (None, "install oneccl_bind_pt==2.8.*"),
    ],
)
def test_advice_is_for_the_torch_of_the_program(
    torch: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = json.dumps({"origin": None, "torch": torch, "version": None})
    monkeypatch.setattr(
        process, "output", lambda command, timeout_s, **_: f"{answer}\n"
    )
    with pytest.raises(UsageError) as error:
        ccl.check("ccl", f"/env-with-torch-{torch}/bin/python")
    assert expected in str(error.value.hint)


@pytest.mark.extra("faults")
@pytest.mark.processes
def test_ccl_that_one_node_cannot_import(tmp_path: Path) -> None:
    """auto does without it, on all nodes; whoever asks for it is told why, and where."""
    breaks = "raise ImportError('libccl.so.1: cannot open shared object file')"
    module = f"import os\nif os.environ['SLURMFT_LOCAL_NODE'] == '1':\n    {breaks}\n{BINDING}"
    env = stand_in(tmp_path / "lib", torch_version(), module)
    flags = (
        "--cluster",
        "local",
        "--nodes",
        "2",
        "--max-steps",
        "1",
        "--runs-dir",
        str(tmp_path),
    )
    done = slurmft(
        "submit", "--follow", *flags, "--batch-size", "8", env=env, imported=True
    )
    assert done.code == 0, done.err
    assert done.result["backend"] == "gloo"
    words = (
        f"on {os.uname().nodename}: oneccl_bindings_for_pytorch cannot be imported: libccl.so.1: "
        "cannot open shared object file"
    )
    (warning,) = records(done.run, "warning")
    cause = f"on {os.uname().nodename}: ImportError: libccl.so.1: cannot open shared object file"
    assert warning["text"] == f"collectives use gloo; ccl fails {cause}"
    assert done.out.count(warning["text"]) == 1
    done = slurmft(
        "submit", "--follow", "--backend", "ccl", *flags, env=env, imported=True
    )
    assert done.code == 2
    assert f"--backend ccl {words}" in done.err
    for rank in range(2):
        assert f"--backend ccl {words}" in done.run.rank_log(rank).read_text()


@pytest.mark.processes
@NO_BINDING
def test_ccl_that_one_node_lacks(tmp_path: Path) -> None:
    """Its task fails at once, and the other node's ends with it."""
    lib, hides = (
        stand_in(tmp_path / "lib", torch_version())["PYTHONPATH"],
        tmp_path / "hides",
    )
    hides.mkdir()
    (hides / "sitecustomize.py").write_text(
        "import os, sys\n"
        f"if os.environ.get('SLURMFT_LOCAL_NODE') == '1': sys.path.remove({lib!r})\n"
    )
    env = {"PYTHONPATH": os.pathsep.join([str(hides), lib, *sys.path])}
    flags = (
        "--cluster",
        "local",
        "--nodes",
        "2",
        "--backend",
        "ccl",
        "--runs-dir",
        str(tmp_path),
    )
    done = slurmft("submit", "--follow", *flags, env=env)
    assert done.code == 2
    words = f"--backend ccl on {os.uname().nodename}: oneccl_bindings_for_pytorch is not installed"
    assert words in done.err


def test_backends_that_are_not_here() -> None:
    with pytest.raises(UsageError, match="is not installed") as error:
        ccl.check("ccl", sys.executable)
    assert "--backend gloo" in str(error.value.hint)
    ccl.check("auto", sys.executable)


# --- on real nodes --------------------------------------------------------------------------------


@pytest.mark.processes
def test_doctor_node_here() -> None:
    done = slurmft("doctor", "node", "--here", "--nproc-per-node", "1")
    assert done.code == 0, done.err
    lines = dict(
        line.split("  ", 1) for line in done.out.splitlines() if "  " in line[:12]
    )
    assert os.uname().nodename in lines["host"]
    assert "OMP_NUM_THREADS=" in done.out
    assert slurmft("doctor", "node", "--here", "--profile", "gpu").code == 2


@pytest.mark.slurm
def test_ranks_are_bound_to_their_cores(idle_cluster: Cluster, tmp_path: Path) -> None:
    """Two processes on a node that is all theirs."""
    flags = (
        "--nodes",
        "1",
        "--cpus-per-task",
        "2",
        "--nproc-per-node",
        "2",
        "--max-steps",
        "2",
    )
    done = slurmft(
        "submit", "--follow", *flags, "--runs-dir", str(tmp_path), env=idle_cluster.env
    )
    assert done.code == 0, done.err
    environment = json.loads(done.run.environment.read_text())
    assert [rank["cores"] for rank in environment["ranks"]] == ["0", "1"]
    assert [rank["allotted_cores"] for rank in environment["ranks"]] == ["0", "1"]
    assert environment["ranks"][0]["hardware"]["slurm_cpus"] == 2
    doctor = slurmft("doctor", "node", "--nodes", "2", env=idle_cluster.env)
    assert doctor.code == 0, doctor.err
    hosts = [x.split()[1] for x in doctor.out.splitlines() if x.startswith("host")]
    assert sorted(hosts) == ["n1", "n2"]
