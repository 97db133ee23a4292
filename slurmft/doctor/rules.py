"""What follows from what the nodes said: pure functions, from answers to checks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from slurmft.core.filesystem import FileSystem, Room
from slurmft.core.text import aligned
from slurmft.doctor.checks import (
    Check,
    Level,
    blame,
    failure,
    ok,
    same_everywhere,
    slow_ones,
    warning,
)
from slurmft.doctor.login import judge_room, size

SLOW_LINK = 0.5
_SLOW_DEVICE, _LITTLE_MEMORY = 0.8, 0.9
"""Shares of the median that are worth a word. Links of one switch differ more than processors."""
_SKEW_S, _BAD_SKEW_S = 0.5, 30.0
"""Failures of ranks are put in order by their times, to half a second; credentials of munge and of
the hub's addresses end within minutes."""
_MOST_NAMES = 8

Answers = dict[str, Any]
"""By node."""


def some(names: Sequence[str]) -> str:
    """Names, not too many."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def cores(facts: Answers, asked: int | None) -> list[Check]:
    """Whether a job gets the cores that it asks for, and that Slurm counts."""
    texts, short = {}, []
    for name, fact in facts.items():
        counted, mask = fact["hardware"]["slurm_cpus"], fact["mask_cpus"]
        quota = fact["hardware"]["quota_cpus"]
        text = f"{fact['cores']} core(s) to compute on"
        text += f"; Slurm counts {counted} CPU(s)" if counted is not None else ""
        text += f", the affinity mask has {mask}"
        text += f", the cgroup's quota is {quota:g}" if quota is not None else ""
        text += f"; {asked} were asked for" if asked is not None else ""
        texts[name] = text
        really = mask if quota is None else min(mask, quota)
        if really < (counted or 0) or (asked is not None and (counted or mask) < asked):
            short.append(name)
    cure = "the node's definition in Slurm, or its cgroups, do not fit its hardware: tell the site"
    found = []
    for text, names in same_everywhere(texts).items():
        bad = [n for n in names if n in short]
        found.append(
            warning("cores", f"{some(names)}: {text}", cure)
            if bad
            else ok("cores", f"{some(names)}: {text}")
        )
    counts = same_everywhere({n: f["cores"] for n, f in facts.items()})
    if len(counts) > 1:
        words = "; ".join(f"{some(names)}: {count}" for count, names in counts.items())
        found.append(warning("cores", f"not the same on all nodes: {words}",
                             "the fewest decide how fast a step is: --constraint"))  # fmt: skip
    return found


def devices(facts: Answers, asked: int | None) -> list[Check]:
    """What computes: GPUs, or the CPUs with what they know."""
    kinds = {}
    for name, fact in facts.items():
        gpus = [gpu["model"] for gpu in fact["hardware"]["gpus"]]
        cpu = f"{fact['hardware']['model']} ({', '.join(fact['hardware']['flags']) or 'no AVX'})"
        kinds[name] = f"{len(gpus)} x {', '.join(sorted(set(gpus)))}" if gpus else f"CPU {cpu}"
    few = [n for n, f in facts.items() if len(f["hardware"]["gpus"]) < (asked or 0)]
    found = same_everywhere(kinds)
    checks = []
    if few:
        cure = "look at the site's GRES and at CUDA_VISIBLE_DEVICES in --setup lines"
        text = f"{some(few)}: fewer GPUs than the {asked} asked for"
        checks.append(failure("devices", text, cure))
    text = "; ".join(f"{some(names)}: {kind}" for kind, names in found.items())
    if len(found) > 1:
        cure = "a job is as fast as its slowest node: choose by --constraint"
        return [*checks, warning("devices", f"not the same on all nodes: {text}", cure)]
    return [*checks, ok("devices", text)]


def memory(facts: Answers) -> list[Check]:
    """Memory of each node, and who has little."""
    total = {n: float(f["hardware"]["memory_mib"]) for n, f in facts.items()}
    free = {n: float(f["available_mib"]) for n, f in facts.items()}
    found = []
    for name, share in slow_ones(total, _LITTLE_MEMORY).items():
        text = f"{name} has {total[name]:,.0f} MiB, {share:.0%} of the median"
        found.append(warning("memory", text, "tell the site: a module may have failed"))
    least = min(free, key=lambda name: free[name])
    text = f"{min(total.values()):,.0f} MiB or more for a job; available now: at least "
    text += f"{free[least]:,.0f} MiB ({least})"
    return found or [ok("memory", text)]


def versions(facts: Answers, here: Mapping[str, str | None]) -> list[Check]:
    """Whether all nodes, and this host, run the same Python with the same packages."""
    found, words = [], []
    for what, mine in here.items():
        values = {n: f["software"][what] for n, f in facts.items()} | {"this host": mine}
        groups = same_everywhere(values)
        words.append(f"{what} {mine}")
        if len(groups) > 1:
            text = "; ".join(f"{some(names)}: {value}" for value, names in groups.items())
            cure = "use one environment, on a file system that all nodes see"
            found.append(failure("versions", f"not one {what}: {text}", cure))
    kernels = same_everywhere({n: f["kernel"] for n, f in facts.items()})
    if len(kernels) > 1:
        text = "; ".join(f"{some(names)}: {kernel}" for kernel, names in kernels.items())
        found.append(warning("versions", f"not one kernel: {text}", "nodes were not all updated"))
    return found or [ok("versions", f"the same there as here: {', '.join(words)}")]


def hub(facts: Answers) -> list[Check]:
    """Which nodes reach the hub; a run whose nodes differ uses the caches where they do not."""
    without = [name for name, fact in facts.items() if not fact["hub"]]
    if not without:
        return [ok("hub there", "all nodes reach it")]
    if len(without) == len(facts):
        return [ok("hub there", "no node reaches it: runs use the caches there")]
    cure = "fill the caches from a node that reaches it, or use folders: --model, --data"
    return [warning("hub there", f"{some(without)} do not reach it, others do", cure)]


def fabric(networks: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[Check]:
    """Which interface a run's collectives take, and whether a node has a better one."""
    texts, better = {}, {}
    for name, interface in chosen.items():
        known = {n[0]: n for n in networks[name]}
        texts[name] = str(known[interface][3]) if interface in known else str(interface or "any")
        first = networks[name][0] if networks[name] else None
        if first is None or interface is None or first[0] == interface:
            continue
        speed = known[interface][2] if interface in known else 0
        if first[1] or (speed and first[2] > 1.5 * speed):
            better[name] = first[3]
    text = "; ".join(f"{some(n)}: {what}" for what, n in same_everywhere(texts).items())
    if better:
        there = "; ".join(f"{some(n)}: {what}" for what, n in same_everywhere(better).items())
        cure = "--interface NAME, or --host-suffix where the fabric has host names of its own"
        return [warning("fabric", f"collectives take {text}; faster ones are up, {there}", cure)]
    return [ok("fabric", f"collectives take {text}", **{n: str(t) for n, t in texts.items()})]


