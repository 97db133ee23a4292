"""Diagnostic rules: pure functions from the nodes' answers to checks."""

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from slurmft.core.filesystem import FileSystem, Room
from slurmft.core.text import aligned, in_bytes, some
from slurmft.plugins.examine.checks import Check, Level, failure, ok, warning
from slurmft.plugins.examine.login import check_room

_SLOW_LINK, _ONE_SLOW_LINK = 0.5, 0.25
_SLOW_DEVICE, _LITTLE_MEMORY = 0.8, 0.9
"""Shares of the median below which a node is slow. Links of one switch differ more than devices."""
_SKEW_S, _BAD_SKEW_S = 0.5, 30.0
"""Failures of ranks are ordered by their times, to half a second; credentials of munge and of the
hub's addresses expire within minutes."""
_ALL_PAIRS = 8
"""Up to so many nodes try to reach each other in all pairs."""

Answers = dict[str, Any]
"""By node."""


# --- comparisons ----------------------------------------------------------------------------------


def group_by_value(values: Mapping[str, Any]) -> dict[Any, list[str]]:
    """Value -> the names that have it, the most common value first."""
    found: dict[Any, list[str]] = {}
    for name, value in values.items():
        found.setdefault(value, []).append(name)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def by_value(values: Mapping[str, Any]) -> str:
    """As text: "n1, n3: this; n2: that"."""
    return "; ".join(f"{some(names)}: {value}" for value, names in group_by_value(values).items())


def of_groups(checks: Mapping[str, Check]) -> list[Check]:
    """The nodes' checks; nodes with the same text are one line."""
    groups = group_by_value({name: check.text for name, check in checks.items()})
    return [
        dataclasses.replace(checks[names[0]], text=f"{some(names)}: {text}")
        for text, names in groups.items()
    ]


def differ(values: Mapping[str, Any]) -> bool:
    return len(set(values.values())) > 1


def slow_ones(values: Mapping[str, float], ratio: float) -> dict[str, float]:
    """Those whose value is below `ratio` times the median, each with its share of the median.

    Of two values the larger is the median: one of the pair is slow, the other one shows it.
    """
    if len(values) < 2:
        return {}
    middle = statistics.median_high(values.values())
    return {name: v / middle for name, v in values.items() if middle > 0 and v < ratio * middle}


def blame(pairs: Iterable[tuple[str, str]]) -> list[tuple[list[str], list[str]]]:
    """Failed connections (from, to), grouped by the node that most of them have in common: (all who
    cannot reach, all whom they cannot reach), one of them a single node. So few lines name all
    pairs: a node that nobody reaches is one line, as is one that reaches nobody."""
    left, found = set(pairs), []
    while left:
        groups: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
        for start, goal in sorted(left):
            groups.setdefault(("to", goal), ([], [goal]))[0].append(start)
            groups.setdefault(("from", start), ([start], []))[1].append(goal)
        found.append(max(groups.values(), key=lambda ends: len(ends[0]) + len(ends[1])))
        left -= set(itertools.product(*found[-1]))
    return found


# --- what a node is -------------------------------------------------------------------------------


def cores(facts: Answers, requested: int | None) -> list[Check]:
    """Whether a job gets the cores that it asks for, and that Slurm counts."""
    found = {}
    hint = "tell the site: the node's definition in Slurm or its cgroups do not fit its hardware"
    for name, fact in facts.items():
        counted, mask = fact["hardware"]["slurm_cpus"], fact["mask_cpus"]
        quota = fact["hardware"]["quota_cpus"]
        text = f"{fact['cores']} core(s) to compute on"
        text += f"; Slurm counts {counted} CPU(s)" if counted is not None else ""
        text += f", the affinity mask has {mask}"
        text += f", the cgroup's quota is {quota:g}" if quota is not None else ""
        text += f"; {requested} were requested" if requested is not None else ""
        usable = mask if quota is None else min(mask, quota)
        short = usable < (counted or 0) or (counted or mask) < (requested or 0)
        found[name] = warning("cores", text, hint) if short else ok("cores", text)
    checks = of_groups(found)
    counts = {n: f["cores"] for n, f in facts.items()}
    if differ(counts):
        hint = "the node with the fewest cores sets the pace: choose nodes by --constraint"
        checks.append(warning("cores", f"not the same on all nodes: {by_value(counts)}", hint))
    return checks