def broken_pairs(seen: Answers, names: Mapping[str, str]) -> set[tuple[str, str]]:
    """(from, to) of all pairs of which one does not find, or not reach, the other."""
    return {
        (start, names[host])
        for start, hosts in seen.items()
        for host, found in hosts.items()
        if names[host] != start and (found["problem"] or any(found["ports"].values()))
    }


def reach(seen: Answers, names: Mapping[str, str]) -> list[Check]:
    """Names and ports between all pairs.

    Args:
        seen: node -> host -> what `nodeprobe.Agent.reach` returns.
        names: host -> node.
    """
    found, problems = [], dict[tuple[str, str], dict[tuple[str, str], str]]()
    if len(seen) < 2:
        return []
    for start, hosts in seen.items():
        for host, what in hosts.items():
            goal = names[host]
            if goal == start:
                continue
            if what["problem"]:
                problems.setdefault(("names", ""), {})[start, goal] = what["problem"]
            for kind, problem in what.get("ports", {}).items():
                if problem:
                    problems.setdefault(("ports", kind), {})[start, goal] = problem
    for (about, kind), pairs in problems.items():
        for node, way, others in blame(pairs):
            ends = [(o, node) if way == "to" else (node, o) for o in others]
            why = ", ".join(dict.fromkeys(pairs[end] for end in ends))
            found.append(_unreached(about, kind, node, way, others, why))
    found += _odd_addresses(seen, names)
    told = [check.about for check in found]
    if "names" not in told:
        found.insert(0, ok("names", f"all {len(seen)} nodes find each other's names"))
    if "ports" not in told and "names" not in told:
        text = "all pairs reach each other, on rendezvous and on ephemeral ports"
        found.append(ok("ports", text))
    return found