def devices(facts: Answers, requested: int | None) -> list[Check]:
    """What computes: the GPUs, or the CPUs and their instruction sets."""
    kinds = {}
    for name, fact in facts.items():
        here = fact["hardware"]
        gpus = [gpu["model"] for gpu in here["gpus"]]
        cpu = f"CPU {here['model']} ({', '.join(here['flags']) or 'no AVX'})"
        kinds[name] = f"{len(gpus)} x {', '.join(sorted(set(gpus)))}" if gpus else cpu
    few = [n for n, f in facts.items() if len(f["hardware"]["gpus"]) < (requested or 0)]
    checks = []
    if few:
        hint = "check the site's GRES, and CUDA_VISIBLE_DEVICES in --setup lines"
        text = f"{some(few)}: fewer GPUs than the {requested} requested"
        checks.append(failure("devices", text, hint))
    if differ(kinds):
        hint = "a job is as fast as its slowest node: choose nodes by --constraint"
        text = f"not the same on all nodes: {by_value(kinds)}"
        return [*checks, warning("devices", text, hint)]
    return [*checks, ok("devices", by_value(kinds))]


def memory(facts: Answers) -> list[Check]:
    """Memory of each node, and which has little."""
    total = {n: float(f["hardware"]["memory_mib"]) for n, f in facts.items()}
    free = {n: float(f["available_mib"]) for n, f in facts.items()}
    found = []
    for name, share in slow_ones(total, _LITTLE_MEMORY).items():
        text = f"{name} has {total[name]:,.0f} MiB, {share:.0%} of the median"
        found.append(warning("memory", text, "tell the site: a memory module may have failed"))
    least = min(free, key=lambda name: free[name])
    text = f"at least {min(total.values()):,.0f} MiB for a job; available now: at least "
    text += f"{free[least]:,.0f} MiB ({least})"
    return found or [ok("memory", text)]


def versions(facts: Answers, here: Mapping[str, str | None]) -> list[Check]:
    """Whether all nodes, and this host, run the same Python with the same packages."""
    found = []
    for what, version in here.items():
        values = {n: f["software"][what] for n, f in facts.items()} | {"this host": version}
        if differ(values):
            hint = "use one environment, on a file system that all nodes see"
            found.append(failure("versions", f"{what} differs: {by_value(values)}", hint))
    same = ", ".join(f"{what} {version}" for what, version in here.items())
    return found or [ok("versions", f"the same on all nodes as on this host: {same}")]


def hub(facts: Answers) -> list[Check]:
    """Which nodes reach the hub; a run whose nodes differ uses the caches where they do not."""
    without = [name for name, fact in facts.items() if not fact["hub"]]
    if not without:
        return [ok("hub on nodes", "all nodes reach it")]
    if len(without) == len(facts):
        return [ok("hub on nodes", "no node reaches it: runs use the caches there")]
    hint = "fill the caches from a node that reaches it, or use folders: --model, --data"
    return [warning("hub on nodes", f"{some(without)} do not reach it, others do", hint)]


# --- the network ----------------------------------------------------------------------------------


def fabric(networks: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[Check]:
    """Which interface a run's collectives use, and whether a node has a better one."""
    texts, better = {}, {}
    for name, interface in chosen.items():
        known = {n[0]: n for n in networks[name]}
        _, _, speed, words = known.get(interface, (interface, False, 0, str(interface or "any")))
        texts[name] = words
        if known and interface is not None:
            best, is_infiniband, its_speed, its_words = networks[name][0]
            if best != interface and (is_infiniband or (speed and its_speed > 1.5 * speed)):
                better[name] = its_words
    text = f"collectives use {by_value(texts)}"
    if better:
        hint = "--interface NAME, or --host-suffix where the fabric has host names of its own"
        return [warning("fabric", f"{text}; faster interfaces are up: {by_value(better)}", hint)]
    return [ok("fabric", text, **texts)]


def partners(names: Sequence[str]) -> dict[str, list[str]]:
    """Whom each node tries to reach. In a ring of many these are the nodes 1, 2, 4, 8, ... places
    further on: what a node costs grows with the logarithm of their number, and each is in twice as
    many pairs, so that a bad node differs from a bad link."""
    count = len(names)
    steps = [1 << bit for bit in range((count - 1).bit_length())]
    steps = [*range(1, count)] if count <= _ALL_PAIRS else steps
    return {name: [names[(i + n) % count] for n in steps] for i, name in enumerate(names)}


def broken_pairs(seen: Answers) -> set[tuple[str, str]]:
    """(from, to) of all pairs of which one does not resolve, or not reach, the other."""
    return {pair for pairs in _problems(seen).values() for pair in pairs}


def reach(seen: Answers) -> list[Check]:
    """Names and ports of the pairs that were tried: from -> to -> what `Agent.reach` says of it."""
    if len(seen) < 2:
        return []
    found = []
    tried = {(start, goal) for start, goals in seen.items() for goal in goals}
    for (about, kind), pairs in _problems(seen).items():
        fine = [set(pair) for pair in tried - pairs.keys()]
        if not fine:
            why = ", ".join(dict.fromkeys(pairs.values()))
            found.append(_unreached(about, kind, some(list(seen)), "each other", why))
            continue
        for starts, goals in blame(pairs):
            why = ", ".join(dict.fromkeys(pairs[p] for p in itertools.product(starts, goals)))
            ends = {*starts, *goals}
            if len(ends) == 2 and all(any(pair & ends == {n} for pair in fine) for n in ends):
                why += "; both reach other nodes"
            found.append(_unreached(about, kind, some(starts), some(goals), why))
    failed = {check.about for check in found}
    if not failed:
        text = "" if len(seen) <= _ALL_PAIRS else f" {len(tried):,} pairs that were tried"
        text = f"all{text or ' pairs'} reach each other, on rendezvous and on ephemeral ports"
        found.append(ok("ports", text))
    if "names" not in failed:
        found.insert(0, ok("names", f"all {len(seen)} nodes resolve each other's names"))
    return found


def _problems(seen: Answers) -> dict[tuple[str, str], dict[tuple[str, str], str]]:
    """("names", "") or ("ports", which one) -> (from, to) -> why."""
    found: dict[tuple[str, str], dict[tuple[str, str], str]] = {}
    for start, goals in seen.items():
        for goal, what in goals.items():
            problems = {("names", ""): what["problem"]}
            problems |= {("ports", kind): why for kind, why in what.get("ports", {}).items()}
            for key, problem in problems.items():
                if problem:
                    found.setdefault(key, {})[start, goal] = problem
    return found


def _unreached(about: str, kind: str, starts: str, goals: str, why: str) -> Check:
    if about == "names":
        hint = "check /etc/hosts or the name service; --host-suffix if the fabric has its own names"
        return failure("names", f"{starts} cannot resolve {goals}: {why}", hint)
    user = "torchrun's store needs" if kind == "rendezvous" else "collectives need"
    port = f"{'an' if kind == 'ephemeral' else 'a'} {kind} port"
    hint = f"a firewall or a bad cable? {user} {kind} ports that are open between nodes"
    return failure("ports", f"{starts} cannot reach {goals} on {port}: {why}", hint)


def healthy(names: Sequence[str], broken: set[tuple[str, str]]) -> list[str]:
    """The nodes that are left when those with the most broken pairs are taken out."""
    left, pairs = list(names), set(broken)
    while pairs := {(a, b) for a, b in pairs if a in left and b in left}:
        counts = {n: sum(n in pair for pair in pairs) for n in left}
        left.remove(max(left, key=lambda n: counts[n]))
    return left


def clocks(seen: Answers) -> list[Check]:
    """Compares each clock with those of the nodes that reached its node, which are right unless
    most of them are wrong; of the same as `reach`."""
    ahead: dict[str, list[tuple[float, float]]] = {}
    for start, goals in seen.items():
        for goal, what in goals.items():
            if "ahead_s" in what and goal != start:
                unsure = what["round_trip_s"] / 2
                ahead.setdefault(goal, []).append((what["ahead_s"], unsure))
    off = {name: sorted(values)[len(values) // 2] for name, values in ahead.items()}
    found = []
    for name, (off_s, unsure) in off.items():
        if abs(off_s) - unsure > _SKEW_S:
            way = "ahead of" if off_s > 0 else "behind"
            text = f"{name} is {abs(off_s):.1f} s {way} the others (give or take {unsure:.3f} s)"
            level = failure if abs(off_s) > _BAD_SKEW_S else warning
            hint = "tell the site: the time service (chrony, ntpd) may not run there"
            found.append(level("clocks", text, hint, off_s=off_s))
    most = max((abs(off_s) for off_s, _ in off.values()), default=0.0)
    return found or ([ok("clocks", f"within {1000 * most:.1f} ms", most_s=most)] if off else [])


def rounds(names: Sequence[str]) -> list[list[tuple[str, str]]]:
    """The neighbours in a ring, in rounds in which no node is in two pairs."""
    if len(names) < 2:
        return []
    ring = [(name, names[(i + 1) % len(names)]) for i, name in enumerate(names)]
    last = [ring.pop()] if len(names) % 2 else []
    return [pairs for pairs in (ring[::2], ring[1::2], last) if pairs]


def links(rates: Mapping[tuple[str, str], float]) -> Iterator[Check]:
    """Bytes per second between neighbours; a node is as fast as the better one of its links."""
    if not rates:
        return
    best: dict[str, float] = {}
    for pair, rate in rates.items():
        best |= {name: max(rate, best.get(name, 0.0)) for name in pair}
    slow, middle = slow_ones(best, _SLOW_LINK), statistics.median_high(best.values())
    for name, share in slow.items():
        text = f"{name} is slow: {_gbit(best[name])}, {share:.0%} of the median"
        hint = "exclude it and tell the site: its cable, port or driver may be bad"
        yield warning("links", text, hint, bytes_s=best[name])
    for (start, goal), rate in rates.items():
        if slow.keys() & {start, goal} or rate >= _ONE_SLOW_LINK * middle:
            continue
        text = f"{start} to {goal} is slow: {_gbit(rate)}, {rate / middle:.0%} of the median; "
        hint = "tell the site: what lies between these two may be bad, or busy"
        yield warning("links", f"{text}both are fast with other nodes", hint, bytes_s=rate)
    text = f"one TCP connection carries {_gbit(middle)} (median of {len(best)} nodes; least "
    text += f"{_gbit(min(best.values()))})"
    yield ok("links", text, median_bytes_s=middle)


def _gbit(bytes_s: float) -> str:
    return f"{8 * bytes_s / 1e9:.3g} Gbit/s"


# --- folders --------------------------------------------------------------------------------------


def rooms(what: str, rooms: Mapping[str, Any]) -> list[Check]:
    """Free space in one kind of folder on each node; nodes with the same problem are one line."""
    about = f"{what} on nodes"
    checks = {name: _check_room(what, room) for name, room in rooms.items()}
    if bad := {name: check for name, check in checks.items() if check.level != Level.OK}:
        return [dataclasses.replace(check, about=about) for check in of_groups(bad)]
    least = min(room["free_bytes"] for room in rooms.values())
    where = "; ".join(dict.fromkeys(room["path"] for room in rooms.values()))
    return [ok(about, f"{where}: at least {in_bytes(least)} free on all nodes")]


def _check_room(what: str, room: Mapping[str, Any]) -> Check:
    if "free_bytes" not in room:
        return failure(what, f"no answer: {room['problem']}", "is the file system up?")
    text = f"{room['path']} on {FileSystem(**room['file_system'])}"
    figures = {name: room[name] for name in ("free_bytes", "free_inodes", "problem")}
    return check_room(what, text, Room(**figures))


# --- devices and collectives ----------------------------------------------------------------------


def torchrun(answers: Answers) -> list[Check]:
    """Why the measurement of devices and collectives did not finish, if it did not."""
    ended = {n: a["problem"] for n, a in answers.items() if a["problem"] and not a["late"]}
    if ended:  # the others only waited for these
        texts = group_by_value(ended).items()
        return [failure("all-reduce", f"{some(names)}: {text}") for text, names in texts]
    late = [n for n, a in answers.items() if a["late"]]
    slow = [n for n in late if not answers[n]["ranks"]]
    if slow:
        text = f"{some(slow)}: no process finished loading torch and a matmul within the time limit"
        hint = "allow more time: --within 120; is the file system slow?"
        return [warning("speeds", text, hint)]
    if late:
        text = f"{some(late)}: the processes started, but their collectives did not finish in time"
        hint = "allow more time (--within 120); if that does not help, they hang: try --interface"
        return [failure("all-reduce", text, hint)]
    return []


def matmul(ranks: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Check]:
    """The matmul throughput of each device, and the slow devices."""
    for precision in ("fp32", "bf16"):
        rates = {
            name if len(own) == 1 else f"{name} process {i}": float(rank["tflop_s"][precision])
            for name, own in ranks.items()
            for i, rank in enumerate(own)
        }
        if not rates:
            continue
        for name, share in slow_ones(rates, _SLOW_DEVICE).items():
            text = f"{name} is slow in {precision}: {rates[name]:.3g} TFLOP/s, {share:.0%} of "
            hint = "exclude it; possible causes: clock speed, cooling, other jobs, fewer cores"
            yield warning("matmul", f"{text}the median", hint, tflop_s=rates[name])
        middle = statistics.median(rates.values())
        text = f"{precision}: {middle:.3g} TFLOP/s per process (median of {len(rates)}; least "
        text += f"{min(rates.values()):.3g}, most {max(rates.values()):.3g})"
        yield ok("matmul", text, median_tflop_s=middle)


def all_reduce(ranks: Sequence[Mapping[str, Any]]) -> list[Check]:
    """The first rank's times, as a table."""
    first = next((rank for rank in ranks if rank.get("all_reduce")), None)
    if first is None:
        return []
    rows = [("size", "time", "each rank sends"), *(
        (in_bytes(row["bytes"]), f"{1e6 * row['seconds']:,.0f} us",
         f"{in_bytes(row['bus_bytes_s'])}/s" if row["bytes"] > 8 else "")
        for row in first["all_reduce"]
    )]  # fmt: skip
    table = "\n".join(aligned(rows))
    return [ok("all-reduce", f"by {first['backend']}, fp32\n{table}")]