def _unreached(
    about: str, kind: str, node: str, way: str, others: Sequence[str], why: str
) -> Check:
    starts, goals = (some(others), node) if way == "to" else (node, some(others))
    if about == "names":
        cure = "the hosts' /etc/hosts or name service; --host-suffix, if the fabric has own names"
        return failure("names", f"{starts} cannot resolve {goals}: {why}", cure)
    use = "torchrun's stores" if kind == "rendezvous" else "the collectives"
    cure = f"a firewall, or a cable: {use} need {kind} ports that are open between nodes"
    return failure("ports", f"{starts} cannot reach {goals} on a {kind} port: {why}", cure)


def _odd_addresses(seen: Answers, names: Mapping[str, str]) -> list[Check]:
    """Names that mean different addresses on different nodes, or the asking node itself."""
    found = []
    for host, node in names.items():
        known = {
            n: hosts[host]["address"]
            for n, hosts in seen.items()
            if n != node and hosts[host].get("address")
        }
        addresses = same_everywhere(known)
        if len(addresses) > 1:
            text = "; ".join(f"{some(who)}: {address}" for address, who in addresses.items())
            found.append(warning("names", f"{host} is not one address: {text}",
                                 "make the nodes' /etc/hosts agree"))  # fmt: skip
    return found


def healthy(names: Sequence[str], broken: set[tuple[str, str]]) -> list[str]:
    """The nodes that are left when those with the most broken pairs are taken out."""
    left, pairs = list(names), set(broken)
    while pairs := {(a, b) for a, b in pairs if a in left and b in left}:
        counts = {n: sum(n in pair for pair in pairs) for n in left}
        left.remove(max(left, key=lambda n: counts[n]))
    return left


def clocks(behind: Mapping[str, float], ways: Mapping[str, float]) -> list[Check]:
    """Clocks against the one in the middle.

    Args:
        behind: each clock's lead over one of them, in s.
        ways: the way there and back, in s, half of which is not known.
    """
    middle = statistics.median_low(behind.values())
    found = []
    for name, lead in behind.items():
        off, unsure = lead - middle, ways.get(name, 0.0) / 2
        if abs(off) - unsure > _SKEW_S:
            others = "the others" if len(behind) > 2 else next(n for n in behind if n != name)
            way = "ahead of" if off > 0 else "behind"
            text = f"{name} is {abs(off):.1f} s {way} {others} (give or take {unsure:.3f} s)"
            level = failure if abs(off) > _BAD_SKEW_S else warning
            cure = "its time service (chrony, ntpd) does not run: tell the site"
            found.append(level("clocks", text, cure, off_s=off))
    most = max(abs(lead - middle) for lead in behind.values())
    unsure = max(ways.values(), default=0.0) / 2
    text = f"within {1000 * most:.1f} ms (give or take {1000 * unsure:.1f} ms)"
    return found or [ok("clocks", text, most_s=most)]


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """The neighbours in a ring, in rounds in which no node is in two pairs."""
    if len(names) < 2:
        return []
    ring = [(name, names[(i + 1) % len(names)]) for i, name in enumerate(names)]
    last = [ring.pop()] if len(names) % 2 else []
    return [pairs for pairs in (ring[::2], ring[1::2], last) if pairs]


def best_links(rates: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """Each node's better link: a slow node has no fast one."""
    best: dict[str, float] = {}
    for pair, rate in rates.items():
        for name in pair:
            best[name] = max(rate, best.get(name, 0.0))
    return best


def links(rates: Mapping[tuple[str, str], float]) -> list[Check]:
    """Bytes a second between neighbours; a node is as fast as the better one of its links."""
    if not rates:
        return []
    best = best_links(rates)
    found = []
    for name, share in slow_ones(best, SLOW_LINK).items():
        text = f"{name} is slow: {_gbit(best[name])}, {share:.0%} of the median"
        found.append(warning("links", text, "its cable, port or driver: leave it out, tell the "
                             "site", bytes_s=best[name]))  # fmt: skip
    middle, least = statistics.median(best.values()), min(best.values())
    text = f"one TCP connection carries {_gbit(middle)} (median of {len(best)} nodes; least "
    return [*found, ok("links", f"{text}{_gbit(least)})", median_bytes_s=middle)]


def _gbit(bytes_s: float) -> str:
    return f"{8 * bytes_s / 1e9:.3g} Gbit/s"


def rooms(what: str, rooms: Mapping[str, Any]) -> list[Check]:
    """Room in one kind of folder on each node; those with the same words are one line."""
    found: dict[tuple[Level, str], list[str]] = {}
    last: dict[tuple[Level, str], Check] = {}
    for name, room in rooms.items():
        check = _judge_room(what, room)
        key = (check.level, check.text)
        found.setdefault(key, []).append(name)
        last[key] = check
    good = [key for key in found if key[0] == Level.OK]
    if len(good) == len(found):
        least = min(room["free_bytes"] for room in rooms.values())
        paths = same_everywhere({n: room["path"] for n, room in rooms.items()})
        where = "; ".join(str(path) for path in paths)
        return [ok(f"{what} there", f"{where} on all nodes: {size(least)} free or more")]
    return [
        Check(level=key[0], about=f"{what} there", text=f"{some(names)}: {key[1]}",
              cure=last[key].cure, figures=last[key].figures)
        for key, names in found.items() if key[0] != Level.OK
    ]  # fmt: skip


def _judge_room(what: str, room: Mapping[str, Any]) -> Check:
    if "free_bytes" not in room:
        return failure(what, f"no answer: {room['problem']}", "is the file system up?")
    text = f"{room['path']} on {FileSystem.of_fields(room['file_system'])}"
    return judge_room(what, text, Room(free_bytes=room["free_bytes"], problem=room["problem"],
                                       free_inodes=room["free_inodes"]))  # fmt: skip


def torchrun(answers: Answers) -> list[Check]:
    """Why the measurement of devices and collectives did not come to its end, if it did not."""
    ended = {n: a["problem"] for n, a in answers.items() if a["problem"] and not a["late"]}
    if ended:  # the others only waited for these
        texts = same_everywhere(ended).items()
        return [failure("all-reduce", f"{some(names)}: {text}") for text, names in texts]
    late = [n for n, a in answers.items() if a["late"]]
    slow = [n for n in late if not answers[n]["ranks"]]
    if slow:
        text = f"{some(slow)}: no process had loaded torch and multiplied when the time was over"
        return [warning("speeds", text, "give it more: --within 120; is the file system slow?")]
    if late:
        text = f"{some(late)}: the processes started, but their collectives did not end in time"
        cure = "give it more (--within 120); if that does not help, they hang: try --interface"
        return [failure("all-reduce", text, cure)]
    return []


def products(ranks: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Check]:
    """The rate of each device, and the slow ones."""
    found = []
    for precision in ("fp32", "bf16"):
        rates = {
            name if len(mine) == 1 else f"{name} process {i}": float(rank["tflop_s"][precision])
            for name, mine in ranks.items()
            for i, rank in enumerate(mine)
        }
        if not rates:
            continue
        for name, share in slow_ones(rates, _SLOW_DEVICE).items():
            text = f"{name} is slow in {precision}: {rates[name]:.3g} TFLOP/s, {share:.0%} of "
            cure = "clocks, cooling, other jobs on the node, or fewer cores: leave it out"
            found.append(warning("products", f"{text}the median", cure, tflop_s=rates[name]))
        middle = statistics.median(rates.values())
        text = f"{precision}: {middle:.3g} TFLOP/s a process (median of {len(rates)}; least "
        text += f"{min(rates.values()):.3g}, most {max(rates.values()):.3g})"
        found.append(ok("products", text, median_tflop_s=middle))
    return found


def all_reduce(ranks: Sequence[Mapping[str, Any]]) -> list[Check]:
    """The first rank's times, as a table."""
    first = next((rank for rank in ranks if rank.get("all_reduce")), None)
    if first is None:
        return []
    rows = [("size", "time", "each rank sends"), *(
        (size(row["bytes"]), f"{1e6 * row['seconds']:,.0f} us",
         f"{size(row['bus_bytes_s'])}/s" if row["bytes"] > 8 else "")
        for row in first["all_reduce"]
    )]  # fmt: skip
    table = "\n".join(aligned(rows))
    return [ok("all-reduce", f"by {first['backend']}, fp32\n{table}")]
